"""Why a child ended: each known text, each signal, what the machine says, and that no log upsets it.

The texts are what the pin prints (b11312), or CUDA 13.0's libcudart says.
"""

from __future__ import annotations

import random
import signal

import pytest

from supervisor import causes, symptoms
from supervisor.causes import Cause, Kind, Retry, Scene
from tests import fakes

LOAD_FAILED = """\
0.00.121.001 E srv    load_model: failed to load model, '/m.gguf'
0.00.121.040 I srv    operator(): cleaning up before exit...
0.00.121.090 E srv  llama_server: exiting due to model loading error
"""
NO_CONTEXT = """\
0.00.121.000 E llama_init_from_model: failed to initialize the context: {why}
0.00.121.001 E srv    load_model: failed to create_context with model '/m.gguf'
0.00.121.090 E srv  llama_server: exiting due to model loading error
"""
USAGE = "{said}\n\nusage:\n--port PORT\n\nto show complete usage, run with -h"
CARD = Scene(cuda=True)


def cuda_error(message: str, statement: str = "cudaStreamSynchronize(cuda_ctx->stream())") -> str:
    """ggml-cuda.cu:101-110, with another thread's line among its own, as the log queue may have it."""
    return f"""\
0.05.000.001 E CUDA error: {message}
0.05.000.002 E   current device: 0, in function ggml_cuda_graph_evaluate_and_capture at ggml-cuda.cu:4407
0.05.000.003 I srv  log_server_r: done request: POST /v1/chat/completions 127.0.0.1 200
0.05.000.004 E   {statement}
ggml-cuda.cu:109: CUDA error
/lib/libggml-base.so(+0x15b) [0x7f]
"""


def model(why: str) -> str:
    return f"0.00.120.000 E llama_model_load: error loading model: {why}\n{LOAD_FAILED}"


def gguf(why: str) -> str:
    return f"0.00.120.000 E gguf_init_from_reader: {why}\n" + model("llama_model_loader: failed to load model from /m.gguf")


