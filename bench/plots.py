"""What a page draws of a result: each picture with its title and a sentence that says how to read it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.chart import HEIGHT, LETTER, Chart, Scale
from bench.columns import known, levels, metric, plain, short, values
from bench.result import Point, Result
from bench.sample import Sample
from supervisor.units import spell_ms

MOST_DOTS: Final = 2500
"""In one picture: more are slow to draw, and lie on each other."""
MOST_NAMES: Final = 9
"""Numbers beside the marks of one picture."""
MOST_ROWS: Final = 64
MOST_TIMELINES: Final = 4
NAME: Final = 24
"""Characters of a level's name."""
NEAR: Final = 24
"""A level's name is written once for marks that are nearer to each other."""
LEAST_PERCENT: Final = 5.0
"""A picture of repetitions goes at least so far: noise isn't to look like drift."""
WIDE: Final = 5
"""Levels whose names have room beside each other."""
MOST_PANELS: Final = 8
MINUTES_FROM_S: Final = 300
"""An axis longer than this is in minutes."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture and its words."""

    title: str
    about: str
    svg: str


def plots(result: Result, samples: Sequence[Sample]) -> list[Plot]:
    """Those that there is something for."""
    found = [
        _trade(result),
        _latency(result, "time_to_first_token", "Time to first token (TTFT)"),
        _latency(result, "inter_token_latency", "Time between tokens (ITL)"),
        _drift(result),
        _dots(result, samples),
        *_timelines(result, samples),
    ]
    return [each for each in found if each is not None]


def _numbers(result: Result) -> dict[str, int]:
    return {each.name: number for number, each in enumerate(result.manifest.subjects)}


def _trade(result: Result) -> Plot | None:
    """Tokens/s in all against tokens/s of one user: a curve a subject."""
    places: list[tuple[Point, float, float]] = []
    for point in result.points:
        user, everybody = (
            metric(point, "output_token_throughput_per_user", "p50"),
            metric(point, "output_token_throughput", "avg"),
        )
        if user is not None and everybody is not None:
            places.append((point, user, everybody))
    if not places:
        return None
    chart = Chart("Tokens per second in all against tokens per second of one user", right=40)
    left, top, right, bottom = chart.ends
    x, y = Scale.zero([user for _, user, _ in places], left, right), Scale.zero([every for *_, every in places], bottom, top)
    chart.axis_x(x, "tokens/s of one user (median)")
    chart.axis_y(y, "tokens/s in all (mean)")
    numbers = _numbers(result)
    for name, number in numbers.items():
        own = [(x(user), y(every)) for point, user, every in places if point.target == name]
        if len(own) > 1:
            chart.line(own, "curve", number)
    for point, user, every in places:
        told = f"{point.target}, {point.level}: {short(user)} tokens/s of one user, {short(every)} in all"
        chart.mark(x(user), y(every), numbers.get(point.target, 0), plain(told))
    named: list[tuple[str, float, float]] = []
    for point, user, every in places:
        name = plain(point.level, NAME)
        near = any(name == other and math.dist((x(user), y(every)), place) < NEAR for other, *place in named)
        if not near and chart.name(x(user), y(every), name, numbers.get(point.target, 0)):
            named.append((name, x(user), y(every)))
    return Plot(
        "What more users cost each of them",
        "Up is more for all, right is faster for each: the best corner is top right.",
        chart.svg(),
    )


