"""How a fake llama-server departs from a healthy one, and the journal of what it did."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

CUDA_OOM = """\
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 2368.00 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 2483027968
llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
common_init_from_params: failed to create context with model"""
"""What a card too small for the KV cache prints; the engine then exits with 1."""

CUDA_ABORT = """\
CUDA error: an illegal memory access was encountered
  current device: 0, in function ggml_backend_cuda_synchronize at ggml-cuda.cu:2706
  cudaStreamSynchronize(cuda_ctx->stream())"""
"""A fault at run time; the engine then aborts (SIGABRT)."""


@dataclass(frozen=True)
class Knobs:
    """Left alone: loads at once and answers 16 tokens as fast as they are taken.

    An *exit* is what subprocess calls a return code: 1 is ``exit(1)``, -6 is SIGABRT. A new knob is a line here and a branch where
    it bites.
    """

    # Starting.
    load_s: float = 0.0
    """How long every path answers 503 "Loading model"."""
    never_healthy: bool = False
    health_never_answers: bool = False
    start_exit: int | None = None
    """Exit so after ``load_s``."""
    start_log: str = ""
    """What is printed before that exit."""
    oom_at_load: bool = False
    """Short for ``start_log=CUDA_OOM, start_exit=1``."""
    oom_above_ctx: int | None = None
    """Out of memory at load when ``-c`` is larger."""
    die_warming: bool = False
    """Die of ``die_exit`` at the process's first completion, which is a warm-up."""
    fail_starts: int | None = None
    """Only the first so many starts (counted in the journal) fail by the above; later ones are healthy."""
    fail_only: list[int] = field(default_factory=list)
    """Only these starts fail, counted from 1. Empty: all that ``fail_starts`` lets."""
    strict: bool = False
    """Refuse a flag that --help doesn't name, as the real one does."""
    hide_flags: list[str] = field(default_factory=list)
    """Flags this build lacks: left out of --help, refused under ``strict``."""

    allocates: dict[str, float] = field(default_factory=dict)
    """MiB of each buffer that a load names in the log: ``{"CPU_Mapped model": 93.8, "CPU KV": 360}``."""

    # Stopping.
    ignore_sigterm: bool = False
    slow_exit_s: float = 0.0
    """After SIGTERM, hold the socket so long before leaving."""
    outlive_parent: bool = False
    """Serve from a grandchild in a session of its own, which no death signal and no signal to the group reaches."""
    life_s: int = 600
    """SIGALRM ends it then, whatever happens: no test leaves a process behind for good."""

    # Answering.
    tokens: int = 16
    """Per reply; a request's own max_tokens wins when it is smaller."""
    text: str = ""
    """What is said, a word a token, over and over. Empty: ``t0 t1 t2``…"""
    cached: int = 0
    """Tokens of the prompt that are found in the cache; at least one of a prompt never is."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """By ``--spec-type``: tokens that it guesses a step, and how many of them are right. What isn't named guesses nothing."""
    deltas: list[dict[str, Any]] = field(default_factory=list)
    """Chat chunks' ``delta`` objects, streamed instead of ``text`` (tool calls, reasoning)."""
    finish_reason: str = ""
    """Empty: ``length`` if max_tokens cut the reply, else ``stop``."""
    half_glyph_first: bool = False
    """The first token is a part of a glyph: a message's stream lacks its head then."""
    chunk_bytes: int = 0
    """Pads each event to so many bytes; real ones of a chat have about 240."""
    prefill_s: float = 0.0
    """Silence before the first byte."""
    prefill_steps: int = 1
    """``/slots`` counts the prompt's tokens in so many equal batches of that silence; none is counted before the first is over."""
    pace_s: float = 0.0
    """From one token to the next."""
    spin: bool = False
    """Burn a core while a reply is under way, whatever else it does or doesn't."""
    grow_mib: int = 0
    """Each reply that ends leaves so much more memory held for good."""
    push_bytes: int = 0
    """Instead of tokens, send so much as fast as the socket takes it."""

    # Beside answering.
    slots_never_answer: bool = False
    """``/slots`` takes the request and says nothing, as an engine whose main loop is stuck."""
    flood_bytes_s: int = 0
    """Log lines of so many bytes a second, from the moment it has loaded."""

    # Failing.
    healthy_requests: int = 0
    """The first so many completions of a process (a warm-up) do none of the below."""
    error_status: int = 0
    """Answer so instead of a stream."""
    error_body: dict[str, Any] = field(default_factory=lambda: {"code": 500, "message": "Compute error.", "type": "server_error"})
    """The ``error`` object of ``error_status`` and ``error_after_tokens``."""
    malformed: bool = False
    """Answer with bytes that aren't HTTP."""
    headers_only: bool = False
    """Send a stream's headers and then nothing."""
    killer: str = ""
    """Die as below when a prompt has this word, once it is evaluated."""
    die_after_tokens: int | None = None
    die_exit: int = -6
    die_log: str = CUDA_ABORT
    stall_after_tokens: int | None = None
    error_after_tokens: int | None = None
    """An error event in the stream, then its end without ``[DONE]``."""
    cut_after_tokens: int | None = None
    """Drop the connection inside the chunked body; the process lives on."""

    def bites(self, start: int) -> bool:
        """Whether what makes a start fail holds for this one, counted from 1."""
        within = self.fail_starts is None or start <= self.fail_starts
        return within and (not self.fail_only or start in self.fail_only)


NAMES = frozenset(knob.name for knob in fields(Knobs))

HEALTHY: dict[str, Any] = {
    "prefill_s": 0.0,
    "push_bytes": 0,
    "error_status": 0,
    "malformed": False,
    "headers_only": False,
    "killer": "",
    "die_after_tokens": None,
    "stall_after_tokens": None,
    "error_after_tokens": None,
    "cut_after_tokens": None,
}
"""What ``healthy_requests`` puts back."""


def say(data: bytes) -> None:
    """Write to the log. As the engine's printf does, it goes on where a disk is full."""
    with contextlib.suppress(OSError):
        os.write(2, data)


class Journal:
    """Appends events to a file, one JSON object a line; each is one write, so lines of several processes don't mix.

    ``t`` is CLOCK_MONOTONIC, which is the same clock in every process. No path, no journal.
    """

    def __init__(self, path: str) -> None:
        self.starts = Path(path).read_text().count('"event": "start"') if path and Path(path).exists() else 0
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if path else -1

    def __call__(self, event: str, **what: Any) -> None:
        if self.fd >= 0:
            os.write(self.fd, json.dumps({"t": time.monotonic(), "event": event, "pid": os.getpid(), **what}).encode() + b"\n")