N, L, S = Retry.NEVER, Retry.LATER, Retry.SOON
EXITS: dict[str, tuple[str, str, Retry, Kind]] = {
    # rule: log, what its text says, when to try again, kind. The exit code is 1.
    "option": ("error: invalid argument: --bogus", "knows no such option", N, Kind.OTHER),
    "value": (USAGE.format(said='error while handling argument "--port": stoi'), "refused", N, Kind.OTHER),
    "folder": (
        USAGE.format(said='error while handling argument "--slot-save-path": not a directory: /x/'),
        "folder is missing",
        N,
        Kind.OTHER,
    ),
    "option-file": (
        USAGE.format(said="error while handling argument \"--api-key-file\": error: failed to open file '/key'\n"),
        "can't be opened",
        N,
        Kind.OTHER,
    ),
    "device": (USAGE.format(said='error while handling argument "--device": invalid device: CUDA0'), "the card", L, Kind.NO_CARD),
    "template": ("common_chat_verify_template: failed to apply template: x\nerror: the s", "chat template", N, Kind.OTHER),
    "library": ("llama-server: error while loading shared libraries: libcudart.so.13: cannot", "a library", N, Kind.OTHER),
    "binary": ("error: /e/llama-server can't be started: No such file or directory", "can't be run", N, Kind.OTHER),
    "binary-busy": ("error: /e/llama-server can't be started: Text file busy", "being written", S, Kind.OTHER),
    "parent": ("error: the parent ended before its child began", "llmctl had ended", S, Kind.OTHER),
    "file": (
        "0.00.120.000 E gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)\n" + LOAD_FAILED,
        "can't be opened",
        N,
        Kind.OTHER,
    ),
    "magic": (gguf("invalid magic characters: '????', expected 'GGUF'"), "not GGUF", N, Kind.OTHER),
    "cut": (model("tensor 'x' data is not within the file bounds, model is corrupted or incomplete"), "cut off", N, Kind.OTHER),
    "disk": (model("read error: Input/output error"), "can't be read", S, Kind.OTHER),
    "architecture": (model("unknown model architecture: 'qwen9'"), "too old", N, Kind.OTHER),
    "header": (model("error loading model hyperparameters: key not found in model: a.b"), "header", N, Kind.OTHER),
    "vocabulary": (model("error loading model vocabulary: cannot find tokenizer merges"), "vocabulary", N, Kind.OTHER),
    "tensor": (model("missing tensor 'blk.0.attn_q.weight'"), "lacks a tensor", N, Kind.OTHER),
    "split": (model("llama_model_loader: failed to load GGUF split from /m-00002-of-00002.gguf"), "a part", N, Kind.OTHER),
    "mmproj": (model("CLIP cannot be used as main model, use it with --mmproj instead"), "no language model", N, Kind.OTHER),
    "kv-type": (
        "0.1.0.0 E llama_init_from_model: quantized V cache requires flash_attn to be enabled\n"
        "0.1.0.1 E srv    load_model: failed to create_context with model '/m.gguf'\n",
        "KV cache type",
        N,
        Kind.OTHER,
    ),
    "draft": ("0.1.0.0 E common_speculative_init: failed to load draft model, '/d.gguf'\n", "draft model", N, Kind.OTHER),
    "mtp": ("0.02.000.000 E srv  load_model: failed to create MTP context\n" + LOAD_FAILED, "MTP", N, Kind.OTHER),
    "backend": (NO_CONTEXT.format(why="failed to initialize CUDA0 backend"), "can't use the card", L, Kind.NO_CARD),
    "socket": (
        "0.00.030.000 E srv start: couldn't bind HTTP server socket, hostname: x.sock, port: 8080\n"
        "0.00.030.001 E srv  llama_server: exiting due to HTTP server error\n",
        "socket is taken",
        S,
        Kind.OTHER,
    ),
    "cuda-2": (fakes.CUDA_OOM + "\n" + LOAD_FAILED, "card's memory ran out", S, Kind.DEVICE_MEMORY),
    "device-buffer": (
        "0.1.0.0 E ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 521\n"
        + NO_CONTEXT.format(why="failed to allocate compute pp buffers"),
        "card's memory ran out",
        S,
        Kind.DEVICE_MEMORY,
    ),
    "host-buffer": (
        "0.1.0.0 E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 99\n"
        "0.1.0.0 E alloc_tensor_range: failed to allocate CPU_REPACK buffer of size 99\n"
        + model("unable to allocate CPU_REPACK buffer"),
        "machine's memory ran out",
        S,
        Kind.HOST_MEMORY,
    ),
    "host-malloc": (
        "0.1.0.0 E ggml_aligned_malloc: insufficient memory (attempted to allocate 4096.00 MB)\n"
        + NO_CONTEXT.format(why="failed to allocate buffer for kv cache"),
        "machine's memory ran out",
        S,
        Kind.HOST_MEMORY,
    ),
    "host-mmap": (model("mmap failed: Cannot allocate memory"), "machine's memory ran out", S, Kind.HOST_MEMORY),
    "bad-alloc": (model("std::bad_alloc"), "machine's memory ran out", S, Kind.HOST_MEMORY),
    "cache-memory": (NO_CONTEXT.format(why="failed to allocate buffer for rs cache"), "card's memory", S, Kind.DEVICE_MEMORY),
    "threads": ("terminate called\n  what():  Resource temporarily unavailable", "no thread", S, Kind.OTHER),
    "model": (model("something new"), "could not be loaded", S, Kind.OTHER),
    "load": (LOAD_FAILED, "could not be loaded", S, Kind.OTHER),
    "context": (NO_CONTEXT.format(why="something new"), "context could not be made", S, Kind.OTHER),
}
ABORTS: dict[str, tuple[str, str, Retry, Kind]] = {
    # The same; the exit is SIGABRT.
    "graph-memory": (
        cuda_error("out of memory", "cudaGraphInstantiate(&graph->instance, graph->graph, __null, __null, 0)"),
        "graph found no room",
        S,
        Kind.GRAPH_MEMORY,
    ),
    "graph-update": ("ggml-cuda.cu:2658: GGML_ASSERT(stat == cudaSuccess) failed\n", "graph could not", S, Kind.GRAPH_MEMORY),
    "no-device-code": (
        "mmq.cuh:9: ERROR: CUDA kernel mul_mat_q has no device code compatible with CUDA arch 750. ggml-cuda.cu was compiled for: 860\n"
        + cuda_error("unspecified launch failure"),
        "another card",
        N,
        Kind.CUDA,
    ),
    "cuda-2": (cuda_error("out of memory", "cuMemCreate(&handle, reserve_size, &prop, 0)"), "memory ran", S, Kind.DEVICE_MEMORY),
    "cuda-209": (cuda_error("no kernel image is available for execution on the device"), "another card", N, Kind.CUDA),
    "cuda-200": (cuda_error("device kernel image is invalid"), "another card", N, Kind.CUDA),
    "cuda-35": (cuda_error("CUDA driver version is insufficient for CUDA runtime version"), "too old", N, Kind.CUDA),
    "cuda-36": (cuda_error("API call is not supported in the installed CUDA driver"), "too old", N, Kind.CUDA),
    "cuda-222": (cuda_error("the provided PTX was compiled with an unsupported toolchain."), "too old", N, Kind.CUDA),
    "cuda-34": (cuda_error("CUDA driver is a stub library"), "stub", N, Kind.CUDA),
    "cuda-803": (cuda_error("system has unsupported display driver / cuda driver combination"), "match", L, Kind.NO_CARD),
    "cuda-100": (cuda_error("no CUDA-capable device is detected"), "no card", L, Kind.NO_CARD),
    "cuda-101": (cuda_error("invalid device ordinal"), "no such card", L, Kind.NO_CARD),
    "cuda-802": (cuda_error("system not yet initialized"), "not ready", L, Kind.NO_CARD),
    "cuda-lost": (cuda_error("GPU is lost"), "was lost", L, Kind.NO_CARD),
    "cuda-46": (cuda_error("all CUDA-capable devices are busy or unavailable"), "another program", S, Kind.CUDA),
    "cuda-214": (cuda_error("uncorrectable ECC error encountered"), "ECC", S, Kind.CUDA),
    "cuda-3": (cuda_error("initialization error"), "can't be initialized", S, Kind.CUDA),
    "cuda-702": (cuda_error("the launch timed out and was terminated"), "too long", S, Kind.CUDA),
    "cuda-700": (cuda_error("an illegal memory access was encountered"), "kernel faulted", S, Kind.ILLEGAL_ACCESS),
    "cuda-716": (cuda_error("misaligned address"), "kernel faulted", S, Kind.ILLEGAL_ACCESS),
    "cuda-714 to 718": (cuda_error("an illegal instruction was encountered"), "kernel faulted", S, Kind.ILLEGAL_ACCESS),
    "cuda-719": (cuda_error("unspecified launch failure"), "kernel faulted", S, Kind.ILLEGAL_ACCESS),
    "cuda-710": (cuda_error("device-side assert triggered"), "own checks", S, Kind.ILLEGAL_ACCESS),
    "cuda-900 to 908": (cuda_error("operation failed due to a previous error during capture"), "captured", S, Kind.CUDA),
    "cuda-any": (cuda_error("something new"), "a CUDA error: CUDA error: something new", S, Kind.CUDA),
    "cuda-abort": ("/src/ggml-cuda.cu:109: CUDA error\n", "a CUDA error", S, Kind.CUDA),
    "assert": ("llama-context.cpp:9: GGML_ASSERT(a == b) failed\n[New LWP 7]\n", "one of its own checks", S, Kind.OTHER),
    "wake": ("server-context.cpp:947: failed to reload model after sleeping\n", "load its model again", S, Kind.OTHER),
    "abort": ("/src/ggml.c:7205: fatal error\n", "the engine aborted: /src/ggml.c:7205", S, Kind.OTHER),
    "heap": ("free(): invalid pointer\n", "corrupted", S, Kind.OTHER),
    "exception": ("terminate called after throwing an instance of 'std::out_of_range'\n", "doesn't handle", S, Kind.OTHER),
}
CASES = [(1, name, *case) for name, case in EXITS.items()] + [(-6, name, *case) for name, case in ABORTS.items()]


