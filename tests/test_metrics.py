"""What a scrape says: in both formats, held against strict readers; counted exactly once, and never backwards."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser as text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.samples import Sample

from supervisor import metrics, pace
from supervisor.ledger import Ledger
from supervisor.lifecycle import State
from supervisor.meter import Meter, Reading
from supervisor.metrics import DECLARED, Live, LivePreset, Metrics
from supervisor.record import Record, Status
from supervisor.routes import ROUTES
from supervisor.row import Measured

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
CHAT = "/v1/chat/completions"
EVENT = b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"x"}}],"object":"chat.completion.chunk"}\n\n'
NOW = Live(presets={}, cpu_s=0.5, rss_bytes=50_000_000)


def record(**known: Any) -> Record:
    """Of a request that has closed; what isn't given is unknown."""
    return Record(**{"id": "req_1", "opened_at": 1.0, "closed_at": 2.0, "preset": "small", "route": CHAT, "status": "ok"} | known)


def live(power_w: float | None = None, **presets: LivePreset) -> Live:
    return Live(presets=presets, power_w=power_w, lost=3, cpu_s=1.25, rss_bytes=60_000_000)


def parsed(found: Metrics, at: Live = NOW, accept: str = "") -> dict[str, Metric]:
    """The metrics of a scrape, by the names that they are declared with."""
    body, content_type = found.scrape(at).render(accept)
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    read = openmetrics if accept else text
    made = {}
    for family in read.text_string_to_metric_families(body.decode()):
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        made[family.name if family.name.endswith(ending) else family.name + ending] = family
    return made


def samples(found: Metrics, at: Live = NOW) -> dict[tuple[str, ...], float]:
    """Every sample: its name and its labels' values in the order of their names."""
    return {key(sample): sample.value for family in parsed(found, at).values() for sample in family.samples}


def key(sample: Sample) -> tuple[str, ...]:
    return sample.name, *(value for _, value in sorted(sample.labels.items()))


def everything() -> tuple[Metrics, Live]:
    """Counters of which each has something, and a moment of which everything is known."""
    found = Metrics("b11312")
    found.observe(
        record(
            prompt_tokens=40,
            cached_tokens=30,
            completion_tokens=9,
            wasted_tokens=2,
            draft_tokens=6,
            draft_accepted=5,
            queue_ms=0.0,
            load_ms=1500.0,
            ttft_ms=1700.0,
            total_ms=2000.0,
        ),
        None,
        Reading(gaps={200: 7, 210: 1}),
    )
    found.observe(record(preset="", status="refused", route="/v1/embeddings"), None, Reading())
    found.turned_away("key_unknown")
    found.spend(120.0, 30.0)
    small = LivePreset(
        state=State.READY,
        slots=4,
        busy=1,
        waiting=2,
        restarts=1,
        made_tokens=5,
        host_bytes=1 << 30,
        card_bytes=5 << 30,
    )
    return found, live(power_w=80.0, small=small, large=LivePreset(state=State.STOPPED))


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_strict_reader_finds_what_is_declared_and_nothing_else(accept: str) -> None:
    made = parsed(*everything(), accept)
    assert list(made) == list(DECLARED)
    for name, family in made.items():
        declared = DECLARED[name]
        assert family.type == (declared.kind if accept or declared.kind != "info" else "gauge"), name
        assert family.documentation == declared.help
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(declared.labels), name
        if accept:
            assert family.unit == declared.unit, name


def test_names_follow_the_rules_of_prometheus() -> None:
    for declared in DECLARED.values():
        assert re.fullmatch(r"(llmctl|process)(_[a-z]+)+", declared.name)
        assert declared.name.endswith("_total") == (declared.kind == "counter"), declared.name
        assert declared.name.removesuffix("_total").endswith(declared.unit), declared.name
        assert declared.unit in ("", "seconds", "bytes", "joules", "watts"), "base units"
        assert (declared.kind == "histogram") == bool(declared.bounds)
        assert list(declared.bounds) == sorted(set(declared.bounds))
        assert declared.help.endswith("."), declared.name
        assert not set('\\"\n') & set(declared.help), "it would have to be escaped"


def test_the_table_has_a_row_for_each() -> None:
    assert [row[0] for row in metrics.rows()] == list(DECLARED)
    assert ("llmctl_slots", "gauge", "preset, state", "Slots of an engine: busy, free.") in metrics.rows()


