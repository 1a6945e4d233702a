"""Why a child ended, from its exit code, the end of its log and what the machine says about it. Pure: it reads no log and asks no card.

What the texts mean stands in ``symptoms``. A kill from outside is looked at before the log, since such a child has nothing to say
about its end, and lines that a single request caused, which end nothing, are left out. The machine has the last word: a CUDA error
after a suspend is the suspend's.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Final

from supervisor.symptoms import (
    BUILD,
    CARD,
    CHECK,
    ENDS_NOTHING,
    FAILING,
    LOGS,
    MEMORY,
    RELOAD,
    RESTART,
    RULES,
    SEAT,
    XIDS,
    Kind,
    Retry,
)

__all__ = ["Cause", "Kind", "Retry", "Scene", "last_words", "of_exit"]

MOST_LINES: Final = 5
"""Of the child's own lines in a cause."""
MOST_CHARACTERS: Final = 300
"""Of one such line."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a child ended, for a person: one sentence, what to type next, and the child's own last telling lines."""

    text: str
    retry: Retry = Retry.SOON
    hint: str = LOGS
    kind: Kind = Kind.OTHER
    lines: tuple[str, ...] = ()
    """At most :data:`MOST_LINES`, without time stamps, none longer than :data:`MOST_CHARACTERS`."""
    innocent: bool = False
    """Nothing that a request holds brings it about, although its kind might."""
    rule: str = ""
    """The entry of ``symptoms.RULES`` that decided, if one did."""

    @property
    def permanent(self) -> bool:
        """It comes back at once if the same command is tried again."""
        return self.retry is Retry.NEVER

    @property
    def blames_request(self) -> bool:
        """Whether a request that was in flight may have been the reason."""
        return not (self.innocent or self.permanent or self.kind in (Kind.OUTSIDE, Kind.NO_CARD))


@dataclass(frozen=True, slots=True)
class Scene:
    """What the machine says about an end."""

    cuda: bool = False
    """The child was to run on an NVIDIA card."""
    no_card: str = ""
    """NVML's error, if it gives one."""
    xids: tuple[int, ...] = ()
    """What the kernel logged of the card while the child ran."""
    oom_kills: int = 0
    """How often the kernel killed for want of memory while the child ran."""
    slept: bool = False
    """The machine was suspended while the child ran."""


SIGNALS: Final[dict[int, Cause]] = {
    signal.SIGILL: Cause("the engine was built for another CPU", Retry.NEVER, BUILD),
    signal.SIGBUS: Cause("the model file was cut while it was mapped, or its disk failed (SIGBUS)", hint=CHECK, innocent=True),
    signal.SIGABRT: Cause("the engine aborted"),
}
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_STAMP: Final = re.compile(r"^\d+(?:\.\d+){3} [A-Z] ")
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
_NAMING: Final = re.compile("error|fail|abort|assert|invalid|unable", re.IGNORECASE)
_DYING: Final = re.compile(r"^CUDA error: |GGML_ASSERT\(.*\) failed$", re.MULTILINE)


def of_exit(returncode: int, log_tail: str, scene: Scene = Scene()) -> Cause:
    """Classify an exit by its code (negative: a signal), the end of its log and what the machine says.

    The child's own line that tells most is part of the text, because it knows best: the one with the known pattern, else its last
    that names a fault. Never raises, whatever the log holds.
    """
    if 128 < returncode <= 128 + signal.NSIG:  # a shell between us and it (LLMCTL_ENGINE may be a script) names a signal so
        returncode = 128 - returncode
    lines = _clean(log_tail)
    telling = [line for line in lines if _tells(line, lines)]
    text = "\n".join(telling)
    outside = _from_outside(returncode, text, scene)
    if outside is not None:  # what it wrote last has nothing to do with somebody's kill
        return outside if outside.kind is Kind.OUTSIDE else replace(outside, lines=tuple(lines[-MOST_LINES:]))
    for rule in RULES:
        match = rule.pattern.search(text)
        if match:
            at = text.count("\n", 0, match.start())
            shown = tuple(telling[max(0, at - 1) :][:MOST_LINES])
            text = f"{rule.text}: {telling[at]}"
            return _by_scene(Cause(text, rule.retry, rule.hint, rule.kind, shown, rule.innocent, rule.name), scene)
    found = SIGNALS.get(-returncode) or Cause(_ended(returncode))
    faults = [line for line in telling if _NAMING.search(line)]
    if faults and (returncode > 0 or returncode == -signal.SIGABRT):
        found = replace(found, text=f"{found.text}: {faults[-1]}")
    return _by_scene(replace(found, lines=tuple((faults or lines)[-MOST_LINES:])), scene)