@pytest.mark.parametrize(("code", "rule", "log", "says", "retry", "kind"), CASES, ids=[f"{case[1]}{case[0]}" for case in CASES])
def test_each_known_text_has_its_rule(code: int, rule: str, log: str, says: str, retry: Retry, kind: Kind) -> None:
    found = causes.of_exit(code, log, CARD)
    assert (found.rule, found.retry, found.kind) == (rule, retry, kind)
    assert says in found.text
    assert found.hint
    assert found.permanent is (retry is Retry.NEVER)
    assert any(line in found.text for line in found.lines), "the telling line is among those shown"


def test_every_rule_is_shown_to_match() -> None:
    names = [rule.name for rule in symptoms.RULES]
    assert len(names) == len(set(names))
    assert {case[1] for case in CASES} == set(names)


@pytest.mark.parametrize(
    ("log", "rule"),
    [
        ("0.1.0.0 E llama_init_from_model: context type MTP requested but model doesn't contain MTP layers\n", "mtp"),
        (gguf("failed to read magic"), "magic"),
        (gguf("failed to read header"), "header"),
        (gguf("this GGUF file is version 4 but this software only supports up to version 3"), "architecture"),
        (model("error loading model vocabulary: unknown pre-tokenizer type: 'new'"), "architecture"),
        (model("check_tensor_dims: tensor 'a.b' has wrong shape; expected 1, got 2"), "tensor"),
        (model("unexpectedly reached end of file"), "cut"),
        (USAGE.format(said='error while handling argument "--cache-type-k": Unsupported cache type: foo'), "value"),
        (USAGE.format(said='error while handling argument "--spec-type": unknown speculative type: foo'), "value"),
        ('error while handling environment variable "LLAMA_ARG_X": stoi', "value"),
        ("0.1.0.0 E srv    load_model: load_model: chat template parsing error: x\n", "template"),
        (cuda_error("out of memory", "cudaGraphLaunch(graph->instance, cuda_ctx->stream())"), "graph-memory"),
        (cuda_error("the resource allocation failed", "cublasCreate_v2(&handle)"), "cuda-2"),
        ("0.1.0.0 E alloc: allocating 1.00 MiB on device 0: cudaMalloc failed: unknown error\n", "cuda-any"),
    ],
)
def test_other_words_of_the_same(log: str, rule: str) -> None:
    assert causes.of_exit(1, log, CARD).rule == rule


