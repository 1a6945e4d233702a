"""The bench of faults itself: that it sees a broken promise, and a few of its faults against the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from bench.proof import chaos
from bench.proof.chaos_faults import FAULTS
from bench.proof.chaos_traffic import TEXT, End, Outcome, Request, judge, unmatched
from bench.proof.visit import Answer

ASKED = Request("c1x1", stream=True, words=4, pace_s=0.0)
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode()


def ended(body: bytes, *, whole: bool = True, status: int = 200, asked: Request = ASKED) -> End:
    return judge(asked, Answer(status, body, whole, 1.0, 1.1, 1.2)).end


ERROR = json.dumps({"error": {"message": "gone", "code": "engine_died"}}).encode()
WHOLE = event("c1x1 0") + b": waiting\n\n" + event(" 1 2")


@pytest.mark.parametrize(
    ("body", "whole", "status", "end"),
    [
        (WHOLE + DONE, True, 200, End.OK),
        (WHOLE, True, 200, End.LIE),  # no [DONE]
        (event("c1x1 0") + DONE, True, 200, End.LIE),
        (WHOLE + DONE, False, 200, End.CUT),
        (event("c1x1 0") + event(" 2") + DONE, True, 200, End.GARBLED),
        (event("c1x1 0") + event("c1x1 0"), False, 200, End.GARBLED),
        (event("c1x2 0"), False, 200, End.GARBLED),  # another's
        (event("c1x1 0") + b"data: " + ERROR + b"\n\n", False, 200, End.TOLD),
        (event("c1x1 0") + b"data: " + ERROR + b"\n\n", True, 200, End.LIE),
        (ERROR, True, 502, End.TOLD),
        (b"Internal Server Error", True, 500, End.MUTE),
        (b"", False, 0, End.CUT),
    ],
)
def test_what_a_client_of_a_stream_has(body: bytes, whole: bool, status: int, end: End) -> None:
    assert ended(body, whole=whole, status=status) is end


def test_what_a_client_of_one_reply_has() -> None:
    asked = Request("c1x1", stream=False, words=2, pace_s=0.0)

    def reply(text: str) -> bytes:
        return json.dumps({"choices": [{"message": {"content": text}}]}).encode()

    assert ended(reply("c1x1 0"), asked=asked) is End.OK
    assert ended(reply("c1x1"), asked=asked) is End.LIE
    assert ended(reply("c1x1 0")[:-5], whole=False, asked=asked) is End.CUT
    assert ended(ERROR, status=500, asked=asked) is End.TOLD


def test_who_leaves_is_not_cut() -> None:
    assert ended(event("c1x1 0"), whole=False, asked=Request("c1x1", True, 4, 0.0, leave_after=1)) is End.LEFT
    assert ended(b"", whole=False, status=0, asked=Request("c1x1", True, 4, 0.0, TEXT, leave_s=0.1)) is End.LEFT


def test_a_record_is_what_befell_its_request() -> None:
    def outcome(end: End, status: int = 200) -> Outcome:
        return Outcome(ASKED, end, 10.0, 11.0, status)

    assert outcome(End.OK).statuses(()) == {"ok"}
    assert outcome(End.TOLD, 503).statuses(()) == {"refused"}
    assert outcome(End.OK).statuses([20.0]) == {"ok"}
    assert outcome(End.OK).statuses([11.1]) == {"ok", "interrupted"}  # llmctl was killed before it was written
    assert "" in outcome(End.CUT).statuses([10.1])
    assert "" not in outcome(End.CUT).statuses([10.9])
    assert "" in outcome(End.CUT).statuses([9.99])  # it came to one that was dying
    assert "" not in outcome(End.CUT).statuses([9.0])


def test_each_request_and_record_find_their_other() -> None:
    ok, either, perhaps = frozenset({"ok"}), frozenset({"ok", "cancelled"}), frozenset({"interrupted", ""})
    assert unmatched([ok, ok, either, perhaps], Counter(ok=2, cancelled=1)) == []
    assert unmatched([ok, ok, either, perhaps], Counter(ok=3, interrupted=1)) == []
    assert unmatched([ok, ok], Counter(ok=1))
    assert unmatched([ok], Counter(ok=1, open=1))
    assert unmatched([either, either], Counter(ok=1, cancelled=2))
    assert unmatched([ok, either], Counter(cancelled=2))


def dealt(folder: Path, count: int, seed: int, *names: str) -> chaos.Run:
    chosen = tuple(fault for fault in FAULTS if fault.name in names)
    assert len(chosen) == len(names)
    run = asyncio.run(chaos.measure(folder, "fake", count, seed, 1, chosen))
    assert sum(run.sum("faults").values()) == count
    return run


def test_a_few_faults(tmp_path: Path) -> None:
    run = dealt(tmp_path, 4, 5, "kill -9 mid-stream", "clients leave", "kill -9 of llmctl")
    assert [each.details for each in run.findings] == [[]]
    assert run.sum("ends")["ok"] > 0


@pytest.mark.slow
def test_every_fault_that_needs_no_disk_and_no_patience(tmp_path: Path) -> None:
    names = [fault.name for fault in FAULTS if not (fault.disk or fault.after_s)]
    run = dealt(tmp_path, 24, 7, *names)
    assert [each.details for each in run.findings] == [[]]
