"""One repetition's requests are drawn from a seed: the same lengths and times each time, never the same text."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench import workload
from bench.ask import OPEN, Arrivals, Ask, Level, Words, schedule

CHAT = workload.load("chat")
AGENT = workload.load("agent")


def shape(asks: tuple[Ask, ...]) -> list[tuple[int, int, float | None]]:
    return [(ask.prompt, ask.answer, ask.at_s) for ask in asks]


def seeds(asks: tuple[Ask, ...]) -> list[str]:
    return [piece.seed for ask in asks for piece in ask.pieces if isinstance(piece, Words)]


@pytest.mark.parametrize("level", [Level(users=2), Level(rate=3.0)])
def test_repetitions_and_runs_differ_in_their_texts_alone(level: Level) -> None:
    first = schedule(CHAT, level, 7, "a", 0)
    assert schedule(CHAT, level, 7, "a", 0) == first
    for other in (schedule(CHAT, level, 7, "a", 1), schedule(CHAT, level, 7, "b", 0)):
        assert shape(other) == shape(first)
        assert not set(seeds(other)) & set(seeds(first))
    assert shape(schedule(CHAT, level, 8, "a", 0)) != shape(first)


def test_as_many_as_were_asked_for() -> None:
    assert len(schedule(CHAT, Level(users=3), 0, "", 0)) == 3 * CHAT.requests
    assert len(schedule(CHAT, Level(rate=2.0), 0, "", 0)) == OPEN * CHAT.requests
    assert len(schedule(CHAT, Level(users=3), 0, "", -1)) == 3  # a warm-up


def test_lengths_are_within_the_workloads_and_all_of_them_occur() -> None:
    prompts = [ask.prompt for ask in schedule(CHAT, Level(users=100), 0, "", 0)]
    span = CHAT.prompt_span
    assert span.least <= min(prompts) < span.least + 10
    assert span.most - 10 < max(prompts) <= span.most


def test_an_agents_prompts_begin_alike_within_a_repetition_only() -> None:
    asks, later = (schedule(AGENT, Level(users=2), 0, "", number) for number in (0, 1))
    assert {ask.pieces[0] for ask in asks} == {asks[0].pieces[0]}
    assert isinstance(asks[0].pieces[0], Words)
    assert asks[0].pieces[0].upto == AGENT.shared
    assert len({ask.pieces[1] for ask in asks}) == len(asks)
    assert later[0].pieces[0] != asks[0].pieces[0]
    assert all(isinstance(ask.pieces[-1], Words) and ask.pieces[-1].upto == ask.prompt for ask in asks)


@pytest.mark.parametrize(("arrivals", "spread"), [("poisson", 1.0), ("constant", 0.0)])
def test_arrivals_come_at_their_rate(arrivals: Arrivals, spread: float) -> None:
    times = [ask.at_s for ask in schedule(workload.changed(CHAT, requests=400), Level(rate=5.0, arrivals=arrivals), 3, "", 0)]
    assert times[0] == 0
    gaps = [(after or 0) - (before or 0) for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(spread, abs=0.06)  # an exponential's is its mean


def test_levels_have_a_name_and_a_key() -> None:
    assert [str(level) for level in (Level(users=1), Level(users=4), Level(rate=0.5), Level(name="replay"))] == [
        *("1 user", "4 users", "0.5/s", "replay")
    ]
    assert Level(users=2).key == Level(users=2, arrivals="constant").key != Level(rate=2.0).key