@pytest.mark.parametrize(
    ("message", "rule", "retry"),
    [
        ("CUDA driver version is insufficient for CUDA runtime version", "cuda-35", Retry.NEVER),
        ("system has unsupported display driver / cuda driver combination", "cuda-803", Retry.LATER),
        ("no CUDA-capable device is detected", "cuda-100", Retry.LATER),
    ],
)
def test_a_refused_card_is_explained_by_why_cuda_did_not_start(message: str, rule: str, retry: Retry) -> None:
    """Whichever line comes first: one goes through the log's queue, the other does not."""
    init = f"0.00.010.000 E ggml_cuda_init: failed to initialize CUDA: {message}\n"
    refused = EXITS["device"][0] + "\n"
    for log in (init + refused, refused + init):
        found = causes.of_exit(1, log, CARD)
        assert (found.rule, found.retry) == (rule, retry)
    assert causes.of_exit(1, init, CARD).rule == "", "without -dev it goes on, on the CPU"


def test_memory_that_runs_out_stands_before_what_it_leads_to() -> None:
    """An MTP context that finds no room is not a file without an MTP head."""
    assert causes.of_exit(1, fakes.CUDA_OOM + "\n" + EXITS["mtp"][0], CARD).kind is Kind.DEVICE_MEMORY


