"""Where a prompt parts from those before it, against a comparison of the texts themselves; and what of a body is its prompt."""

from __future__ import annotations

import json
import random
import re
import sys
import zlib
from itertools import takewhile
from typing import Any

import pytest

from supervisor import likeness
from supervisor.likeness import KEPT, LIMIT, MARKS, Part, Parting, Trails, parts
from supervisor.routes import Api
from supervisor.units import MIB

CANARY = "canary-7261"


def read(api: Api, **fields: Any) -> list[tuple[str, str]] | None:
    found = parts(api, json.dumps(fields).encode())
    return None if found is None else [(label, text.decode()) for label, text in found]


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# What of a body is its prompt


def test_a_chat_is_its_tools_and_its_numbered_messages() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    found = read(
        Api.CHAT,
        messages=[message("system", "be brief"), message("user", "hi"), message("assistant", "ho"), message("tool", "7")],
        tools=[tool],
        model="tiny",
        temperature=0.7,
        stream=True,
    )
    assert found == [
        ("tools", json.dumps(tool, separators=(",", ":"))),
        ("message 1 (system)", "be brief"),
        ("message 2 (user)", "hi"),
        ("message 3 (assistant)", "ho"),
        ("message 4 (tool)", "7"),
    ]


def test_a_text_counts_the_same_however_it_is_written() -> None:
    plain = read(Api.CHAT, messages=[message("user", "hi there")])
    assert plain == read(
        Api.CHAT, messages=[message("user", [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}])]
    )
    marked = {"type": "text", "text": "hi there", "cache_control": {"type": "ephemeral"}}
    assert plain == read(Api.ANTHROPIC, messages=[message("user", [marked])])
    assert plain == read(Api.CHAT, messages=[message("user", "hi there", refusal=None, annotations=[])])


def test_calls_reasoning_and_pictures_count() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bare, called, thought = (
        read(Api.CHAT, messages=[message("assistant", "ho", **more)])
        for more in ({}, {"tool_calls": [call]}, {"reasoning_content": "hm"})
    )
    assert bare
    assert called
    assert thought
    assert called[0][1].startswith("ho")
    assert '"c1"' in called[0][1]
    assert thought[0][1].endswith("ho")
    assert '"hm"' in thought[0][1]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = read(Api.CHAT, messages=[message("user", [{"type": "text", "text": "look"}, picture])])
    assert seen
    assert seen[0][1].startswith("look")
    assert "AAAA" in seen[0][1]


def test_anthropics_system_stands_between_tools_and_messages_and_a_moving_mark_is_no_change() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {}}
    marked = tool | {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]}
    found = read(Api.ANTHROPIC, tools=[tool], system="be brief", messages=[message("user", [result])])
    assert found is not None
    assert [label for label, _ in found] == ["tools", "system", "message 1 (user)"]
    assert found[2][1].endswith("42")
    assert '"t1"' in found[2][1]
    assert found == read(
        Api.ANTHROPIC,
        tools=[marked],
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[message("user", [result | {"cache_control": {"type": "ephemeral"}}])],
    )


def test_the_stamp_that_the_engine_writes_over_is_no_change() -> None:
    head = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};You are"
    first, second, other = (
        read(Api.ANTHROPIC, system=[{"type": "text", "text": head.format(stamp)}], messages=[])
        for stamp in ("a5145", "b0000", "toolong")
    )
    assert first == second
    assert first != other


def test_responses_are_instructions_and_numbered_items() -> None:
    assert read(Api.RESPONSES, input="hi", instructions="be brief") == [("system", "be brief"), ("input", "hi")]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "id": "new each time"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4", "annotations": []}]},
    ]
    found = read(Api.RESPONSES, input=items)
    assert found is not None
    assert [label for label, _ in found] == [
        "input 1 (user)",
        "input 2 (assistant)",
        "input 3 (assistant)",
        "input 4 (tool)",
        "input 5 (assistant)",
    ]
    assert found[0][1] == "2+2?"
    assert "new each time" not in found[2][1]
    assert found[4][1] == "4"