def test_a_request_is_counted_by_preset_route_and_status() -> None:
    found = Metrics("")
    for status in ("ok", "ok", "cancelled"):
        found.observe(record(status=status), None, Reading())
    made = samples(found)
    assert made["llmctl_requests_total", "small", CHAT, "ok"] == 2
    assert made["llmctl_requests_total", "small", CHAT, "cancelled"] == 1
    assert made["llmctl_requests_total", "small", CHAT, "truncated"] == 0, "what appears with 1 has no rate"
    assert not any("open" in each for each in made)


def test_figures_are_summed_and_what_is_unknown_is_not_counted() -> None:
    found, _ = everything()
    found.observe(record(ttft_ms=None, completion_tokens=None, total_ms=100.0), None, Reading())
    made = samples(found)
    tokens = {name[1]: value for name, value in made.items() if name[0] == "llmctl_tokens_total" and name[2] == "small"}
    assert tokens == {"prompt": 40, "cached": 30, "completion": 9, "wasted": 2, "drafted": 6, "accepted": 5}
    assert made["llmctl_time_to_first_token_seconds_count", "small"] == 1
    assert made["llmctl_time_to_first_token_seconds_sum", "small"] == pytest.approx(1.7)
    assert made["llmctl_request_seconds_count", "small"] == 2
    assert made["llmctl_queue_seconds_bucket", "0.001", "small"] == 1, "one that didn't wait is seen to"


def test_a_figure_that_an_engine_made_up_takes_nothing_away() -> None:
    found, _ = everything()
    found.observe(record(completion_tokens=-100), None, Reading())
    assert samples(found)["llmctl_tokens_total", "completion", "small"] == 9


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    found = Metrics("")
    for milliseconds in (10.0, 10.1, 120_000.0, 120_001.0):
        found.observe(record(ttft_ms=milliseconds), None, Reading())
    made = samples(found)
    bucket = {name[1]: value for name, value in made.items() if name[0] == "llmctl_time_to_first_token_seconds_bucket"}
    assert (bucket["0.01"], bucket["0.02"], bucket["120.0"], bucket["+Inf"]) == (1, 2, 3, 4)


def test_gaps_are_in_the_buckets_in_which_they_would_be_one_by_one() -> None:
    drawn = random.Random(1)
    meter, now_s, gaps = Meter(), 100.0, []
    meter.feed(EVENT, now_s)
    for _ in range(3000):
        before_s = now_s
        now_s += 2.0 ** drawn.uniform(-14, 4)
        gaps.append(now_s - before_s)
        meter.feed(EVENT, now_s)
    found = Metrics("")
    found.observe(record(), None, meter.read())
    made = samples(found)
    bucket = {name[1]: value for name, value in made.items() if name[0] == "llmctl_inter_token_latency_seconds_bucket"}
    assert bucket.pop("+Inf") == 3000
    # LEAST_S is what the meter adds to each: see pace.
    assert bucket == {name: sum(gap + pace.LEAST_S <= float(name) for gap in gaps) for name in bucket}
    assert [float(name) for name in bucket] == list(metrics.GAP_S)
    assert made["llmctl_inter_token_latency_seconds_sum", "small"] == pytest.approx(sum(gaps), rel=0.045)


def test_every_bound_of_gaps_is_the_upper_bound_of_a_bin() -> None:
    assert metrics.GAP_S[0] == 2**-10
    assert metrics.GAP_S[-1] == 2.0
    assert set(metrics.GAP_S) <= {pace.upper_s(number) for number in range(400)}


def test_a_gap_of_a_month_is_counted_too() -> None:
    found = Metrics("")
    found.observe(record(), None, Reading(gaps={425: 1}))
    assert samples(found)["llmctl_inter_token_latency_seconds_count", "small"] == 1


def completion(found: Metrics, made_tokens: int) -> int:
    scrape = found.scrape(live(small=LivePreset(state=State.READY, made_tokens=made_tokens)))
    return scrape.tokens()["small"]["completion"]


def test_tokens_move_while_an_answer_is_made() -> None:
    found = Metrics("")
    assert [completion(found, tokens) for tokens in (0, 10, 25)] == [0, 10, 25]
    found.observe(record(completion_tokens=27), None, Reading())
    assert completion(found, 0) == 27
    assert completion(found, 1) == 28