def test_whose_memory_a_cache_wanted_is_the_plans_word_if_no_line_says_it() -> None:
    log = EXITS["cache-memory"][0]
    assert causes.of_exit(1, log, CARD).kind is Kind.DEVICE_MEMORY
    found = causes.of_exit(1, log)
    assert found.kind is Kind.HOST_MEMORY
    assert found.text.startswith("the machine's memory ran out")


# Signals and codes.


@pytest.mark.parametrize(
    ("code", "says", "retry", "kind"),
    [
        (-signal.SIGILL, "another CPU", Retry.NEVER, Kind.OTHER),
        (-signal.SIGBUS, "cut while it was mapped", Retry.SOON, Kind.OTHER),
        (-signal.SIGABRT, "aborted", Retry.SOON, Kind.OTHER),
        (-signal.SIGSEGV, "died of SIGSEGV", Retry.SOON, Kind.OTHER),
        (-signal.SIGKILL, "killed from outside", Retry.SOON, Kind.OUTSIDE),
        (-signal.SIGTERM, "SIGTERM", Retry.SOON, Kind.OUTSIDE),
        (-signal.SIGINT, "SIGINT", Retry.SOON, Kind.OUTSIDE),
        (-signal.SIGHUP, "SIGHUP", Retry.SOON, Kind.OUTSIDE),
        (-(signal.SIGRTMIN + 1), "died of signal 35", Retry.SOON, Kind.OTHER),
        (0, "stopped from outside", Retry.SOON, Kind.OUTSIDE),
        (3, "ended with code 3", Retry.SOON, Kind.OTHER),
        (128 + signal.SIGKILL, "killed from outside", Retry.SOON, Kind.OUTSIDE),
        (128 + signal.SIGSEGV, "died of SIGSEGV", Retry.SOON, Kind.OTHER),
        (255, "ended with code 255", Retry.SOON, Kind.OTHER),
    ],
)
def test_a_signal_or_code_without_words(code: int, says: str, retry: Retry, kind: Kind) -> None:
    found = causes.of_exit(code, "")
    assert says in found.text
    assert (found.retry, found.kind, found.lines) == (retry, kind, ())


def test_the_kernels_own_kill_is_memory() -> None:
    found = causes.of_exit(-signal.SIGKILL, "0.1.0.0 I srv x: fine\n", Scene(oom_kills=1))
    assert found.kind is Kind.HOST_MEMORY
    assert found.blames_request
    assert found.lines == ("srv x: fine",)


def test_a_second_stop_signal_is_from_outside() -> None:
    found = causes.of_exit(1, "Received second interrupt, terminating immediately.\n")
    assert found.kind is Kind.OUTSIDE


def test_one_that_was_killed_while_it_aborted_ended_by_what_it_aborted_of() -> None:
    assert causes.of_exit(-signal.SIGKILL, ABORTS["cuda-700"][0], CARD).rule == "cuda-700"
    assert causes.of_exit(-signal.SIGTERM, ABORTS["assert"][0], CARD).rule == "assert"


def test_an_old_error_does_not_explain_a_kill() -> None:
    found = causes.of_exit(-signal.SIGTERM, fakes.CUDA_OOM, CARD)
    assert found.text == "it was stopped from outside llmctl (SIGTERM)"


# Who may have been the reason.