@pytest.mark.parametrize("api", [Api.TEXT, Api.NATIVE])
def test_completions_have_one_prompt(api: Api) -> None:
    assert read(api, prompt="once") == [("prompt", "once")]
    assert read(api, prompt=["once"]) == [("prompt", "once")]
    assert read(api, prompt=[1, 2, 3]) == [("prompt", "[1,2,3]")]
    assert read(api, prompt=[[1, 2, 3]]) == [("prompt", "[1,2,3]")]
    assert read(api, prompt=[1, "mixed"]) == [("prompt", '[1,"mixed"]')]
    assert read(api, prompt=["once", "twice"]) is None
    assert read(api, prompt=[]) is None
    assert read(api, model="tiny") is None


def test_infill_has_other_files_first_and_the_prompt_last() -> None:
    extra = [{"filename": "a.py", "text": "import os"}]
    found = read(Api.NATIVE, input_prefix="def f(", input_suffix=")", input_extra=extra, prompt="x")
    assert found is not None
    assert {label for label, _ in found} == {"prompt"}
    assert [text for _, text in found][1:] == ["def f(", ")", "x"]
    assert "import os" in found[0][1]
    assert "a.py" in found[0][1]


def test_a_role_of_ones_own_is_other_and_no_label_tells_anything_of_a_prompt() -> None:
    strange = [message(CANARY, CANARY), message("user", {"deep": CANARY}), CANARY, {"role": [CANARY]}, {"type": CANARY}]
    for api, fields in (
        (Api.CHAT, {"messages": strange, "tools": [{CANARY: CANARY}]}),
        (Api.ANTHROPIC, {"messages": strange, "system": [{CANARY: CANARY}]}),
        (Api.RESPONSES, {"input": strange, "instructions": {CANARY: CANARY}}),
        (Api.NATIVE, {"prompt": {CANARY: CANARY}}),
    ):
        found = read(api, **fields)
        assert found
        assert not any(CANARY in label for label, _ in found)
        assert any(CANARY in text for _, text in found)
    assert read(Api.CHAT, messages=[message(CANARY, "x")]) == [("message 1 (other)", "x")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": 3}',
        b'{"input": null}',
        b'{"prompt": 1.5}',
        b'{"prompt": "\\ud800"}',
        b"\xff",
        b"[" * 5000,
    ],
)
def test_what_is_not_understood_is_none(body: bytes) -> None:
    assert [parts(api, body) for api in Api] == [None] * len(Api)


def test_any_json_is_read_or_none() -> None:
    """Nothing that a client can send ends the thread that asks."""
    rng = random.Random(6)
    names = (
        "messages",
        "input",
        "prompt",
        "system",
        "tools",
        "role",
        "content",
        "text",
        "type",
        "output",
        "tool_calls",
        "input_prefix",
    )
    leaves = (None, True, 1, -(10**40), 1e308, "", "text", "é\u0000")

    def anything(depth: int) -> object:
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return rng.choice(leaves)
        if kind < 0.6:
            return [anything(depth - 1) for _ in range(rng.randrange(4))]
        return {rng.choice(names): anything(depth - 1) for _ in range(rng.randrange(5))}

    read_whole = 0
    for _ in range(2000):
        body = json.dumps({name: anything(4) for name in rng.sample(names, 4)}).encode()
        for api in Api:
            found = parts(api, body)
            assert found is None or all(isinstance(label, str) and isinstance(text, bytes) for label, text in found)
            read_whole += bool(found)
    assert read_whole > 1000
    deep = b'{"messages":[' + b'{"content":[' * 80 + b"]}" * 80 + b"]}"
    assert parts(Api.CHAT, deep) is not None
    assert parts(Api.CHAT, b'{"messages":[' + b'{"content":[' * 500 + b"]}" * 500 + b"]}") is None


def test_a_route_without_a_prompt_and_a_body_over_the_limit_are_none() -> None:
    assert parts(Api.WHOLE, b'{"prompt": "x", "input": "x", "messages": []}') is None
    assert parts(Api.TEXT, b'{"prompt": "%b"}' % (b"x" * (LIMIT - 14))) is not None
    assert parts(Api.TEXT, b'{"prompt": "%b"}' % (b"x" * (LIMIT - 13))) is None


# Where they part


def block_at(at: int) -> int:
    """The longest block that may reach there."""
    return next((size for upto, size in likeness._SIZES if at < upto), likeness._SIZE)


def joined(prompt: list[Part]) -> str:
    """The whole prompt, a character a byte, with its labels as one character each: a label that differs parts as a text does."""
    roles = (re.sub(r".*\((\w+)\)", r"\1", label) for label, _ in prompt)
    return "".join(
        chr(0x1000 + zlib.crc32(role.encode()) % 50_000) + text.decode("latin-1")
        for role, (_, text) in zip(roles, prompt, strict=True)
    )


