"""How fast an engine is on this machine: by the depth of the context, by streams at once, with and without guessing.

Two tools, each for what it can tell. The stock llama-bench takes prefill and decode at a depth (:class:`Depths`): it fills the context once
and restores it for each repetition, and no server stands between. It knows neither slots nor drafts, so for those (:class:`Streams`) a
llama-server is started as llmctl starts it, and asked by as many threads as there are streams. Its own ``timings`` are taken, and this
clock's time of all streams together.

Whether a guess is right is drawn by the engine (``--spec-synth-rates``): a model without weights guesses nothing worth checking, and what a
round costs doesn't depend on it. The answer is noise then; llmctl gives the flag to no other start.

Models may be phantoms: shapes and types decide about the time, zeros do not, but for the power that a card takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from supervisor import argv, causes, launcher, trial
from supervisor.errors import Error, Exit
from supervisor.estimate import Settings
from supervisor.option import CONTEXT_STEP
from supervisor.trial import BATCH, Case, Started
from supervisor.units import KIB

TIMEOUT_S: Final = 60.0
"""Of one llama-bench, or of one repetition of streams. A card needs 20 s for the longest, 32 Ki tokens at the RTX 3070's pace."""
WARM_TOKENS: Final = 16
"""Asked of each stream before the first repetition: CUDA's graphs are captured meanwhile."""
PROMPT_TOKENS: Final = 64
"""Of a stream's prompt: short, so that nearly all of the time is decoding."""
_TOKEN: Final = 1
"""Any token id: every vocabulary has it, and what it says doesn't matter."""
_SEED: Final = 1
"""Of a request: the engine draws by it which guesses are right (tools/server/server-context.cpp:1788)."""
_ALL_LAYERS: Final = 999


