"""The texts by which an end is known: what llama-server, CUDA, the C library and the kernel say, and what each means.

llama-server exits with 1 for every failure that it notices, and aborts (SIGABRT) for those that CUDA or its own checks notice, so
that only its text tells them apart. Each text is one entry of :data:`RULES`: its name, where it is printed, what to look for, what
that means and what to do. The first entry that matches decides (``causes``); they stand from the most to the least specific, because
a load that fails prints a chain of lines of which the last (``exiting due to model loading error``) says least. A CUDA error stands
first: it always aborts, so what else is in the log came before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    """What sort of end it was: what can be done about it follows from this."""

    DEVICE_MEMORY = "device_memory"
    HOST_MEMORY = "host_memory"
    GRAPH_MEMORY = "graph_memory"
    """A CUDA graph found no room."""
    ILLEGAL_ACCESS = "illegal_access"
    """A kernel faulted on the card."""
    NO_CARD = "no_card"
    """It has no card, or lost it."""
    CUDA = "cuda"
    """Another CUDA error."""
    HANG = "hang"
    OUTSIDE = "outside"
    """Killed or stopped from outside."""
    OTHER = "other"


class Retry(Enum):
    """What to do about it."""

    SOON = "soon"
    """Start again with back-off."""
    LATER = "later"
    """Give up now; one trial after 10 minutes."""
    NEVER = "never"
    """It comes back at once if the same command is tried again."""


LOGS: Final = "llmctl logs"
BUILD: Final = "llmctl build"
CLOSE: Final = "close what else uses the card"
CHECK: Final = "check the file"
FETCH: Final = "delete that file, then llmctl up fetches it again"
PRESET: Final = "correct the preset: llmctl show lists what it sets"
MEMORY: Final = "close other programs, or take a smaller model or context"
DRIVER: Final = "upgrade the NVIDIA driver"
RESTART: Final = "restart the machine"
CARD: Final = "nvidia-smi, to see whether the card answers; if it doesn't, restart the machine"
SEAT: Final = "restart the machine; if it comes back, check the card's power cable and seat"
RELOAD: Final = "if it comes back: sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"


@dataclass(frozen=True, slots=True)
class Rule:
    """One text that tells why: ``pattern`` is searched in the whole log, line starts and ends are its ``^`` and ``$``."""

    name: str
    read: str
    """Where it is printed: a file and line of llama.cpp b11312, or whose words they are."""
    pattern: re.Pattern[str]
    text: str
    hint: str
    retry: Retry
    kind: Kind
    innocent: bool
    """Nothing that a request holds brings it about, although its kind might."""


def _rule(
    name: str,
    read: str,
    pattern: str,
    text: str,
    hint: str = LOGS,
    retry: Retry = Retry.SOON,
    kind: Kind = Kind.OTHER,
    innocent: bool = False,
) -> Rule:
    return Rule(name, read, re.compile(pattern, re.MULTILINE), text, hint, retry, kind, innocent)


def _cuda(
    number: str,
    messages: str,
    text: str,
    hint: str = LOGS,
    retry: Retry = Retry.SOON,
    kind: Kind = Kind.CUDA,
    innocent: bool = False,
) -> Rule:
    """A rule for what ``cudaGetErrorString`` (CUDA 13.0's libcudart) or ``cublasGetStatusString`` says of an error ``number``.

    It is printed after one of three heads: ggml-cuda.cu:105 (and aborts), :888 (no buffer) and :226 (no CUDA at all).
    """
    heads = "^CUDA error|cudaMalloc failed|failed to initialize CUDA"
    return _rule(f"cuda-{number}", f"CUDA {number}", rf"(?:{heads}): (?:{messages})$", text, hint, retry, kind, innocent)


NEVER, LATER = Retry.NEVER, Retry.LATER

CUDA_RULES: Final[tuple[Rule, ...]] = (
    # Words of cudaGraph…: CUDA_CHECK prints the statement two lines below the message, other threads' lines may come between.
    _rule(
        "graph-memory",
        "ggml/src/ggml-cuda/ggml-cuda.cu:4407, :4413, :2656",
        r"^CUDA error: out of memory$(?:\n.*){0,6}\n\s*cudaGraph(?:Instantiate|Launch)\(",
        "a CUDA graph found no room on the card",
        CLOSE,
        kind=Kind.GRAPH_MEMORY,
    ),
    _rule(
        "graph-update",  # any error of cudaGraphExecUpdate but the one it expects; the graph is new then, so it is most often memory
        "ggml/src/ggml-cuda/ggml-cuda.cu:2658",
        r"GGML_ASSERT\(stat == cudaSuccess\) failed",
        "a CUDA graph could not be updated, most likely for want of room on the card",
        CLOSE,
        kind=Kind.GRAPH_MEMORY,
    ),
    _rule(
        "no-device-code",  # printed by the kernel itself, which then traps: 719 or 715 follows
        "ggml/src/ggml-cuda/common.cuh:421",
        r"ERROR: CUDA kernel .* has no device code compatible with CUDA arch",
        "the engine was built for another card",
        BUILD,
        NEVER,
        kind=Kind.CUDA,
    ),
    _cuda("2", "out of memory|the resource allocation failed", "the card's memory ran out", CLOSE, kind=Kind.DEVICE_MEMORY),
    _cuda(
        "209", "no kernel image is available for execution on the device", "the engine was built for another card", BUILD, NEVER
    ),
    _cuda("200", "device kernel image is invalid", "the engine was built for another card", BUILD, NEVER),
    _cuda("35", "CUDA driver version is insufficient for CUDA runtime version", "the NVIDIA driver is too old", DRIVER, NEVER),
    _cuda("36", "API call is not supported in the installed CUDA driver", "the NVIDIA driver is too old", DRIVER, NEVER),
    _cuda(
        "222", r"the provided PTX was compiled with an unsupported toolchain\.?", "the NVIDIA driver is too old", DRIVER, NEVER
    ),
    _cuda(
        "34",
        "CUDA driver is a stub library",
        "the engine found the toolkit's stub instead of the driver",
        "take the folder named stubs out of LD_LIBRARY_PATH",
        NEVER,
    ),
    _cuda(
        "803",
        "system has unsupported display driver / cuda driver combination",
        "the NVIDIA driver's kernel module and library don't match",
        RESTART,
        LATER,
        kind=Kind.NO_CARD,
    ),
    _cuda("100", "no CUDA-capable device is detected", "the engine sees no card", CARD, LATER, kind=Kind.NO_CARD),
    _cuda("101", "invalid device ordinal", "the engine sees no such card", CARD, LATER, kind=Kind.NO_CARD),
    _cuda("802", "system not yet initialized", "the NVIDIA driver is not ready", CARD, LATER, kind=Kind.NO_CARD),
    _cuda("lost", "(?i:.*GPU (?:is )?lost.*|.*fallen off the bus.*)", "the card was lost", SEAT, LATER, kind=Kind.NO_CARD),
    _cuda(
        "46",  # the second wording is that of older runtimes
        r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy or unavailable"
        "|exclusive-thread device already in use by a different thread",
        "another program has the card for itself",
        "nvidia-smi, to see which program that is",
        innocent=True,
    ),
    _cuda("214", "uncorrectable ECC error encountered", "the card's memory failed (ECC)", RESTART, innocent=True),
    _cuda("3", "initialization error", "CUDA can't be initialized", CARD, innocent=True),
    _cuda("702", "the launch timed out and was terminated", "a kernel took too long for a card that drives a display"),
    # 700 and 714 to 719: an exception on the device while it executed a kernel (driver_types.h).
    _cuda(
        "700",
        "an illegal memory access was encountered|an access to GPU memory space failed",
        "a CUDA kernel faulted",
        kind=Kind.ILLEGAL_ACCESS,
    ),
    _cuda("716", "misaligned address", "a CUDA kernel faulted", kind=Kind.ILLEGAL_ACCESS),
    _cuda(
        "714 to 718",
        "hardware stack error|an illegal instruction was encountered|operation not supported on global/shared address space"
        "|invalid program counter",
        "a CUDA kernel faulted",
        kind=Kind.ILLEGAL_ACCESS,
    ),
    _cuda(
        "719",
        "unspecified launch failure(?: in prior launch)?|the function failed to launch on the GPU",
        "a CUDA kernel faulted",
        kind=Kind.ILLEGAL_ACCESS,
    ),
    _cuda("710", "device-side assert triggered", "a CUDA kernel failed one of its own checks", kind=Kind.ILLEGAL_ACCESS),
    _cuda(
        "900 to 908",
        "operation not permitted when stream is capturing|operation failed due to a previous error during capture"
        "|.*captur(?:e|ed|ing)\\b.*",
        "a CUDA graph could not be captured",
    ),
    _cuda("any", ".*", "a CUDA error"),
    # The message goes through a queue and may be lost in an abort; this line is written at once.
    _rule("cuda-abort", "ggml/src/ggml-cuda/ggml-cuda.cu:109", r"\.cu:\d+: CUDA error$", "a CUDA error", kind=Kind.CUDA),
)

MEMORY_RULES: Final[tuple[Rule, ...]] = (
    _rule(
        "device-buffer",
        "ggml/src/ggml-alloc.c:941, :1134; src/llama-model.cpp:1870, :1886",
        r"(?:failed|unable) to allocate CUDA\d+ buffer",
        "the card's memory ran out",
        CLOSE,
        kind=Kind.DEVICE_MEMORY,
    ),
    _rule(
        "host-buffer",
        "ggml/src/ggml-alloc.c:941, :1134; src/llama-model.cpp:1870; ggml/src/ggml-backend.cpp:2467",
        r"(?:failed|unable) to allocate (?:CPU\w*|CUDA_Host) buffer|failed to allocate buffer of size \d+",
        "the machine's memory ran out",
        MEMORY,
        kind=Kind.HOST_MEMORY,
    ),
    _rule(
        "host-malloc",
        "ggml/src/ggml.c:381, :413, :427; ggml/src/ggml-backend.cpp:856, :871",
        r"insufficient memory \(attempted to allocate|failed to allocate +[\d.]+ (?:MB|bytes)$",
        "the machine's memory ran out",
        MEMORY,
        kind=Kind.HOST_MEMORY,
    ),
    _rule(
        "host-mmap",
        "src/llama-mmap.cpp:484, :329",
        r"mmap failed: Cannot allocate memory|posix_memalign failed with error 12\b",
        "the machine's memory ran out",
        MEMORY,
        kind=Kind.HOST_MEMORY,
    ),
    _rule(
        "bad-alloc",
        "libstdc++; ggml/src/gguf.cpp:446, :568, :654",
        r"std::bad_alloc|bad_alloc error|can't be started: Cannot allocate memory",
        "the machine's memory ran out",
        MEMORY,
        kind=Kind.HOST_MEMORY,
    ),
    _rule(
        "cache-memory",  # the lines above stand before it, if the log still has them; of_exit says whose memory it is
        "src/llama-kv-cache.cpp:288; src/llama-memory-recurrent.cpp:121; src/llama-context.cpp:684, :702",
        r"failed to allocate (?:buffer for (?:kv|rs) cache|compute (?:pp|tg) buffers)",
        "the card's memory ran out",
        CLOSE,
        kind=Kind.DEVICE_MEMORY,
    ),
)

USAGE_RULES: Final[tuple[Rule, ...]] = (
    _rule("option", "common/arg.cpp:827", r"^error: invalid argument: ", "the engine knows no such option", BUILD, NEVER),
    _rule(
        "device",
        "common/arg.cpp:1132",
        r"invalid device: CUDA\d+",
        "the engine doesn't see the card",
        CARD,
        LATER,
        kind=Kind.NO_CARD,
    ),
    _rule(
        "folder",
        "common/arg.cpp:3619",
        r"^error while handling argument .*: not a directory: ",
        "a folder is missing",
        "make that folder",
        NEVER,
    ),
    _rule(
        "option-file",
        "common/arg.cpp:70, :1829, :1841, :3111",
        r"error: failed to open file '",
        "a file that an option names can't be opened",
        CHECK,
        NEVER,
    ),
    _rule(
        "value",
        "common/arg.cpp:873, :804",
        r"^error while handling (?:argument|environment variable) ",
        "the engine refused the value of an option",
        PRESET,
        NEVER,
    ),
    _rule(
        "template",
        "common/chat.cpp:653, :843; common/arg.cpp:955; tools/server/server-context.cpp:1448",
        r"common_chat_verify_template: |chat template parsing error: |^error: the supplied chat template is not supported"
        r"|failed to initialize chat template",
        "the chat template can't be used",
        "correct chat_template_file, or leave it out",
        NEVER,
    ),
    _rule(
        "library",
        "ld.so",
        r"error while loading shared libraries: |version `\S+' not found",
        "a library of the engine is missing",
        BUILD,
        NEVER,
    ),
    _rule(
        "binary-busy", "supervisor/launcher.py", "can't be started: Text file busy", "the engine is being written", innocent=True
    ),
    _rule("binary", "supervisor/launcher.py", "can't be started: ", "the engine's binary can't be run", BUILD, NEVER),
    _rule("parent", "supervisor/launcher.py", "the parent ended before its child began", "its llmctl had ended", innocent=True),
)

MODEL_RULES: Final[tuple[Rule, ...]] = (
    _rule(
        "file",
        "ggml/src/gguf.cpp:1021; src/llama-mmap.cpp:222",
        r"failed to open GGUF file '|error loading model: failed to open ",
        "the model file can't be opened",
        CHECK,
        NEVER,
    ),
    _rule(
        "magic",
        "ggml/src/gguf.cpp:482, :471",
        "invalid magic characters: |gguf_init_from_\\w+: failed to read magic",
        "the model file is not GGUF",
        CHECK,
        NEVER,
    ),
    _rule(
        "cut",
        "src/llama-model-loader.h:48; src/llama-mmap.cpp:279",
        "data is not within the file bounds, model is corrupted|unexpectedly reached end of file",
        "the model file is cut off",
        FETCH,
        NEVER,
    ),
    _rule(
        "disk", "src/llama-mmap.cpp:276, :303", "read error: ", "the model file can't be read", "check the disk", innocent=True
    ),
    _rule(
        "architecture",
        "src/llama-model.cpp:371, :350; src/llama-vocab.cpp:2428, :2151; ggml/src/gguf.cpp:516",
        "un(?:known|supported) model architecture: |unknown (?:pre-)?tokenizer(?: type)?: "
        r"|is version \d+ but this software only supports up to version|has invalid ggml type",
        "the engine is too old for this model",
        BUILD,
        NEVER,
    ),
    _rule(
        "header",
        "src/llama.cpp:350; ggml/src/gguf.cpp:495-924",
        r"error loading model hyperparameters|bad GGUF version: |GGUFv1 is no longer supported"
        r"|this GGUF file version \d+ is extremely large|gguf_init_from_\w+: (?:failed to read|duplicate|key|number of) ",
        "the model file's header is broken",
        FETCH,
        NEVER,
    ),
    _rule(
        "vocabulary", "src/llama.cpp:358", "error loading model vocabulary", "the model file's vocabulary is broken", FETCH, NEVER
    ),
    _rule(
        "tensor",
        "src/llama-model-loader.cpp:1159, :859-891, :916, :1398",
        "missing tensor(?: info mapping for)? |tensor '.*' (?:not found|has wrong shape)|wrong number of tensors",
        "the model file lacks a tensor",
        FETCH,
        NEVER,
    ),
    _rule(
        "split",
        "src/llama-model-loader.cpp:90-96, :605-669",
        "failed to load GGUF split from |invalid split |illegal split file idx|corrupted model: ",
        "a part of the model file is missing or broken",
        FETCH,
        NEVER,
    ),
    _rule("mmproj", "src/llama.cpp:353", "CLIP cannot be used as main model", "the file is no language model", PRESET, NEVER),
    _rule(
        "kv-type",
        "src/llama-context.cpp:467, :3836-3866",
        "quantized V cache|[KV] cache type \\S+ with block size|does not support different K ",
        "the model can't have this KV cache type",
        PRESET,
        NEVER,
    ),
    _rule(
        "draft", "common/speculative.cpp:2544", "failed to load draft model, '", "the draft model can't be loaded", CHECK, NEVER
    ),
    _rule(
        "mtp",  # after the memory rules: a context that finds no room ends in the same words
        "src/llama-context.cpp:3883; common/speculative.cpp:2552, :2564; tools/server/server-context.cpp:1123",
        "model doesn't contain MTP layers|failed to create MTP context",
        "the model file has no MTP head",
        "take speculation off in the preset, or take a file with an MTP head",
        NEVER,
    ),
    _rule(
        "backend",
        "src/llama-context.cpp:337",
        r"failed to initialize CUDA\d* backend",
        "the engine can't use the card",
        CARD,
        LATER,
        kind=Kind.NO_CARD,
    ),
    _rule(
        "socket",
        "tools/server/server-http.cpp:517, :538",
        "couldn't bind HTTP server socket|couldn't start HTTP listener on",
        "the child's socket is taken",
        innocent=True,
    ),
)

LAST_RULES: Final[tuple[Rule, ...]] = (
    _rule("assert", "ggml/include/ggml.h:288", r"GGML_ASSERT\(", "the engine failed one of its own checks"),
    _rule(
        "wake",
        "tools/server/server-context.cpp:947",
        "failed to reload model after sleeping",
        "the engine could not load its model again",
        innocent=True,
    ),
    _rule("abort", "ggml/src/ggml.c:257", r"^\S+\.(?:c|cc|cpp|cu|cuh|h|hpp):\d+: ", "the engine aborted"),
    _rule(
        "heap",
        "glibc",
        r"^(?:double free or corruption|free\(\): |malloc\w*\(\): |corrupted |munmap_chunk\(\): |\*\*\* stack smashing detected)",
        "the engine's memory was corrupted",
    ),
    _rule("threads", "libstdc++", "Resource temporarily unavailable", "no thread could be started", "ulimit -u", innocent=True),
    _rule("exception", "libstdc++", "^terminate called ", "the engine ended at an error that it doesn't handle"),
    _rule("model", "src/llama.cpp:375", "error loading model: ", "the model could not be loaded", innocent=True),
    _rule(
        "load", "tools/server/server-context.cpp:1086", "failed to load model, '", "the model could not be loaded", innocent=True
    ),
    _rule(
        "context",
        "tools/server/server-context.cpp:1091",
        "failed to create_context with model",
        "the model's context could not be made",
        innocent=True,
    ),
)

RULES: Final = CUDA_RULES + MEMORY_RULES + USAGE_RULES + MODEL_RULES + LAST_RULES
"""Every text that tells why, most specific first."""

XIDS: Final[dict[int, str]] = {  # NVIDIA's "Xid Errors", the catalogue
    13: "a fault of the graphics engine",
    31: "a page fault of the card's memory",
    43: "the card stopped processing",
    45: "cleaned up after an earlier error",
    48: "a double-bit ECC error",
    63: "failing memory was retired or remapped",
    64: "failing memory could not be retired",
    74: "an NVLink error",
    79: "the card has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the card's system processor doesn't answer",
}
FAILING: Final = frozenset({48, 63, 64, 74, 95, 119})
"""Xids after which a card wants a reset."""

ENDS_NOTHING: Final = re.compile(
    r"got (?:another )?exception: "  # tools/server/server.cpp:78, :81; server-http.cpp:196
    r"|task id = -?\d+, error: "  # server-context.cpp:2011
    r"|(?:pre_decode|decode|post_decode)\(\) failed: "  # server-context.cpp:2819, :2872, :2881
    r"|(?:Compute error|Invalid input batch|Context size has been exceeded)\. off = "  # server-context.cpp:3691
    r"|failed to (?:process speculative batch|initialize speculative decoding context|find free space in the KV cache)"
    r"|Tool call mismatch: "  # common/chat.cpp:311
    r"|failed to mlock |^fit: |failed to fit params|normal during memory fitting"  # warnings: the load goes on
)
"""Lines of one request's trouble, and warnings: what they tell of ends nothing."""