@pytest.mark.parametrize(
    ("code", "log", "scene", "blames"),
    [
        (-6, ABORTS["assert"][0], Scene(), True),
        (-6, ABORTS["cuda-700"][0], CARD, True),
        (-6, ABORTS["cuda-2"][0], CARD, True),
        (-signal.SIGSEGV, "", Scene(), True),
        (-signal.SIGKILL, "", Scene(), False),
        (-signal.SIGTERM, "", Scene(), False),
        (-signal.SIGBUS, "", Scene(), False),
        (0, "", Scene(), False),
        (1, EXITS["file"][0], Scene(), False),
        (1, EXITS["socket"][0], Scene(), False),
        (-6, ABORTS["cuda-700"][0], Scene(cuda=True, slept=True), False),
        (-6, ABORTS["cuda-719"][0], Scene(cuda=True, xids=(79,)), False),
    ],
)
def test_who_may_have_been_the_reason(code: int, log: str, scene: Scene, blames: bool) -> None:
    assert causes.of_exit(code, log, scene).blames_request is blames


# What the machine says.


@pytest.mark.parametrize("rule", ["cuda-any", "cuda-35", "cuda-803", "cuda-100"])
def test_a_driver_upgraded_under_the_kernel_wants_a_restart_of_the_machine(rule: str) -> None:
    found = causes.of_exit(-6, ABORTS[rule][0], Scene(cuda=True, no_card="Driver/library version mismatch"))
    assert (found.retry, found.hint, found.kind) == (Retry.LATER, "restart the machine", Kind.NO_CARD)
    assert found.text.startswith("the NVIDIA driver was upgraded")


@pytest.mark.parametrize("scene", [Scene(True, no_card="GPU is lost"), Scene(True, xids=(31, 79))])
@pytest.mark.parametrize(("code", "log"), [(-6, ABORTS["cuda-719"][0]), (1, EXITS["device"][0]), (-signal.SIGSEGV, "")])
def test_a_lost_card_is_named_whatever_the_child_said(scene: Scene, code: int, log: str) -> None:
    found = causes.of_exit(code, log, scene)
    assert (found.retry, found.kind) == (Retry.LATER, Kind.NO_CARD)
    assert found.text.startswith("the card was lost (")


def test_a_driver_that_does_not_answer_is_named() -> None:
    found = causes.of_exit(1, EXITS["device"][0], Scene(cuda=True, no_card="Driver Not Loaded"))
    assert (found.retry, found.kind) == (Retry.LATER, Kind.NO_CARD)
    assert "Driver Not Loaded" in found.text


@pytest.mark.parametrize("message", ["unknown error", "initialization error", "an illegal memory access was encountered"])
def test_a_cuda_error_after_a_suspend_is_the_suspends(message: str) -> None:
    found = causes.of_exit(-6, cuda_error(message), Scene(cuda=True, slept=True))
    assert found.text.startswith("the machine slept")
    assert message in found.text
    assert (found.retry, found.kind) == (Retry.SOON, Kind.NO_CARD)
    assert "modprobe nvidia_uvm" in found.hint


def test_a_suspend_does_not_explain_what_the_card_has_no_part_in() -> None:
    scene = Scene(cuda=True, slept=True)
    assert causes.of_exit(1, EXITS["file"][0], scene) == causes.of_exit(1, EXITS["file"][0])
    assert causes.of_exit(-6, ABORTS["cuda-209"][0], scene).permanent


def test_what_the_kernel_logged_of_the_card_is_part_of_the_text() -> None:
    found = causes.of_exit(-6, ABORTS["cuda-700"][0], Scene(cuda=True, xids=(31, 31, 777)))
    assert found.text.endswith("(Xid 31: a page fault of the card's memory, Xid 777)")
    assert causes.of_exit(-6, ABORTS["cuda-700"][0], Scene(cuda=True, xids=(48,))).hint.startswith("restart the machine")
    assert "Xid" not in causes.of_exit(1, EXITS["file"][0], Scene(cuda=True, xids=(31,))).text


# The child's own words.


