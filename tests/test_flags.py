"""Each flag on both sides of its threshold. A repetition that is well has none."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bench import flags
from bench.result import Repetition
from bench.sample import Sample
from bench.workload import Workload

FRESH = Workload(name="chat", prompt="200", answer="101")
SHARING = Workload(name="agent", prompt="2200", answer="101", shared=2000)
WELL: dict[str, float] = {
    "sm_mhz": 1700.0,
    "throttled": 0.0,
    "others_cpu_share": 0.05,
    "steal_share": 0.0,
    "generator_cpu_share": 0.1,
}


def sample(number: int = 0, **changed: Any) -> Sample:
    """Answered alone: 200 tokens in 400 ms by the server's clock, the first of 101 tokens after 410 ms, then one each 10 ms."""
    told: dict[str, Any] = {
        "sent_s": number * 10.0,
        "late_ms": 0.4,
        "status": 200,
        "ttft_ms": 410.0,
        "last_ms": 1410.0,
        "e2e_ms": 1411.0,
        "prompt_tokens": 200,
        "cached_tokens": 0,
        "completion_tokens": 101,
        "prefill_tps": 500.0,
        "decode_tps": 100.0,
        "asked_answer": 101,
    }
    return Sample(target="llmctl", level="1 user", repetition=0, number=number, **{**told, **changed})


def repetitions(*gauges: Mapping[str, float], **values: Sequence[float]) -> list[Repetition]:
    """As many as there are gauges, or else values of each figure."""
    count = len(gauges) or len(next(iter(values.values())))
    return [
        Repetition(
            number=number,
            began_s=number * 10.0,
            duration_s=9.0,
            values={tag: its[number] for tag, its in values.items()},
            gauges=gauges[number] if gauges else WELL,
        )
        for number in range(count)
    ]


def of(*samples: Sample, reps: Sequence[Repetition] = (), workload: Workload = FRESH, replayed: bool = False) -> tuple[str, ...]:
    return flags.of_point(workload, samples, reps, replayed=replayed)


def words(found: Sequence[str]) -> list[str]:
    return [each.partition(":")[0] for each in found]


def test_nothing_is_said_of_what_is_well() -> None:
    steady = [100.0, 101.0, 99.0, 100.5, 100.0]
    reps = repetitions(time_to_first_token=steady, inter_token_latency=steady, output_token_throughput=steady)
    assert of(*map(sample, range(8)), reps=reps) == ()
    assert of() == ()
    assert of(sample(completion_tokens=None, prompt_tokens=None, cached_tokens=None, decode_tps=None)) == ()


def test_errors_are_counted_and_the_commonest_reason_is_named() -> None:
    found = of(
        *(sample(number, error="http 503", status=503, e2e_ms=None) for number in range(2)),
        sample(2, error="connection reset", e2e_ms=None),
        sample(3),
    )
    assert found == ("errors: 3 of 4 requests failed, most often with: http 503",)
    assert of(sample(), sample(1, left=True)) == ()  # a client that was to leave


def test_answers_that_ended_early() -> None:
    found = of(sample(), sample(1, completion_tokens=60, last_ms=1000.0), sample(2, completion_tokens=80, last_ms=1200.0))
    assert found == ("short_answers: 2 of 3 ended early, in the median after 70 of 101 tokens",)
    assert of(sample(asked_answer=None)) == ()


@pytest.mark.parametrize(("tokens", "said"), [(20, ["few_tokens"]), (21, [])])
def test_few_tokens(tokens: int, said: list[str]) -> None:
    assert words(of(sample(completion_tokens=tokens, asked_answer=tokens, last_ms=410.0 + 10 * (tokens - 1)))) == said