def shared_by_hand(one: list[Part], other: list[Part]) -> int:
    """Bytes of text that are the same at the beginning."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(joined(one), joined(other), strict=False))
    return sum(ord(char) < 0x1000 for char, _ in same)


def some_prompt(rng: random.Random, earlier: list[list[Part]]) -> list[Part]:
    """A new one, or an earlier one continued, cut or edited somewhere."""
    if not earlier or rng.random() < 0.2:
        return [(f"message {n} (user)", rng.randbytes(rng.choice((0, 3, 40, 700, 3000)))) for n in range(1, rng.randrange(2, 6))]
    prompt = list(rng.choice(earlier))
    number = rng.randrange(len(prompt))
    label, text = prompt[number]
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return [*prompt, (f"message {len(prompt) + 1} (user)", rng.randbytes(rng.randrange(1, 2000)))]
    if kind == 1:
        return [*prompt[:number], (label, text[:at])]
    if kind == 2:
        return [*prompt[:-1], (prompt[-1][0], prompt[-1][1] + rng.randbytes(rng.randrange(1, 600)))]
    return [*prompt[:number], (label, text[:at] + rng.randbytes(2) + text[at:]), *prompt[number + 1 :]]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_shared_is_what_a_comparison_of_the_texts_says_to_within_a_block(seed: int) -> None:
    rng = random.Random(seed)
    trails, earlier = Trails(), []
    for number in range(KEPT):
        prompt = some_prompt(rng, earlier)
        found = trails.compare(f"req_{number}", prompt)
        by_hand = [shared_by_hand(prompt, each) for each in earlier]
        most = max(by_hand, default=0)
        assert found.prompt_chars == sum(len(text) for _, text in prompt)
        assert most - block_at(most) < found.shared_chars <= most
        if found.shared_with is None:
            assert found.shared_chars == 0
        else:
            assert found.shared_chars <= by_hand[int(found.shared_with.removeprefix("req_"))]
        assert (found.parted_in is None) == (found.shared_chars == found.prompt_chars or (not earlier and not found.shared_chars))
        earlier.append(prompt)


@pytest.mark.parametrize("seed", range(4))
def test_a_later_turn_shares_the_whole_of_the_earlier_one(seed: int) -> None:
    rng = random.Random(seed)
    trails = Trails()
    chat: list[Part] = [("message 1 (system)", rng.randbytes(rng.randrange(1, 5000)))]
    before = 0
    for number in range(1, 30):
        chat.append((f"message {len(chat) + 1} (user)", rng.randbytes(rng.randrange(1, 1000))))
        found = trails.compare(f"req_{number}", chat)
        told = (found.shared_chars, found.shared_with, found.parted_in)
        label = chat[-1][0] if number == 2 else f"message {len(chat) - 1} (assistant)"
        assert told == ((before, f"req_{number - 1}", label) if number > 1 else (0, None, None))
        before = found.prompt_chars
        if number > 1:
            chat.append((f"message {len(chat) + 1} (assistant)", rng.randbytes(rng.randrange(1, 1000))))
    assert repr(trails) == "<Trails 1>"  # the last one has all of them


@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 511, 4097, 5000])
def test_a_text_that_goes_on_shares_all_of_the_earlier_one(size: int) -> None:
    trails = Trails()
    trails.compare("req_1", [("prompt", b"a" * size)])
    assert trails.compare("req_2", [("prompt", b"a" * (size + 1))]) == Parting(size + 1, size, "req_1", "prompt")
    found = trails.compare("req_3", [("prompt", b"a" * size)])
    assert size - block_at(size) <= found.shared_chars <= size


def test_the_same_prompt_again_parts_nowhere() -> None:
    trails = Trails()
    prompt = [("message 1 (user)", b"x" * 1000)]
    assert trails.compare("req_1", prompt) == Parting(1000, 0, None, None)
    assert trails.compare("req_2", prompt) == Parting(1000, 1000, "req_1", None)
    assert trails.compare("req_3", prompt) == Parting(1000, 1000, "req_2", None)  # the latest of equals


def test_a_prompt_that_is_the_beginning_of_an_earlier_one_parts_nowhere() -> None:
    trails = Trails()
    whole = [("message 1 (user)", b"x" * 1000), ("message 2 (assistant)", b"y" * 900)]
    trails.compare("req_1", whole)
    assert trails.compare("req_2", whole[:1]) == Parting(1000, 1000, "req_1", None)


def test_the_same_text_of_another_role_is_another_prompt() -> None:
    trails = Trails()
    trails.compare("req_1", [("message 1 (user)", b"x" * 300)])
    assert trails.compare("req_2", [("message 1 (system)", b"x" * 300)]) == Parting(300, 0, None, "message 1 (system)")


def test_the_same_dialogue_by_another_api_is_the_same_prompt() -> None:
    system, asked = "be brief " * 9, "what is two plus two? " * 9
    turns = [message("user", asked)]
    by_api = [
        parts(Api.CHAT, json.dumps({"messages": [message("system", system), *turns]}).encode()),
        parts(Api.ANTHROPIC, json.dumps({"system": system, "messages": turns}).encode()),
        parts(Api.RESPONSES, json.dumps({"instructions": system, "input": turns}).encode()),
        parts(Api.RESPONSES, json.dumps({"instructions": system, "input": asked}).encode()),
    ]
    trails, size = Trails(), len(system + asked)
    for number, prompt in enumerate(by_api):
        assert prompt is not None
        found = trails.compare(f"req_{number}", prompt)
        assert found == (Parting(size, size, f"req_{number - 1}", None) if number else Parting(size, 0, None, None))


def test_a_clock_in_the_first_line_is_seen() -> None:
    trails = Trails()
    trails.compare("req_1", [("message 1 (system)", b"It is 12:00:01. " + b"x" * 9000), ("message 2 (user)", b"hi")])
    found = trails.compare("req_2", [("message 1 (system)", b"It is 12:00:07. " + b"x" * 9000), ("message 2 (user)", b"hi")])
    assert found == Parting(9018, 8, "req_1", "message 1 (system)")


def test_only_so_many_are_kept() -> None:
    trails = Trails()
    for number in range(KEPT + 1):
        trails.compare(f"req_{number}", [("prompt", b"%03d" % number * 100)])
    assert trails.compare("req_a", [("prompt", b"%03d" % KEPT * 100)]).shared_with == f"req_{KEPT}"
    assert trails.compare("req_b", [("prompt", b"000" * 100)]).shared_with is None
    assert repr(trails) == f"<Trails {KEPT}>"


def test_nothing_of_no_prompt() -> None:
    trails = Trails()
    for number in range(3):
        assert trails.compare(f"req_{number}", []) == Parting(0, 0, None, None)
        assert trails.compare(f"req_e{number}", [("message 1 (user)", b"")]) == Parting(0, 0, None, None)


def test_a_dialogue_of_more_blocks_than_marks_still_goes_on_from_the_one_before_it() -> None:
    trails = Trails()
    chat = [(f"message {number} (user)", b"%d" % number) for number in range(1, MARKS + 100)]
    size = sum(len(text) for _, text in chat)
    trails.compare("req_1", chat)
    longer = [*chat, ("message 0 (tool)", b"more")]
    assert trails.compare("req_2", longer) == Parting(size + 4, size, "req_1", "message 0 (tool)")
    assert trails.compare("req_3", longer) == Parting(size + 4, size + 4, "req_2", None)
    edited = [*longer[:-1], ("message 0 (tool)", b"else")]
    found = trails.compare("req_4", edited)
    assert found.shared_with == "req_3"
    assert found.shared_chars == sum(len(text) for _, text in chat[: MARKS - 1])


def test_a_presets_prompts_take_no_more_than_is_said() -> None:
    trails = Trails()
    for number in range(KEPT + 8):
        trails.compare(f"req_{number:019d}", [("prompt", b"%08d" % number + b"x" * (LIMIT - 8))])
    kept = sys.getsizeof(trails._kept) + sum(sys.getsizeof(each) for trail in trails._kept for each in (trail, *trail))
    assert KEPT * MARKS * 8 <= kept <= 2 * MIB


def test_nothing_of_a_prompt_is_kept() -> None:
    trails = Trails()
    trails.compare("req_1", [("message 1 (user)", CANARY.encode() * 50)])
    assert CANARY not in repr(trails._kept)
    assert len(trails._kept[0].marks) < len(CANARY) * 50
