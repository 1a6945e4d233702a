"""A workload's file says what it means, or what is wrong with it and where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bench import workload
from bench.workload import Span
from supervisor.errors import Error, Exit


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["agent", "batch", "chat", "code", "rag"])
def test_what_llmctl_brings_is_right(name: str) -> None:
    found = workload.load(name)
    assert found.name == name
    assert found.about
    assert found.shared < found.prompt_span.least


def test_rag_reads_much_and_says_little_and_an_agents_prompts_begin_alike() -> None:
    rag, agent = workload.load("rag"), workload.load("agent")
    assert rag.prompt_span.mean > 10 * rag.answer_span.mean
    assert agent.shared > agent.prompt_span.most / 2


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = written(tmp_path, "prompt: 80-240\nanswer: 32\nask: [Go on.]\nconcurrency: [1, 8]\nttft_ms: 500\n")
    found = workload.read(path)
    assert found.prompt_span == Span(80, 240)
    assert found.answer_span == Span(32, 32)
    assert found.users == (1, 8)
    assert found.limits == {"ttft_ms": 500.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt: 80\n", ":1: answer is missing"),
        ("prompt: 80\nanswer: 8\nprompts: 9\n", ":3: 'prompts' is not an option"),
        ("prompt: 240-80\nanswer: 8\n", ":1: prompt is '240-80', but should be a number of tokens"),
        ("prompt: 80\nanswer: 8\nconcurrency: [2, 0]\n", ":3: concurrency is a list, but its word '0' should be a whole number"),
        ("prompt: 80\nanswer: 8\nconcurrency: [2, 2]\n", ":3: concurrency is a list, but its word '2' should stand once"),
        ("prompt: 80\nanswer: 8\nconcurrency: []\n", ":3: concurrency is a list, but should have a number"),
        ("prompt: 80\nanswer: 8\nshared: 80\n", "has prompts of 80 tokens that begin with 80 shared ones"),
        ("prompt: 80\nprompt: 90\nanswer: 8\n", ":2: 'prompt' stands here and in line 1"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Error) as caught:
        workload.read(written(tmp_path, text))
    assert said in caught.value.message
    assert caught.value.exit is Exit.CONFIG
    assert caught.value.hint


def test_an_unknown_name_is_told_those_there_are() -> None:
    with pytest.raises(Error, match="there are: agent, batch, chat, code, rag") as caught:
        workload.load("chatt")
    assert "--workload chat" in caught.value.hint


def test_the_command_line_changes_it() -> None:
    found = workload.changed(workload.load("chat"), prompt="64", concurrency=("3",), repetitions=None, tpot_ms=50.0)
    assert (found.prompt, found.users, found.repetitions) == ("64", (3,), workload.load("chat").repetitions)
    assert found.limits["tpot_ms"] == 50.0


@pytest.mark.parametrize(
    ("change", "said"), [({"prompt": "many"}, "many"), ({"requests": 0}, "'0'"), ({"concurrency": ("x",)}, "'x'")]
)
def test_a_wrong_change_is_wrong_usage(change: dict[str, object], said: str) -> None:
    with pytest.raises(Error) as caught:
        workload.changed(workload.load("chat"), **change)
    assert said in caught.value.message
    assert caught.value.exit is Exit.USAGE


def test_the_work_is_the_same_at_other_levels_and_limits_and_not_with_other_lengths() -> None:
    chat = workload.load("chat")
    assert dataclasses.replace(chat, name="x", repetitions=9, concurrency=("7",), ttft_ms=1.0).work == chat.work
    assert dataclasses.replace(chat, answer="129").work != chat.work
    assert dataclasses.replace(chat, ask=()).work != chat.work