def of_memory(log_tail: str, scene: Scene = Scene()) -> Cause | None:
    """What the log of a child that lives says of memory that ran out; None if it says nothing of it.

    An allocation that fails in a decode is answered with an error, and the engine goes on (ggml-cuda.cu, ``ggml_cuda_pool_leg::alloc``).
    """
    if not any(word in log_tail for word in ("out of memory", "insufficient memory", "bad_alloc")):
        return None
    found = of_exit(1, log_tail, scene)
    return found if found.kind in (Kind.DEVICE_MEMORY, Kind.HOST_MEMORY, Kind.GRAPH_MEMORY) else None


def last_words(log_tail: str) -> str:
    """The last line of a log that names a fault, without its time stamp; empty if there is none."""
    lines = _clean(log_tail)
    return next((line for line in reversed(lines) if _tells(line, lines) and _NAMING.search(line)), "")


def _clean(log_tail: str) -> list[str]:
    """Its lines as a person reads them: no time stamp, no colour, no control character, cut."""
    lines = (_STAMP.sub("", _COLOUR.sub("", line)) for line in log_tail.splitlines())
    plain = ("".join(char if char.isprintable() else " " for char in line).strip() for line in lines)
    return [line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 1] + "…" for line in plain if line]


def _tells(line: str, lines: list[str]) -> bool:
    """Whether it may say why the process ended. Without ``-dev`` an engine that finds no CUDA goes on, on the CPU."""
    if "failed to initialize CUDA: " in line:
        return any("invalid device: CUDA" in other for other in lines)
    return not ENDS_NOTHING.search(line)


def _from_outside(returncode: int, text: str, scene: Scene) -> Cause | None:
    """It was stopped by somebody else; not if its log says that it was dying anyway."""
    number = -returncode
    if number == signal.SIGKILL and scene.oom_kills > 0:
        return Cause("the machine's memory ran out and the kernel killed it", hint=MEMORY, kind=Kind.HOST_MEMORY)
    if _DYING.search(text):
        return None
    if returncode == 0:
        return Cause("it was stopped from outside llmctl (exit code 0)", kind=Kind.OUTSIDE)
    if "Received second interrupt" in text:  # tools/server/server.cpp:32
        return Cause("it was stopped from outside llmctl (a second stop signal)", kind=Kind.OUTSIDE)
    if number == signal.SIGKILL:
        return Cause(
            "it was killed from outside llmctl (SIGKILL)", hint="dmesg, to see whether the kernel did", kind=Kind.OUTSIDE
        )
    if number in _FROM_OUTSIDE:
        return Cause(f"it was stopped from outside llmctl ({_signal_name(number)})", kind=Kind.OUTSIDE)
    return None


def _ended(returncode: int) -> str:
    return f"it died of {_signal_name(-returncode)}" if returncode < 0 else f"it ended with code {returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _by_scene(found: Cause, scene: Scene) -> Cause:
    """What the machine knows better: the card is gone, its driver was exchanged, the machine slept."""
    if found.rule == "cache-memory" and not scene.cuda:
        return replace(found, text=found.text.replace("the card's", "the machine's", 1), hint=MEMORY, kind=Kind.HOST_MEMORY)
    about_card = found.kind in (Kind.CUDA, Kind.ILLEGAL_ACCESS, Kind.NO_CARD)
    if not about_card and (found.rule or not scene.cuda or found.permanent):
        return found
    if "mismatch" in scene.no_card.lower():
        return _lost(found, f"the NVIDIA driver was upgraded under a running kernel ({scene.no_card})", RESTART)
    gone = re.search("lost|fallen off|requires (?:restart|reset)", scene.no_card, re.IGNORECASE)
    if gone or 79 in scene.xids:
        return _lost(found, f"the card was lost ({scene.no_card or 'Xid 79: ' + XIDS[79]})", SEAT)
    if about_card and scene.slept and not found.permanent:
        slept = "the machine slept while it ran, and CUDA did not survive that"
        return replace(found, text=f"{slept}: {found.text}", retry=Retry.SOON, hint=RELOAD, kind=Kind.NO_CARD)
    if scene.no_card and not found.permanent:
        return _lost(found, f"the NVIDIA driver doesn't answer ({scene.no_card})", CARD)
    if not about_card or not scene.xids:
        return found
    named = ", ".join(f"Xid {xid}: {XIDS[xid]}" if xid in XIDS else f"Xid {xid}" for xid in dict.fromkeys(scene.xids[-3:]))
    hint = "restart the machine; if it comes back, the card is failing" if FAILING & {*scene.xids} else found.hint
    return replace(found, text=f"{found.text} ({named})", hint=hint)


def _lost(found: Cause, why: str, hint: str) -> Cause:
    return replace(found, text=f"{why}: {found.text}", retry=Retry.LATER, hint=hint, kind=Kind.NO_CARD)
