"""Each figure is what its formula says, on samples of which the right value is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench import figures
from bench.figures import Spread
from bench.sample import Sample


def sample(number: int = 0, **more: Any) -> Sample:
    """Sent at 10 s; first text after 100 ms, then one each 20 ms, 11 tokens, ended 5 ms after the last."""
    told: dict[str, Any] = {"target": "t", "level": "1 user", "repetition": 0, "number": number, "sent_s": 10.0, "status": 200}
    told |= {"ttft_ms": 100.0, "ttfo_ms": 140.0, "last_ms": 300.0, "e2e_ms": 305.0, "events": 11, "gaps_ms": (20.0,) * 10}
    told |= {"prompt_tokens": 50, "cached_tokens": 10, "completion_tokens": 11, "asked_answer": 11}
    return Sample(**{**told, **more})


def test_the_figures_of_a_request() -> None:
    found = {tag: spread.avg for tag, spread in figures.of_requests([sample()]).items()}
    assert found["time_to_first_token"] == 100
    assert found["time_to_first_output_token"] == 140
    assert found["inter_token_latency"] == 20  # (300 - 100) / 10
    assert found["time_per_output_token"] == 20.5  # (305 - 100) / 10
    assert found["request_latency"] == 305
    assert found["output_token_throughput_per_user"] == 50
    assert found["computed_prefill_throughput_per_user"] == 400  # 40 computed in 0.1 s
    assert found["usage_prompt_cache_read_tokens"] == 10
    assert found["inter_chunk_latency"] == 20


def test_tokens_are_divided_by_and_not_events() -> None:
    """With drafts an event may carry several tokens."""
    found = figures.of_requests([sample(completion_tokens=21, events=11)])
    assert found["inter_token_latency"].avg == 10


def test_what_is_not_known_is_in_no_figure() -> None:
    found = figures.of_requests([sample(completion_tokens=None, cached_tokens=None, ttfo_ms=None)])
    assert not {"inter_token_latency", "usage_prompt_cache_read_tokens", "time_to_first_output_token"} & set(found)
    assert figures.of_requests([sample(completion_tokens=1)]).get("inter_token_latency") is None


def test_the_figures_of_a_repetition() -> None:
    """Two requests, the second sent 1 s later: 1.305 s from the first sending to the last end."""
    samples = [sample(draft_tokens=10, draft_accepted=7), sample(1, sent_s=11.0), sample(2, error="500 x"), sample(3, left=True)]
    found = figures.of_repetition(samples, {"ttft_ms": 100}, energy_j=44.0)
    assert found["output_token_throughput"] == pytest.approx(22 / 1.305)
    assert found["total_token_throughput"] == pytest.approx(122 / 1.305)
    assert found["request_throughput"] == pytest.approx(2 / 1.305)
    assert found["goodput"] == pytest.approx(2 / 1.305)
    assert found["cached_share"] == 0.2
    assert found["draft_acceptance"] == 0.7
    assert found["energy_per_output_token"] == 2.0
    assert found["time_to_first_token"] == 100  # the median of the requests
    assert figures.count(samples) == figures.Counts(ok=2, error=1, left=1, short=0)


def test_a_request_is_good_within_all_limits() -> None:
    assert figures.is_good(sample(), {"ttft_ms": 100, "tpot_ms": 20.5, "e2e_ms": 305})
    assert not figures.is_good(sample(), {"ttft_ms": 100, "tpot_ms": 20.4})
    assert not figures.is_good(sample(completion_tokens=None), {"tpot_ms": 1000})
    assert not figures.is_good(sample(error="cut"), {"ttft_ms": 100})


def test_an_answer_of_another_length_than_was_meant_is_counted() -> None:
    assert figures.count([sample(), sample(1, completion_tokens=9)]).short == 1


def test_of_nothing_there_is_nothing() -> None:
    assert figures.of_repetition([], {"ttft_ms": 1.0}) == {}
    assert figures.of_repetition([sample(error="x")], {}) == {}
    assert Spread.over("ms", []) is None


def test_a_spread_is_that_of_its_values() -> None:
    found = Spread.over("ms", [4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert (found.min, found.p25, found.p50, found.p90, found.max) == (1, 1.75, 2.5, pytest.approx(3.7), 4)  # numpy.percentile's
    assert (found.avg, found.sum, found.count) == (2.5, 10, 4)
    assert found.std == pytest.approx(math.sqrt(1.25))


def test_every_figure_says_what_it_is() -> None:
    for figure in figures.FIGURES:
        assert figure.formula
        assert figure.unit
    assert set(figures.HEADLINE) <= set(figures.BY_TAG)