def _latency(result: Result, tag: str, title: str) -> Plot | None:
    """p50 as a mark, up to p95 as a line, by level."""
    seen = [
        (point, p50, p95)
        for point in result.points
        if (p50 := metric(point, tag, "p50")) is not None and (p95 := metric(point, tag, "p95")) is not None
    ]
    if not seen:
        return None
    every, numbers = levels(result), _numbers(result)
    chart = Chart(f"{title} by level", bottom=24 if len(every) <= WIDE else 38)
    left, top, right, bottom = chart.ends
    y = Scale.zero([p95 for *_, p95 in seen], bottom, top)
    chart.axis_y(y, "ms")
    chart.line([(left, bottom), (right, bottom)], "axis")
    room = (right - left) / len(every)
    for place, level in enumerate(every):
        _level(chart, left + (place + 0.5) * room, plain(level), *((room * 2, place % 2) if len(every) > WIDE else (room, 0)))
    keys = [level.key for level in every]
    gap = min(52.0, room / (len(numbers) + 1))
    names = []
    for point, p50, p95 in seen:
        number = numbers.get(point.target, 0)
        x = left + (keys.index(point.level.key) + 0.5) * room + (number - (len(numbers) - 1) / 2) * gap
        chart.line([(x, y(p50)), (x, y(p95))], "whisker", number)
        chart.line([(x - 4, y(p95)), (x + 4, y(p95))], "whisker", number)
        chart.mark(x, y(p50), number, plain(f"{point.target}, {point.level}: p50 {short(p50)} ms, p95 {short(p95)} ms"))
        names.append((x, y(p50), short(p50), number))
    for name in names if len(names) <= MOST_NAMES else ():
        chart.name(*name)
    return Plot(
        title, "The mark is the median of all requests; one of twenty took longer than the line's end (p95).", chart.svg()
    )


def _level(chart: Chart, x: float, name: str, room: float, line: int) -> None:
    """Under the axis, cut to its room; many have two lines in turns."""
    chart.word(x, chart.ends[3] + 15 + 14 * line, _cut(name, room - LETTER), "middle")


def _cut(name: str, room: float) -> str:
    letters = max(2, int(room / LETTER))
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def _drift(result: Result) -> Plot | None:
    """Each repetition's tokens/s against the median of its point, a panel a level."""
    tag = "output_token_throughput"
    every, numbers = levels(result)[:MOST_PANELS], _numbers(result)
    lines: list[tuple[int, Point, list[float]]] = []
    for place, level in enumerate(every):
        for point in result.points:
            found = values(point.repetitions, tag)
            if point.level.key == level.key and len(found) > 1 and (middle := statistics.median(found)) > 0:
                lines.append((place, point, [(value / middle - 1) * 100 for value in found]))
    if not lines:
        return None
    chart = Chart("Tokens per second of each repetition against their median", top=26)
    left, top, right, bottom = chart.ends
    y = Scale.around([value for *_, found in lines for value in found], LEAST_PERCENT, bottom, top)
    chart.axis_y(y, "% of the median")
    chart.line([(left, y(0)), (right, y(0))], "axis")
    chart.word((left + right) / 2, chart.height - 8, "repetitions, in their order", "middle", "unit")
    room = (right - left) / len(every)
    for place, level in enumerate(every):
        letters = int(room / 6.4)
        name = plain(level)
        chart.word(left + (place + 0.5) * room, 16, name if len(name) <= letters else f"{name[: max(1, letters - 1)]}…", "middle")
        if place:
            chart.line([(left + place * room, top), (left + place * room, bottom)], "axis")
    for place, point, found in lines:
        number = numbers.get(point.target, 0)
        start, end = left + place * room + 12, left + (place + 1) * room - 12
        places = [(start + (end - start) * at / (len(found) - 1), y(value)) for at, value in enumerate(found)]
        chart.line(places, "curve", number)
        rates = values(point.repetitions, tag)
        for at, (x, height) in enumerate(places):
            told = f"{point.target}, {point.level}, repetition {at + 1}: {short(rates[at])} tokens/s ({found[at]:+.1f} %)"
            chart.mark(x, height, number, plain(told), "mark small")
    return Plot(
        "Whether repetitions agree",
        "tokens/s in all of each repetition, against the median of its level. A slope is drift; a wide band is noise.",
        chart.svg(),
    )


def _told(sample: Sample) -> str:
    said = f"{sample.target}, {sample.level}, repetition {sample.repetition + 1}, request {sample.number + 1}"
    ends = (
        f"failed: {sample.error}"
        if sample.error
        else f"TTFT {spell_ms(known(sample.ttft_ms) or 0)}, in all {spell_ms(known(sample.e2e_ms) or 0)}"
    )
    return plain(f"{said}: {ends}" + (f" ({sample.id})" if sample.id else ""), 240)