def test_tokens_stand_still_between_an_answers_end_and_its_counting() -> None:
    found = Metrics("")
    assert [completion(found, tokens) for tokens in (25, 0, 3)] == [25, 25, 25]
    found.observe(record(completion_tokens=25), None, Reading())
    assert completion(found, 4) == 29


def test_tokens_never_go_back_and_an_overstatement_is_made_up_for() -> None:
    found = Metrics("")
    assert completion(found, 100) == 100
    found.observe(record(completion_tokens=80), None, Reading())
    assert [completion(found, tokens) for tokens in (0, 19, 20, 21)] == [100, 100, 100, 101]


def test_what_an_engine_that_died_had_made_is_wasted_and_not_counted_twice() -> None:
    found = Metrics("")
    assert [completion(found, tokens) for tokens in (50, 0, 30)] == [50, 50, 50]
    found.observe(record(completion_tokens=60, wasted_tokens=50), None, Reading())
    made = samples(found)
    assert made["llmctl_tokens_total", "completion", "small"] == 60
    assert made["llmctl_tokens_total", "wasted", "small"] == 50


@pytest.mark.parametrize("seed", range(20))
def test_over_any_history_tokens_never_go_back_and_are_no_more_than_were_seen(seed: int) -> None:
    """Requests come, make tokens, die and are made again, close with another figure, and are counted later."""
    drawn = random.Random(seed)
    found = Metrics("")
    in_work: list[int] = []
    uncounted: list[int] = []
    counted, last, seen = 0, 0, 0
    for _ in range(400):
        match drawn.randrange(5):
            case 0:
                in_work.append(0)
            case 1 if in_work:
                in_work[drawn.randrange(len(in_work))] += drawn.randrange(50)
            case 2 if in_work:
                in_work[drawn.randrange(len(in_work))] = 0
            case 3 if in_work:
                uncounted.append(max(0, in_work.pop() + drawn.randrange(-5, 6)))
            case 4 if uncounted:
                figure = uncounted.pop()
                found.observe(record(completion_tokens=figure), None, Reading())
                counted += figure
        seen = max(seen, counted + sum(in_work))
        if drawn.random() < 0.5:
            now = completion(found, sum(in_work))
            assert now >= last
            assert counted + sum(in_work) <= now <= seen
            last = now
    assert last > 0


def test_a_state_is_1_and_all_others_0() -> None:
    found = Metrics("")
    for state in State:
        made = samples(found, live(small=LivePreset(state=state)))
        assert {name[2]: value for name, value in made.items() if name[0] == "llmctl_preset_state"} == {
            each.value: float(each is state) for each in State
        }


def test_what_is_true_now_is_told() -> None:
    made = samples(*everything())
    assert made["llmctl_slots", "small", "busy"] == 1
    assert made["llmctl_slots", "small", "free"] == 3
    assert made["llmctl_waiting_requests", "small"] == 2
    assert made["llmctl_restarts_total", "small"] == 1
    assert made["llmctl_memory_bytes", "small", "card"] == 5 << 30
    assert made["llmctl_records_lost_total",] == 3
    assert made["process_cpu_seconds_total",] == 1.25
    assert made["llmctl_info", "b11312", metrics.__version__] == 1


def test_a_preset_has_its_series_before_its_first_request() -> None:
    made = samples(Metrics(""), live(small=LivePreset(state=State.STARTING)))
    assert made["llmctl_tokens_total", "prompt", "small"] == 0
    assert made["llmctl_queue_seconds_count", "small"] == 0


def test_what_no_card_says_is_absent() -> None:
    found = Metrics("")
    absent = {"llmctl_energy_joules_total", "llmctl_power_watts", "llmctl_memory_bytes"}
    at = live(small=LivePreset(state=State.READY))
    assert {name for name, family in parsed(found, at).items() if not family.samples} >= absent
    found.spend(1.0, 0.0)
    found.spend(0.5, 2.0)
    made = samples(found, at)
    assert made["llmctl_energy_joules_total", "requests"] == 1.5
    assert made["llmctl_energy_joules_total", "idle"] == 2.0


