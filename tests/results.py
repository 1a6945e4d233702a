"""A made-up result: two subjects at three levels, drawn from a seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Final

from bench import result
from bench.ask import Level
from bench.result import Machine, Manifest, Result, Subject
from bench.sample import Sample
from bench.workload import Workload

SUBJECTS: Final = ("tiny", "llama-server")
USERS: Final = (1, 2, 4)
REPETITIONS: Final = 5
REQUESTS: Final = 4


def _sample(draw: random.Random, target: str, users: int, repetition: int, number: int, sent_s: float) -> Sample:
    slower = 1.0 if target == SUBJECTS[0] else 1.15
    ttft_ms = draw.gauss(40, 4) * users * slower
    itl_ms = max(1.0, draw.gauss(9, 0.5) * (1 + 0.3 * users) * slower * (1 + 0.01 * repetition))
    last_ms = ttft_ms + itl_ms * 127
    return Sample(
        target=target,
        level=str(Level(users=users)),
        repetition=repetition,
        number=number,
        sent_s=sent_s,
        status=200,
        id=f"req_{number}",
        ttft_ms=ttft_ms,
        ttfo_ms=ttft_ms,
        last_ms=last_ms,
        e2e_ms=last_ms + 1,
        events=128,
        gaps_ms=(itl_ms,) * 127,
        prompt_tokens=160,
        cached_tokens=4,
        completion_tokens=128,
        asked_answer=128,
        draft_tokens=60,
        draft_accepted=45,
    )


def made(
    names: tuple[str, ...] = SUBJECTS, users: tuple[int, ...] = USERS, *, flags: tuple[str, ...] = (), **more: Any
) -> tuple[Result, list[Sample]]:
    """The result and its samples; ``more`` differs in every sample, ``flags`` are the first point's."""
    draw = random.Random(7)
    workload = Workload(name="chat", prompt="80-240", answer="128", concurrency=tuple(map(str, users)), ttft_ms=150.0)
    samples: dict[tuple[str, int], list[Sample]] = {(name, count): [] for name in names for count in users}
    began: dict[tuple[str, int], dict[int, float]] = {key: {} for key in samples}
    now_s = 0.0
    for repetition in range(REPETITIONS):
        for count in users:
            for name in names:
                began[name, count][repetition] = now_s
                ends = [now_s] * count
                for number in range(REQUESTS * count):
                    user = ends.index(min(ends))
                    found = _sample(draw, name, count, repetition, number, ends[user])
                    ends[user] = found.sent_s + (found.e2e_ms or 0) / 1e3
                    samples[name, count].append(_with(found, more))
                now_s = max(ends) + 0.1
    points = []
    for (name, count), own in samples.items():
        gauges = {
            number: {"rss_mib": 310.0 + count + number, "power_w": 80.0 + count, "energy_j": 90.0}
            for number in began[name, count]
        }
        points.append(result.point(name, Level(users=count), own, workload.limits, began_s=began[name, count], gauges=gauges))
    if flags:
        points[0] = _with(points[0], {"flags": flags})
    manifest = Manifest(
        created_at=1_796_000_000.0,
        llmctl="0.1.0",
        workload=workload,
        seed=0,
        salt="abcd",
        subjects=tuple(
            Subject(
                name=name,
                kind="llama.cpp",
                model="tiny",
                file="SmolLM2.gguf",
                sha256="ab" * 32,
                slots=4,
                argv=("llama-server", "-c", "4096"),
            )
            for name in names
        ),
        machine=Machine(host="0f", cpu="Some CPU", cores=2, memory_mib=24_000, kernel="Linux 6.1"),
        generator={"cpu_share": 0.031, "us_an_event": 12.3},
    )
    every = sorted((each for own in samples.values() for each in own), key=lambda each: each.sent_s)
    return Result(manifest=manifest, points=tuple(points)), every


def _with(value: Any, more: dict[str, Any]) -> Any:
    return dataclasses.replace(value, **more)