def _dots(result: Result, samples: Sequence[Sample]) -> Plot | None:
    """TTFT of each request over the run's time."""
    numbers = _numbers(result)
    counted = [each for each in samples if each.repetition >= 0 and known(each.sent_s) is not None and each.target in numbers]
    heard = [(each, ms) for each in counted if each.error is None and (ms := known(each.ttft_ms)) is not None and ms >= 0]
    failed = [each for each in counted if each.error is not None]
    if not heard and not failed:
        return None
    chart = Chart("Time to first token of each request over the run")
    left, top, right, bottom = chart.ends
    last_s = max(each.sent_s for each in counted)
    unit_s, unit = (60.0, "min") if last_s > MINUTES_FROM_S else (1.0, "s")
    x = Scale.zero([last_s / unit_s], left, right)
    y = Scale.zero([ms for _, ms in heard], bottom, top)
    chart.axis_x(x, f"{unit} from the run's beginning")
    chart.axis_y(y, "TTFT, ms")
    grain, drawn = 0.5, {}
    while True:
        drawn = {(each.target, round(x(each.sent_s / unit_s) / grain), round(y(ms) / grain)): (each, ms) for each, ms in heard}
        if len(drawn) <= MOST_DOTS:
            break
        grain *= 1.5
    size = 0.8 if len(drawn) < 300 else 0.5
    for each, ms in drawn.values():
        chart.mark(x(each.sent_s / unit_s), y(ms), numbers[each.target], _told(each), "dot", size)
    for each in failed[:MOST_DOTS]:
        chart.fault(x(each.sent_s / unit_s), bottom, _told(each))
    hidden = f" {len(drawn):,} of {len(heard):,} are drawn; the others lie under these." if len(drawn) < len(heard) else ""
    cross = f" A cross is a request that failed ({len(failed):,})." if failed else ""
    return Plot("Each request's time to first token", f"Each at the moment when it was sent.{cross}{hidden}", chart.svg())


def _timelines(result: Result, samples: Sequence[Sample]) -> list[Plot]:
    """Each subject's slowest repetition at its last level: a row a request, waiting pale, answering full."""
    found = []
    for name, number in list(_numbers(result).items())[:MOST_TIMELINES]:
        points = [each for each in result.points if each.target == name and each.repetitions]
        if not points:
            continue
        point = points[-1]
        slowest = max(point.repetitions, key=lambda each: known(each.duration_s) or 0.0).number
        own = [each for each in samples if (each.target, each.level, each.repetition) == (name, str(point.level), slowest)]
        own = sorted((each for each in own if known(each.sent_s) is not None), key=lambda each: each.sent_s)
        if own:
            found.append(_timeline(f"{name}, {point.level}", number, slowest, own))
    return found


def _timeline(whose: str, number: int, repetition: int, own: Sequence[Sample]) -> Plot:
    rows = own[:MOST_ROWS]
    each_height = min(16.0, max(5.0, (HEIGHT - 60) / len(rows)))
    chart = Chart(plain(f"Requests of {whose} over time"), height=max(120.0, len(rows) * each_height + 54), left=24)
    left, top, right, _ = chart.ends
    began_s = rows[0].sent_s

    def at(sample: Sample, ms: float | None) -> float:
        return sample.sent_s - began_s + (known(ms) or 0.0) / 1e3

    x = Scale.zero(
        [at(each, max(known(ms) or 0.0 for ms in (each.ttft_ms, each.last_ms, each.e2e_ms))) for each in rows], left, right
    )
    chart.axis_x(x, "s from the repetition's beginning")
    for row, each in enumerate(rows):
        y = top + row * each_height
        sent = x(at(each, 0))
        heard, ends = x(at(each, each.ttft_ms)), x(at(each, each.e2e_ms if known(each.e2e_ms) is not None else each.last_ms))
        end = max(heard, ends)
        chart.begin(_told(each))
        chart.box(sent, y + 1, heard - sent, each_height - 2, "wait", number)
        chart.box(heard, y + 1, end - heard, each_height - 2, "answer", number)
        chart.end()
        if each.error is not None:
            chart.fault(end + 6, y + each_height / 2, _told(each))
    more = f" The first {len(rows)} of {len(own):,} are drawn." if len(own) > len(rows) else ""
    told = f"Its slowest repetition, number {repetition + 1}: a row a request, pale until the first token, then its answer.{more}"
    return Plot(plain(f"Requests of {whose}"), told, chart.svg())
