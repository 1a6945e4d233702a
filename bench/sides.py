"""The two sides of a comparison: one subject of a result each, whether they are alike enough, and what differs between them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bench import llamabench, workload
from bench.result import Manifest, Point, Result, Subject
from supervisor.errors import Error, Exit

CLOCKS: Final = ("sm_mhz", "mem_mhz", "cpu_mhz")
"""Gauges that decide about figures."""
CLOCK_OFF: Final = 0.02
"""From which on two clocks differ: a boost clock's steps of 15 MHz are less."""
_PLACES: Final = frozenset(
    ("-m", "--model", "--host", "--port", "--alias", "-a", "--log-file", "--slot-save-path", "--api-key", "--api-key-file")
)
"""Flags that say where something lies or is called, and nothing of speed."""


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared: one subject of a result."""

    result: Result
    subject: Subject
    file: str
    """Where it was read, for messages."""

    @property
    def manifest(self) -> Manifest:
        """Of its run."""
        return self.result.manifest

    @property
    def points(self) -> tuple[Point, ...]:
        """Its own."""
        return tuple(each for each in self.result.points if each.target == self.subject.name)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something of the manifests that differs."""

    name: str
    a: str
    b: str


def pick(result: Result, file: str, name: str = "") -> Side:
    """The subject of that name, or the only one. Raises :class:`Error` (exit code 2) where there is none, or the choice."""
    names = [each.name for each in result.manifest.subjects]
    told = ", ".join(names)
    if not name and len(names) > 1:
        what = f"{file} measures several: {told}; one of them is to be compared with another result"
        raise Error(what, exit=Exit.USAGE, hint=f"'{file}#{names[0]}', or {file} alone, which compares them with each other")
    for each in result.manifest.subjects:
        if each.name == name or not name:
            return Side(result, each, file)
    raise Error(f"{file} measures no {name!r}; there is: {told}", exit=Exit.USAGE, hint=f"'{file}#{names[0]}'")


def unlike(a: Side, b: Side, *, anyway: bool) -> list[str]:
    """What makes a comparison worthless; raised unless ``anyway``."""
    kinds = [each.subject.kind == llamabench.KIND for each in (a, b)]
    if any(kinds) and not all(kinds):
        raise Error(
            f"one of them is llama-bench's and the other a server's ({a.subject.kind}, {b.subject.kind}): they measure different work",
            exit=Exit.USAGE,
            hint="llama-bench's rows with llama-bench's",
        )
    found = list[tuple[str, str]]()
    ours, theirs = a.manifest, b.manifest
    if not all(kinds) and ours.workload.work != theirs.workload.work:
        works = f"{workload.told(ours.workload)}; and {workload.told(theirs.workload)}"
        found.append((f"A and B were asked for different work: {works}", "measure both by the same workload"))
    if ours.replayed != theirs.replayed:
        traces = f"{ours.replayed or 'none'}; and {theirs.replayed or 'none'}"
        found.append((f"A and B replay different traces: {traces}", "replay the same trace for both"))
    if _place(ours) != _place(theirs):
        names = [
            ", ".join(filter(None, (each.machine.cpu, *each.machine.cards, each.machine.host[:8]))) for each in (ours, theirs)
        ]
        found.append((f"A and B ran on different machines: {names[0]}; and {names[1]}", "measure both on one machine"))
    if found and not anyway:
        what, hint = found[0]
        raise Error(what, exit=Exit.USAGE, hint=f"{hint}, or --anyway to see figures that say nothing of the software alone")
    return [what for what, _ in found]


def _place(manifest: Manifest) -> tuple[str, ...]:
    """What makes two machines the same. A card may be exchanged: a comparison may be about that. llama-bench tells no more than it."""
    return (manifest.machine.host,) if manifest.machine.host else (manifest.machine.cpu, *manifest.machine.cards)


def differences(a: Side, b: Side) -> Iterator[Difference]:
    """What a change may come from."""
    ours, theirs = dict(_told_of(a)), dict(_told_of(b))
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name, ""), theirs.get(name, "")
        if mine != other and not (name.startswith("clock ") and _near(mine, other)):
            yield Difference(name, mine, other)


def _near(a: str, b: str) -> bool:
    values = [float(word.split()[0]) for word in (a, b) if word]
    return len(values) == 2 and abs(values[0] / values[1] - 1) < CLOCK_OFF


def _told_of(side: Side) -> Iterator[tuple[str, str]]:
    """Name and value of all that decides about a side's figures, but for what an unlike work is refused by."""
    subject, manifest = side.subject, side.manifest
    for name in ("kind", "preset", "engine", "version", "model", "file", "sha256", "slots", "context"):
        value = getattr(subject, name)
        if value not in ("", None):
            yield name, str(value)[:12] if name == "sha256" else str(value)
    yield from _flags_of(subject.argv)
    machine = manifest.machine
    known = {"cpu": machine.cpu, "cards": "; ".join(machine.cards), "kernel": machine.kernel, "governor": machine.governor}
    yield from ((name, value) for name, value in {**known, "driver": machine.driver, "llmctl": manifest.llmctl}.items() if value)
    repetitions = [each for point in side.points for each in point.repetitions]
    for gauge in CLOCKS:
        seen = [each.gauges[gauge] for each in repetitions if gauge in each.gauges]
        if seen and (clock := statistics.fmean(seen)):
            yield f"clock {gauge}", f"{clock:.0f} MHz"
    yield "seed", str(manifest.seed)
    asked = manifest.workload
    yield "requests", f"{asked.requests} of each user"
    limits = ", ".join(f"{name} {value:g}" for name, value in asked.limits.items())
    yield "limits", limits
    if side.result.cut_short:
        yield "cut short", "yes"


def _flags_of(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A command line by flag; llama-bench's settings are ``name=value`` words."""
    flag = ""
    values = dict[str, list[str]]()
    for word in argv:
        name, equals, value = word.partition("=")
        if word.startswith("-") and not word[1:2].isdigit():
            flag = word
            values.setdefault(flag, [])
        elif flag:
            values[flag].append(word)
        elif equals:
            values[name] = [value]
    yield from ((name, " ".join(told) or "on") for name, told in values.items() if name not in _PLACES)