def test_who_was_turned_away_is_counted_by_code() -> None:
    found = Metrics("")
    for code in ("key_unknown", "too_many", "key_unknown"):
        found.turned_away(code)
    made = samples(found)
    assert made["llmctl_turned_away_total", "key_unknown"] == 2
    assert made["llmctl_turned_away_total", "too_many"] == 1


def test_a_client_makes_no_series_and_nothing_of_its_is_told() -> None:
    found = Metrics("")
    words = ("canary-key", "canary-id", "canary-client", "canary-error", "canary-word")
    names = ("key", "client_id", "shared_with", "error", "finish_reason")
    known = dict(zip(names, words, strict=True))
    found.observe(record(**known), None, Reading())
    series = len(samples(found))
    found.observe(record(**known, route="/canary"), None, Reading())
    found.observe(record(**known, route="/canary2"), None, Reading())
    assert len(samples(found)) == series + 6, "all unknown routes are one"
    assert b"canary" not in found.scrape(NOW).render("")[0]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_preset_may_have_any_name(accept: str) -> None:
    found = Metrics('b"1\\')
    odd = 'a "b" \\n\\ \n{x="1"} é'
    found.observe(record(preset=odd), None, Reading())
    made = parsed(found, live(**{odd: LivePreset(state=State.READY)}), accept)
    assert {sample.labels["preset"] for family in made.values() for sample in family.samples if "preset" in sample.labels} == {
        odd
    }
    assert made["llmctl_info"].samples[0].labels["engine"] == 'b"1\\'


def test_every_route_is_told_by_its_path() -> None:
    found = Metrics("")
    for path in ROUTES:
        found.observe(record(route=path), None, Reading())
    assert {name[2] for name in samples(found) if name[0] == "llmctl_requests_total"} == set(ROUTES)


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;version=1.0.0;q=0", False),
        ("application/openmetrics-text;version=abc", False),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", False),
        (";;;=,,", False),
        # Prometheus 3's own.
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
            "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
            True,
        ),
    ],
)
def test_the_format_is_the_clients_choice_and_the_header_is_not_said_back(accept: str, is_open: bool) -> None:
    body, content_type = everything()[0].scrape(NOW).render(accept)
    assert body.endswith(b"# EOF\n") is is_open
    known = (
        "application/openmetrics-text; version=1.0.0; charset=utf-8" if is_open else "text/plain; version=0.0.4; charset=utf-8"
    )
    assert content_type == known


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns a thousand times as often as they do."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("often")
def test_a_scrape_beside_the_writer_is_of_one_piece() -> None:
    """Each request has as many tokens as gaps, and is in every count: a scrape that sees a half of one finds them different."""
    found = Metrics("")
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            found.observe(record(completion_tokens=2, ttft_ms=5.0), None, Reading(gaps={200: 1, 205: 1}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        counts = []
        for _ in range(60):
            made = samples(found)
            requests = made.get(("llmctl_requests_total", "small", CHAT, "ok"), 0)
            counts.append(requests)
            assert made.get(("llmctl_tokens_total", "completion", "small"), 0) == 2 * requests
            assert made.get(("llmctl_inter_token_latency_seconds_count", "small"), 0) == 2 * requests
            assert made.get(("llmctl_time_to_first_token_seconds_count", "small"), 0) == requests
    finally:
        ended.set()
        writer.join()
    assert counts == sorted(counts)
    assert counts[-1] > 0


def test_what_the_ledger_closes_is_counted_once(tmp_path: Path) -> None:
    drawn = random.Random(2)
    found = Metrics("")
    book = Ledger(tmp_path / "ledger.sqlite")
    book.readers.append(found.observe)
    closed: Counter[tuple[str, Status]] = Counter()
    tokens: Counter[str] = Counter()
    statuses: tuple[Status, ...] = ("ok", "cancelled", "refused", "truncated")
    for _ in range(300):
        row = book.open(CHAT, preset=drawn.choice(("small", "large")))
        row.status = drawn.choice(statuses)
        made = drawn.randrange(100)
        book.close(row, lambda made=made: Measured(Reading(completion_tokens=made)))
        book.close(row)
        closed[row.preset, row.status] += 1
        tokens[row.preset] += made
    book.shut()
    told = samples(found)
    for (preset, status), count in closed.items():
        assert told["llmctl_requests_total", preset, CHAT, status] == count
    assert {preset: told["llmctl_tokens_total", "completion", preset] for preset in tokens} == tokens