@dataclass(frozen=True, slots=True)
class Depths:
    """Prefill and decode with so many tokens in the context before them."""

    model: str
    """As in :class:`~supervisor.trial.Case`."""
    depths: tuple[int, ...]
    kv: str = "f16"
    ubatch: int = 512
    prompt: int = 512
    """Tokens of a prefill."""
    answer: int = 64
    """Tokens of a decode."""
    repetitions: int = 3

    @property
    def name(self) -> str:
        """``4B f16 depth 0 8k 32k``."""
        told = [f"{depth // KIB}k" if depth and depth % KIB == 0 else str(depth) for depth in self.depths]
        return " ".join([self.model, self.kv, *[f"ub{self.ubatch}"] * (self.ubatch != 512), "depth", *told])

    @property
    def case(self) -> Case:
        """What it takes of memory at its deepest."""
        tokens = max(self.depths) + max(self.prompt, self.answer)
        return Case(self.model, False, -(-tokens // CONTEXT_STEP) * CONTEXT_STEP, kv=self.kv, ubatch=self.ubatch)


@dataclass(frozen=True, slots=True)
class Streams:
    """Decode of some streams at once, by a server with as many slots as the case has."""

    case: Case
    streams: tuple[int, ...] = (1,)
    draft: int = 0
    """Tokens that are guessed a round; 0 is none, and then the case has no MTP head."""
    acceptance: float = 0.0
    """With which each guess is right, given that those before it were."""
    answer: int = 128
    """Tokens of each stream."""
    repetitions: int = 2

    @property
    def name(self) -> str:
        """``4B-MTP 64k f16 np1 streams 1 draft 2 at 0.7``."""
        drafting = [f"draft {self.draft} at {self.acceptance:g}"] * (self.draft > 0)
        return " ".join([self.case.name, "streams", *map(str, self.streams), *drafting])

    @property
    def flags(self) -> tuple[str, ...]:
        """Behind the server's own: how probable it is that each guess is reached and right (common/arg.cpp:4170, speculative.cpp:2726)."""
        rates = ",".join(f"{self.acceptance**position:.6f}" for position in range(1, self.draft + 1))
        return ("--spec-synth-rates", rates) if self.draft else ()


Sprint = Depths | Streams


def _drafts(model: str, draft: int, acceptance: float, slots: int = 1, streams: tuple[int, ...] = (1,)) -> Streams:
    return Streams(Case(model, True, 32768, slots=slots, unified=slots > 1), streams, draft, acceptance)


SPRINTS: Final[tuple[Sprint, ...]] = (
    Depths("4B", (0, 8192, 32768)),
    Streams(Case("4B", False, 32768)),
    _drafts("4B", 2, 0.7),
    Streams(Case("4B", False, 32768, slots=4, unified=True), (1, 2, 4)),
    _drafts("4B", 1, 0.7),
    _drafts("4B", 3, 0.7),
    Depths("9B", (0, 8192)),
    Streams(Case("4B", False, 32768, slots=2, unified=True), (2,)),
    Streams(Case("9B", False, 16384)),
    Streams(Case("9B", True, 16384), (1,), 2, 0.7),
    Depths("4B", (8192, 32768), kv="q8_0"),
    _drafts("4B", 2, 0.7, slots=4, streams=(1, 2, 4)),
    Depths("4B", (0,), ubatch=1024, prompt=2048),
    # A round's cost doesn't depend on how many of its guesses are right; these show it.
    _drafts("4B", 2, 0.9),
    _drafts("4B", 2, 0.5),
    _drafts("4B", 3, 0.9),
    _drafts("4B", 1, 0.5),
)
"""In order of worth, on a card."""
_QUICK: Final = 4096
SPRINTS_WITHOUT_A_CARD: Final[tuple[Sprint, ...]] = (
    Depths("135M", (0, 256), prompt=64, answer=16, repetitions=2),
    *(
        Streams(Case("135M", False, _QUICK, slots=slots, unified=slots > 1), streams, answer=16, repetitions=1)
        for slots, streams in ((1, (1,)), (2, (2,)), (4, (1, 4)))
    ),
)
"""Seconds each on two cores, where a token of the 4B takes two: they say that everything works, and what slots cost there."""
WHY_NOT: Final = "it needs a card: a CPU takes seconds for a token of this model"


@dataclass(frozen=True, slots=True)
class AtDepth:
    """One test of llama-bench."""

    depth: int
    prefill: bool
    """Else decode."""
    tokens: int
    """Of one repetition."""
    tps: float
    """Mean of the repetitions' tokens a second."""
    tps_stddev: float


@dataclass(frozen=True, slots=True)
class Together:
    """One repetition of some streams."""

    streams: int
    tokens: int
    """That were made, of all streams."""
    wall_s: float
    """From the first one's sending to the last one's end, prompts included."""
    decode_s: float
    """Sum of the streams' own, each from its first token to its last, by the engine's clock."""
    draft_tokens: int = 0
    draft_accepted: int = 0

    @property
    def steps(self) -> int:
        """Decode steps, or rounds, of all streams: each made one token besides the guesses that were right, the first token none."""
        return self.tokens - self.streams - self.draft_accepted

    @property
    def step_s(self) -> float:
        """Of one step, as its stream sees it."""
        return self.decode_s / self.steps if self.steps > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens a second of one stream after its first."""
        return (self.tokens - self.streams) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def total_tps(self) -> float:
        """Tokens a second of all streams."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0


def settings(sprint: Streams, chosen: Settings) -> Settings:
    """Those of the sprint's case with the sprint's drafts."""
    return replace(chosen, draft_length=sprint.draft, speculative="mtp" if sprint.draft else "off")


def at_depths(bench: Path, model: Path, sprint: Depths, *, device: str, threads: int) -> Generator[AtDepth, None, None]:
    """Run llama-bench; its tests as they end. Raises Error, exit CHILD, where it fails or is cut off, after those that it did.

    Call it from the main thread: the process dies with the thread that started it. Nothing is left behind, whatever is raised.
    """
    with tempfile.TemporaryDirectory(prefix="llmctl-") as scratch, Path(scratch, "log").open("w+b") as log:
        process = subprocess.Popen(
            launcher.command(*_command(bench, model, sprint, device, threads)),
            cwd=scratch,
            env=argv.environment(os.environ, Path(scratch)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
        )
        deadline = time.monotonic() + TIMEOUT_S
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    if (found := row(line)) is not None:
                        yield found
            process.wait()
        finally:
            timer.cancel()
            process.kill()  # nothing happens to one that has ended
            process.wait()
        if process.returncode == -signal.SIGKILL and time.monotonic() >= deadline:
            raise Error(f"llama-bench was not done after {TIMEOUT_S:.0f} s", exit=Exit.CHILD, hint="fewer tokens")
        if process.returncode != 0:
            log.seek(0)
            cause = causes.of_exit(process.returncode, log.read().decode(errors="replace"))
            raise Error(f"llama-bench ended: {cause.text}", exit=Exit.CHILD, hint=cause.hint or "llmctl engine test")


def row(line: str) -> AtDepth | None:
    """A line of ``llama-bench -o jsonl``, by its fields' names; None for any other, and for a test of prefill and decode together."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        told = json.loads(line)
        prompt, answer = int(told["n_prompt"]), int(told["n_gen"])
        if (prompt == 0) != (answer == 0):
            return AtDepth(
                depth=int(told["n_depth"]),
                prefill=prompt > 0,
                tokens=prompt or answer,
                tps=float(told["avg_ts"]),
                tps_stddev=float(told["stddev_ts"]),
            )
    return None


def together(
    server: Path, model: Path, sprint: Streams, chosen: Settings, *, device: str, threads: int
) -> Generator[Together, None, None]:
    """Start a server and ask it; each repetition as it ends. Raises and is called as :func:`trial.started` is."""
    engine = trial.started(
        server, model, settings(sprint, chosen), device=device, threads=threads, flags=sprint.flags, timeout_s=TIMEOUT_S
    )
    with engine as started:
        for streams in sprint.streams:
            _ask(started, streams, WARM_TOKENS)
            for _ in range(sprint.repetitions):
                yield _ask(started, streams, sprint.answer)


def _command(bench: Path, model: Path, sprint: Depths, device: str, threads: int) -> list[str]:
    depths = ",".join(map(str, sprint.depths))
    words = ["-m", model, "-o", "jsonl", "-p", sprint.prompt, "-n", sprint.answer, "-d", depths, "-r", sprint.repetitions]
    words += ["-b", BATCH, "-ub", sprint.ubatch, "-ctk", sprint.kv, "-ctv", sprint.kv, "-fa", "on"]
    words += ["-dev", device, "-ngl", 0 if device == "none" else _ALL_LAYERS, "-t", threads]
    return [str(bench), *map(str, words)]


def _ask(engine: Started, streams: int, answer: int) -> Together:
    """One request a stream, all sent at once."""
    body = {"prompt": [_TOKEN] * PROMPT_TOKENS, "n_predict": answer, "ignore_eos": True, "cache_prompt": False}
    body |= {"temperature": 0.0, "seed": _SEED}
    pool = ThreadPoolExecutor(streams)
    began = time.monotonic()
    try:
        sent = [pool.submit(engine.ask, "/completion", body) for _ in range(streams)]
        answers = [each.result() for each in sent]
    finally:
        # Whatever is raised here ends the engine too, and that the threads.
        pool.shutdown(wait=False, cancel_futures=True)
    wall_s = time.monotonic() - began
    told: list[dict[str, Any]] = [each.get("timings") or {} for each in answers]
    if not all({"predicted_n", "predicted_ms"} <= set(each) for each in told):
        raise Error("llama-server answered without timings", exit=Exit.CHILD, hint="llmctl build")
    return Together(
        streams=streams,
        tokens=sum(int(each["predicted_n"]) for each in told),
        wall_s=wall_s,
        decode_s=sum(float(each["predicted_ms"]) for each in told) / 1e3,
        draft_tokens=sum(int(each.get("draft_n", 0)) for each in told),
        draft_accepted=sum(int(each.get("draft_n_accepted", 0)) for each in told),
    )
