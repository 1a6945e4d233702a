"""A trial: one llama-server started to see what it takes, beside what was planned for it.

A start (:func:`started`, which ``speed`` uses too) is the engine's own process with the flags that llmctl gives it, on a socket in a
folder of its own, asked what a warm-up asks. Its log says what it asked for, by buffer; the driver says what the process holds on the
card, which is more (the CUDA context, cuBLAS, pools that grow); ``/proc`` says what it holds in RAM. All are read after a first answer,
because what is taken lazily is taken then (llama.cpp#23903), and before it is stopped. A start that fails raises, with the engine's own
words.

Models are phantoms: a header is all that a trial needs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx2

from supervisor import allocation, argv, causes, child, launcher, sampling, warmup
from supervisor.allocation import Allocation
from supervisor.architecture import Architecture
from supervisor.errors import Error, Exit
from supervisor.estimate import Settings
from supervisor.model import Model
from supervisor.preset import Preset
from supervisor.units import KIB

T = TypeVar("T")
DRAFT: Final = 2
"""Tokens a draft has where a case drafts: the presets' own (facts: best or equal in 4 of 5 sweeps)."""
BATCH: Final = 2048
CHECKPOINTS: Final = 1
CACHE_RAM_MIB: Final = 0
"""Neither is filled by one request; what they may come to take is planned, not tried."""
READY: Final = "llama_server: listening on"
"""The last line of a start (tools/server/server.cpp)."""
READY_TIMEOUT_S: Final = 180.0
ANSWER_TIMEOUT_S: Final = 120.0
STOP_S: Final = 3.0
"""From SIGTERM to SIGKILL: no client is connected then, so it ends in well under a second, unless it is loading."""

HEADERS: Final = {
    ("4B", False): "qwen3.5-4b-q4_k_m.json",
    ("4B", True): "qwen3.5-4b-q4_k_m.mtp.json",
    ("9B", False): "qwen3.5-9b-q4_k_m.json",
    ("9B", True): "qwen3.5-9b-q4_k_m.mtp.json",
    ("135M", False): "smollm2-135m-instruct.q4_1.json",
}
"""Model and whether it has an MTP head → its condensed header in ``presets/headers``."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is started: a model and the options that decide about memory."""

    model: str
    """A word for the file, ``4B``, ``9B`` or ``135M``; two cases of one word and one ``mtp`` are of one file."""
    mtp: bool
    context: int
    """Tokens, of all slots together."""
    slots: int = 1
    unified: bool = False
    """Whether the slots share one pool of cells."""
    kv: str = "f16"
    """Type of both caches."""
    ubatch: int = 512

    @property
    def file(self) -> str:
        """``4B-MTP``."""
        return self.model + "-MTP" * self.mtp

    @property
    def name(self) -> str:
        """``4B-MTP 64k f16 np4 unified ub1024``."""
        words = [self.file, f"{self.context // KIB}k", self.kv, f"np{self.slots}"]
        return " ".join(words + ["unified"] * self.unified + [f"ub{self.ubatch}"] * (self.ubatch != 512))


CASES: Final = (
    # What the presets start comes first: turbo_4b, balanced_9b, their other contexts and modes.
    Case("4B", True, 65536),
    Case("9B", False, 32768),
    Case("4B", False, 131072, kv="q8_0"),
    Case("4B", False, 65536, slots=4, unified=True, ubatch=1024),
    Case("9B", True, 16384),
    Case("9B", False, 65536, kv="q8_0"),
    Case("4B", True, 16384),
    # Then what tells the terms apart: state and drafts by slots, cells by slots, context by itself.
    Case("4B", True, 32768, slots=2),
    Case("4B", False, 16384),
    Case("4B", True, 65536, slots=4),
    Case("9B", False, 65536, slots=2),
    Case("4B", True, 131072),
    Case("9B", True, 65536, slots=2),
    Case("9B", False, 131072, slots=4, kv="q8_0"),
    Case("4B", True, 65536, kv="q8_0"),
    Case("9B", True, 32768, slots=4),
)
"""In order of worth: a run that has to end early has seen the most useful ones."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one start took. Bytes; None where this machine doesn't say."""

    allocation: Allocation
    """By the engine's log."""
    card_bytes: int | None
    """Held by the process on all cards, by the driver."""
    anonymous_bytes: int
    """Of its resident memory, what isn't a file's."""
    ready_s: float
    """From its start to /health 200."""


def settings(case: Case, shape: Architecture, *, cuda: bool, cpu_flags: frozenset[str]) -> Settings:
    """What of a case decides about memory."""
    return Settings(
        context=case.context,
        slots=case.slots,
        unified=case.unified,
        batch=BATCH,
        ubatch=case.ubatch,
        cache_type_k=case.kv,
        cache_type_v=case.kv,
        flash_attention=True,
        gpu_layers=shape.offloadable if cuda else 0,
        speculative="mtp" if case.mtp else "off",
        draft_length=DRAFT if case.mtp else 0,
        checkpoints=CHECKPOINTS,
        cache_ram_mib=CACHE_RAM_MIB,
        cuda=cuda,
        cpu_flags=cpu_flags,
    )