def test_the_childs_own_telling_line_is_quoted_without_its_time_stamp() -> None:
    """The line that says what went wrong, and not the ``exiting due to model loading error`` which ends every such log."""
    found = causes.of_exit(1, "0.00.119.000 I srv x: fine\n" * 9 + EXITS["file"][0])
    said = "gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)"
    assert found.text == f"the model file can't be opened: {said}"
    assert found.lines[:2] == ("srv x: fine", said)
    assert found.lines[-1] == "srv  llama_server: exiting due to model loading error"
    assert causes.of_exit(1, fakes.CUDA_OOM).text.endswith("allocating 2368.00 MiB on device 0: cudaMalloc failed: out of memory")


def test_an_unknown_fault_is_quoted_from_the_end() -> None:
    log = "0.00.1.1 E srv x: first error\n0.00.2.2 I srv y: fine\n0.00.3.3 E srv z: unable to go on\n0.00.4.4 I srv: bye\n"
    found = causes.of_exit(5, log)
    assert found.text == "it ended with code 5: srv z: unable to go on"
    assert found.lines == ("srv x: first error", "srv z: unable to go on")
    assert causes.last_words(log) == "srv z: unable to go on"


@pytest.mark.parametrize(
    "line",
    [
        '0.1.0.0 W srv    operator(): got exception: {"error":{"message":"CUDA error: out of memory"}}',
        "0.1.0.0 E srv    send_error: task id = 5, error: Compute error.",
        "0.1.0.0 E srv        decode: Compute error. off = 0, n_batch = 512, ret = -3",
        "0.1.0.0 E srv  update_slots: decode() failed: Compute error.",
        "0.1.0.0 W warning: failed to mlock 1024-byte buffer (after previously locking 0 bytes): Cannot allocate memory",
        "0.1.0.0 W fit: failed to initialize CUDA: no CUDA-capable device is detected",
    ],
)
def test_what_ends_nothing_is_no_cause(line: str) -> None:
    assert causes.of_exit(1, line).text == "it ended with code 1"
    assert causes.last_words(line) == ""


@pytest.mark.parametrize("log", ["", "\n\n", "0.00.1.1 I srv x: fine\n", "\x00\ufffd\n"])
def test_a_log_without_a_fault_adds_nothing_to_the_text(log: str) -> None:
    assert causes.last_words(log) == ""
    assert causes.of_exit(3, log).text == "it ended with code 3"


def test_a_terminals_control_characters_do_not_get_through() -> None:
    found = causes.of_exit(1, "\x1b[31m0.1.0.0 E srv x: an error\x1b[0m\x1b]0;title\x07\n")
    assert found.lines == ("srv x: an error ]0;title",)


def test_no_log_upsets_it() -> None:
    """Random logs of known lines, rubbish and over-long lines; random codes and scenes."""
    draw = random.Random(5)
    known = [line for case in CASES for line in case[2].splitlines()]
    alphabet = "ab :.()'\x00\x1b\u2028\ufffd\t\r\x0b[31mEW0123456789"

    def line() -> str:
        rubbish = "".join(draw.choices(alphabet, k=draw.randrange(700)))
        return draw.choice([draw.choice(known), rubbish, rubbish + draw.choice(known) + rubbish, ""])

    seen: set[str] = set()
    for _ in range(1500):
        log = "\n".join(line() for _ in range(draw.randrange(12)))[draw.randrange(40) :]
        scene = Scene(
            draw.random() < 0.5,
            draw.choice(["", "GPU is lost", "Driver/library version mismatch", "Unknown Error"]),
            tuple(draw.choices([13, 31, 79, 999], k=draw.randrange(4))),
            draw.randrange(2),
            draw.random() < 0.5,
        )
        found = causes.of_exit(draw.randrange(-64, 256), log, scene)
        assert isinstance(found, Cause)
        assert found.text.strip()
        assert found.hint
        assert len(found.lines) <= causes.MOST_LINES
        assert all(0 < len(shown) <= causes.MOST_CHARACTERS and shown.isprintable() for shown in found.lines)
        assert found.text.isprintable()
        seen.add(found.rule)
    assert len(seen) > 20, "the logs reach the rules"