class TestCacheHits:
    @pytest.mark.parametrize(("cached", "said"), [(0, False), (150, True), (199, True)])
    def test_a_text_that_was_asked_before(self, cached: int, said: bool) -> None:
        samples = [sample(number, cached_tokens=cached if number else 0, prefill_tps=None) for number in range(2)]
        assert words(of(*samples)) == ["cache_hits"] * said

    def test_all_of_them_were_asked_before(self) -> None:
        """As many tokens of each, as a template's: but no template is so long."""
        found = of(*(sample(number, cached_tokens=199, prefill_tps=None) for number in range(4)))
        assert words(found) == ["cache_hits"]
        assert "24% more" in found[0]  # 49 of 200, beyond three quarters

    def test_the_template_s_beginning_is_no_hit(self) -> None:
        """SmolLM2's is 24 tokens long, give or take what a text begins with."""
        heads = [0, 24, 25, 24, 24, 26]
        assert of(*(sample(number, cached_tokens=head, prefill_tps=None) for number, head in enumerate(heads))) == ()
        heads[3] = 150
        found = of(*(sample(number, cached_tokens=head, prefill_tps=None) for number, head in enumerate(heads)))
        assert found == ("cache_hits: 11% more of the prompts' tokens came out of the cache than was meant: each was to be new",)

    @pytest.mark.parametrize(("cached", "said"), [(2000, []), (2044, []), (2045, ["cache_hits"])])
    def test_what_is_shared_may_be_found(self, cached: int, said: list[str]) -> None:
        found = of(sample(prompt_tokens=2200, cached_tokens=cached, prefill_tps=None), workload=SHARING)
        assert words(found) == said
        assert all("2000 of each were to be" in each for each in found)

    def test_a_replay_shares_what_its_trace_says(self) -> None:
        assert of(sample(cached_tokens=199, prefill_tps=None), replayed=True) == ()


class TestTimingsDisagree:
    @pytest.mark.parametrize(("server_tps", "said"), [(104.0, []), (106.0, ["timings_disagree"]), (94.0, ["timings_disagree"])])
    def test_decode(self, server_tps: float, said: list[str]) -> None:
        assert words(of(sample(decode_tps=server_tps))) == said

    def test_in_words(self) -> None:
        assert of(sample(decode_tps=200.0)) == (
            "timings_disagree: tokens came 50% slower than the server says that it made them",
        )
        assert of(sample(decode_tps=50.0)) == (
            "timings_disagree: tokens came 100% faster than the server says that it made them",
        )

    @pytest.mark.parametrize(
        ("ttft_ms", "said"), [(379.0, ["timings_disagree"]), (381.0, []), (420.0, []), (421.0, ["timings_disagree"])]
    )
    def test_prefill_of_400_ms(self, ttft_ms: float, said: list[str]) -> None:
        assert words(of(sample(ttft_ms=ttft_ms, last_ms=ttft_ms + 1000))) == said

    def test_what_was_cached_took_no_time(self) -> None:
        half = {"prompt_tokens": 400, "cached_tokens": 200}
        assert of(sample(**half), workload=Workload(name="agent", prompt="400", answer="101", shared=200)) == ()

    def test_five_percent_of_a_long_one(self) -> None:
        long = {"prompt_tokens": 2000, "last_ms": 5200.0, "e2e_ms": 5201.0}  # 4 s by the server
        assert of(sample(ttft_ms=4199.0, **long)) == ()
        found = of(sample(ttft_ms=4201.0, **{**long, "last_ms": 5201.0}))
        assert found == ("timings_disagree: the first token came after 4201 ms, of which the server says that it read for 4000",)

    def test_who_waits_for_another_isn_t_held_against_the_server_s_clock(self) -> None:
        waits = [sample(number, sent_s=number * 0.2, ttft_ms=2000.0, last_ms=3000.0, e2e_ms=3001.0) for number in range(3)]
        assert of(*waits) == ()
        assert words(of(waits[0])) == ["timings_disagree"]
        meets_one_of_unknown_end = [sample(0, error="cut", e2e_ms=None), sample(1, ttft_ms=2000.0, last_ms=3000.0)]
        assert words(of(*meets_one_of_unknown_end)) == ["errors"]


class TestClocks:
    @pytest.mark.parametrize(("lowest", "said"), [(1531.0, []), (1529.0, ["clock_drop"])])
    def test_a_card_s(self, lowest: float, said: list[str]) -> None:
        assert words(of(sample(), reps=repetitions(WELL, {**WELL, "sm_mhz": lowest}, WELL))) == said

    def test_in_words(self) -> None:
        found = of(sample(), reps=repetitions(WELL, {**WELL, "sm_mhz": 1275.0}))
        assert found == ("clock_drop: the card's clock was 1700 MHz in one repetition and 1275 in another, 25% less",)

    @pytest.mark.parametrize(("share", "said"), [(0.1, ["clock_drop"]), (0.08, [])])
    def test_slowed_down_by_heat(self, share: float, said: list[str]) -> None:
        assert words(of(sample(), reps=repetitions(WELL, {**WELL, "throttled": share + 0.01}))) == said

    @pytest.mark.parametrize(("cores", "said"), [(0.5, ["clock_drop"]), (0.4, [])])
    def test_the_cpu_s_counts_where_it_has_work(self, cores: float, said: list[str]) -> None:
        busy = {**WELL, "cpu_share": cores}
        assert words(of(sample(), reps=repetitions({**busy, "cpu_mhz": 4400.0}, {**busy, "cpu_mhz": 3000.0}))) == said