def as_preset(model: Path, chosen: Settings, *, device: str, threads: int) -> Preset:
    """The preset of these settings. ``device`` is a backend device (``CUDA0``), or ``none``."""
    preset = Preset(
        name="trial",
        model=Model(model.name, path=str(model)),
        device=device,
        threads=threads,
        context=chosen.context,
        slots=chosen.slots,
        unified=chosen.unified,
        batch=chosen.batch,
        ubatch=chosen.ubatch,
        cache_type_k=chosen.cache_type_k,
        cache_type_v=chosen.cache_type_v,
        flash_attention="on" if chosen.flash_attention else "off",
        speculative=chosen.speculative,
        draft_length=max(1, chosen.draft_length),
        checkpoints=chosen.checkpoints,
        cache_ram=chosen.cache_ram_mib,
    )
    return preset.change(sampling.resolve(preset, ""), "derived")


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that has given its first answer."""

    process: subprocess.Popen[bytes]
    log: Path
    client: httpx2.Client
    """Of its socket; any number of threads may use it."""
    ready_s: float
    """From its start to /health 200."""
    before_bytes: int | None
    """In use on all cards before it."""

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Its JSON answer. Raises Error, exit CHILD, where there is none."""
        with _child_errors(self.process, self.log):
            answer = self.client.post(path, json=body).raise_for_status().json()
        if not isinstance(answer, dict):
            raise Error(f"llama-server answered {path} with no object", exit=Exit.CHILD, hint="llmctl engine test")
        return answer


def run(server: Path, model: Path, chosen: Settings, *, device: str, threads: int) -> Measured:
    """Start it, warm it up as llmctl does, read what it took, stop it. Raises Error, exit CHILD, where it doesn't come to an answer.

    Call it from the main thread: the process dies with the thread that started it. Nothing is left behind, whatever is raised.
    """
    with started(server, model, chosen, device=device, threads=threads) as engine:
        said = allocation.parse(engine.log.read_text(errors="replace"))
        if said is None:
            raise Error(f"{server} names no buffer in its log", exit=Exit.CHILD, hint="llmctl build")
        return Measured(
            allocation=said,
            card_bytes=None if device == "none" else _held(engine.process.pid, engine.before_bytes),
            anonymous_bytes=child.anonymous_bytes(engine.process.pid),
            ready_s=engine.ready_s,
        )


@contextlib.contextmanager
def started(
    server: Path,
    model: Path,
    chosen: Settings,
    *,
    device: str,
    threads: int,
    flags: Sequence[str] = (),
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Iterator[Started]:
    """An engine with these settings and ``flags`` behind them, warmed up, until the block ends. ``timeout_s`` bounds each answer.

    Raises as :func:`run`, which says too where to call it from.
    """
    preset = as_preset(model, chosen, device=device, threads=threads)
    with tempfile.TemporaryDirectory(prefix="llmctl-") as scratch:
        folder = Path(scratch)
        log = folder / "log"
        began = time.monotonic()
        before_bytes = _cards_used()
        with log.open("wb") as out:
            process = subprocess.Popen(
                launcher.command(*argv.render(preset, server, model), *flags),
                cwd=folder,
                env=argv.environment(os.environ, folder, preset),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait(process, log, began + READY_TIMEOUT_S)
            ready_s = time.monotonic() - began
            transport = httpx2.HTTPTransport(uds=str(folder / argv.SOCKET))
            with httpx2.Client(transport=transport, base_url="http://child", timeout=timeout_s) as client:
                engine = Started(process, log, client, ready_s, before_bytes)
                for question in warmup.questions(preset):
                    engine.ask(question.path, question.body)
                yield engine
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    """Return when the engine says that it listens: by its log, since a socket that isn't there yet can't be asked."""
    while READY not in (text := log.read_text(errors="replace")):
        if process.poll() is not None:
            raise _ended(process, log)
        if time.monotonic() > deadline:
            what = f"llama-server was not ready within {READY_TIMEOUT_S:.0f} s: {causes.last_words(text)}"
            raise Error(what, exit=Exit.CHILD, hint="llmctl engine test")
        time.sleep(0.05)


@contextlib.contextmanager
def _child_errors(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as exc:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A connection that breaks is most often a process that is just ending.
            process.wait(2.0)
        if process.poll() is not None:
            raise _ended(process, log) from exc
        raise Error(f"llama-server gave no answer: {exc}", exit=Exit.CHILD, hint="llmctl engine test") from exc


def _ended(process: subprocess.Popen[bytes], log: Path) -> Error:
    cause = causes.of_exit(process.returncode, log.read_text(errors="replace"))
    return Error(f"llama-server ended: {cause.text}", exit=Exit.CHILD, hint=cause.hint or "llmctl engine test")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _held(pid: int, before_bytes: int | None) -> int | None:
    """What a process holds on all cards, as the driver says; where it can't (a container numbers processes anew), what is more in use."""
    process_bytes = _of_process(pid)
    if process_bytes is not None or before_bytes is None:
        return process_bytes
    now_bytes = _cards_used()
    return None if now_bytes is None else now_bytes - before_bytes


def _of_process(pid: int) -> int | None:
    import pynvml

    def ask(handle: object) -> list[int | None]:
        return [one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == pid]

    found = [held for answer in _each_card(ask) for held in answer]
    known = [held for held in found if held is not None]
    return sum(known) if found and len(known) == len(found) else None


def _cards_used() -> int | None:
    import pynvml

    found = _each_card(lambda handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
    return sum(found) if found else None


def _each_card(ask: Callable[[Any], T]) -> list[T]:
    """What NVML answers for each card; nothing where it fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return [ask(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