class TestRepetitions:
    def test_one_that_falls(self) -> None:
        reps = repetitions(output_token_throughput=[100.0, 98.0, 96.0, 94.0, 92.0])
        assert of(sample(), reps=reps) == ("rep_drift: tok/s fell by 8% from the first repetition to the last",)

    @pytest.mark.parametrize(
        ("values", "drift"),
        [
            ([100.0, 101.0, 102.0, 103.0, 104.0], 4 / 102),
            ([104.0, 103.0, 102.0, 101.0, 100.0], -4 / 102),
            ([10.0, 10.0, 10.0, 10.0, 10.0], 0.0),
            ([10.0, 11.0, 12.0], 0.0),
            ([10.0, 14.0, 9.0, 15.0, 10.0], 0.0),
        ],
    )
    def test_the_drift(self, values: list[float], drift: float) -> None:
        assert flags.drift(values) == pytest.approx(drift)

    def test_one_outlier_is_no_drift(self) -> None:
        assert flags.drift([100.0, 100.5, 100.2, 100.1, 160.0]) == pytest.approx(0.0, abs=0.01)

    @pytest.mark.parametrize(("count", "called"), [(3, 0), (4, 2), (5, 10), (6, 40)])
    def test_order_alone_is_seldom_called_a_drift(self, count: int, called: int) -> None:
        """Of all orders, one of ten at most: two-sided, Kendall's exact distribution (by inversions, Mahonian numbers: 1, 5, 14 …)."""
        orders = list(itertools.permutations(range(1, count + 1)))
        found = sum(flags.drift(order) != 0 for order in orders)
        assert found == called
        assert found <= len(orders) / 10

    @pytest.mark.parametrize(("high", "said"), [(103.3, []), (103.4, ["high_variance"])])
    def test_a_wide_spread(self, high: float, said: list[str]) -> None:
        low = 200.0 - high
        assert words(of(sample(), reps=repetitions(inter_token_latency=[high, low, 100.0, high, low]))) == said

    def test_the_worst_figure_is_named(self) -> None:
        wide, narrow = [100.0, 130.0, 80.0, 120.0, 70.0], [100.0, 110.0, 91.0, 108.0, 90.0]
        found = of(sample(), reps=repetitions(time_to_first_token=wide, inter_token_latency=narrow))
        assert found == ("high_variance: TTFT is spread by 30% (robust CV) over 5 repetitions",)

    def test_two_repetitions_say_nothing(self) -> None:
        assert of(sample(), reps=repetitions(output_token_throughput=[100.0, 50.0])) == ()


class TestMachine:
    @pytest.mark.parametrize(
        ("gauge", "well", "bad", "word"),
        [
            ("others_cpu_share", 0.19, 0.21, "busy_machine"),
            ("steal_share", 0.019, 0.021, "busy_machine"),
            ("generator_cpu_share", 0.79, 0.81, "late_generator"),
        ],
    )
    def test_both_sides(self, gauge: str, well: float, bad: float, word: str) -> None:
        assert of(sample(), reps=repetitions(*[{**WELL, gauge: well}] * 3)) == ()
        assert words(of(sample(), reps=repetitions(*[{**WELL, gauge: bad}] * 3))) == [word]

    def test_in_words(self) -> None:
        bad = {"others_cpu_share": 1.3, "steal_share": 0.12, "generator_cpu_share": 0.97}
        assert of(sample(), reps=repetitions(bad)) == (
            "busy_machine: other processes used 1.30 cores",
            "busy_machine: the host of this virtual machine took 12% of its cores",
            "late_generator: it used 97% of the one core that it has",
        )

    @pytest.mark.parametrize(
        ("late_ms", "said"), [(4.9, []), (7.5, ["late_generator: requests were sent 7.5 ms after they were due (p99)"])]
    )
    def test_requests_that_were_late(self, late_ms: float, said: list[str]) -> None:
        assert list(of(*(sample(number, late_ms=late_ms) for number in range(5)))) == said

    def test_what_isn_t_told_isn_t_flagged(self) -> None:
        assert of(sample(late_ms=None), reps=repetitions({}, {}, {})) == ()
