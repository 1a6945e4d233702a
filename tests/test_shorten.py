"""What is left out of a dialogue that is too long, and that the rest stays as it was written."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_core import from_json

from supervisor.routes import Api
from supervisor.shorten import Search, Turns, room

Turn = dict[str, Any]
LISTS = {Api.CHAT: "messages", Api.ANTHROPIC: "messages", Api.RESPONSES: "input"}
SYSTEM: Turn = {"role": "system", "content": "Be brief."}


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def said(text: str) -> Turn:
    return {"role": "assistant", "content": text}


def called(*names: str) -> Turn:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(name: str) -> Turn:
    return {"role": "tool", "tool_call_id": name, "content": "42"}


def turns_of(items: list[Turn], api: Api = Api.CHAT) -> Turns:
    found = Turns.of(api, json.dumps({"model": "tiny", LISTS[api]: items, "stream": True}).encode())
    assert found is not None
    return found


def left(turns: Turns, groups: int, api: Api = Api.CHAT) -> list[Turn]:
    """The list that the engine would read."""
    items: list[Turn] = json.loads(turns.without(groups))[LISTS[api]]
    return items


def every(items: list[Turn], api: Api = Api.CHAT) -> list[list[Turn]]:
    """What is left for every number of groups, none first."""
    turns = turns_of(items, api)
    return [left(turns, groups, api) for groups in range(turns.groups + 1)]


# what goes


def test_exchanges_go_one_by_one_and_the_system_and_the_last_stay() -> None:
    items = [SYSTEM, user("1"), said("a"), user("2"), said("b"), user("3")]
    assert every(items) == [items, [SYSTEM, *items[3:]], [SYSTEM, *items[5:]]]
    turns = turns_of(items)
    assert [turns.left_out(groups) for groups in (0, 1, 2)] == [0, 2, 4]
    assert repr(turns) == f"<Turns 6 in {len(turns.text)} characters, 2 groups may go>"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_what_the_system_says_in_between_stays_in_its_order(role: str) -> None:
    late = {"role": role, "content": "Now in French."}
    items = [SYSTEM, user("1"), late, said("a"), user("2"), late, user("3")]
    assert every(items)[1:] == [[SYSTEM, late, user("2"), late, user("3")], [SYSTEM, late, late, user("3")]]


def test_an_assistants_first_word_is_the_first_to_go() -> None:
    items = [SYSTEM, said("Hello!"), user("1"), said("a"), user("2")]
    assert every(items)[1:] == [[SYSTEM, *items[2:]], [SYSTEM, user("2")]]


@pytest.mark.parametrize(
    "items",
    [
        [],
        [SYSTEM],
        [SYSTEM, said("a"), said("b")],
        [user("1")],
        [SYSTEM, user("1"), called("a"), result("a"), called("b"), result("b"), said("x")],
        [SYSTEM, SYSTEM, user("1")],
        ["no", 1, None, [], user("1")][:4],
    ],
)
def test_one_exchange_or_none_is_not_shortened(items: list[Turn]) -> None:
    assert turns_of(items).groups == 0
    assert Search(0, 100).found is None


def test_the_start_of_an_answer_stays_with_the_last_question() -> None:
    items = [user("1"), said("a"), user("2"), said("Well,")]
    assert every(items)[1:] == [items[2:]]


def test_a_result_that_comes_behind_another_question_holds_both_together() -> None:
    items = [
        user("1"),
        said("a"),
        user("2"),
        called("x", "y"),
        result("x"),
        user("3"),
        result("y"),
        user("4"),
        said("b"),
        user("5"),
    ]
    assert every(items)[1:] == [items[2:], items[7:], items[9:]]


def test_an_id_that_is_used_again_means_the_call_before_it() -> None:
    items = [user("1"), called("c"), result("c"), user("2"), called("c"), result("c"), user("3")]
    assert every(items)[1:] == [items[3:], items[6:]]


def test_a_result_without_an_id_is_of_the_last_call() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    answer = {"role": "function", "name": "f", "content": "42"}
    items = [user("1"), call, answer, user("2"), call, user("3"), answer, user("4")]
    assert every(items)[1:] == [items[3:], items[7:]]


def test_a_result_without_an_id_is_of_the_last_call_that_has_one_too() -> None:
    items = [user("1"), called("a"), user("2"), {"role": "tool", "content": "42"}, user("3")]
    assert every(items)[1:] == [items[4:]]


def test_a_result_of_no_call_is_no_question_either() -> None:
    lost = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "lost", "content": "42"}]}
    items = [user("1"), said("a"), lost, said("b"), user("2")]
    assert every(items, Api.ANTHROPIC)[1:] == [items[4:]]


def test_a_result_of_no_call_at_all_is_left_with_what_stands_around_it() -> None:
    items = [user("1"), said("a"), result("lost"), user("2")]
    assert every(items)[1:] == [items[3:]]


def test_anthropics_results_are_no_questions_and_text_beside_them_does_not_make_them_one() -> None:
    use = {
        "role": "assistant",
        "content": [{"type": "text", "text": "…"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}],
    }
    block = {"type": "tool_result", "tool_use_id": "t", "content": "42"}
    brought = {"role": "user", "content": [block, {"type": "text", "text": "Go on."}]}
    asked = {"role": "user", "content": [{"type": "text", "text": "And?"}]}
    items = [user("1"), use, brought, said("a"), asked, use, brought]
    assert every(items, Api.ANTHROPIC)[1:] == [items[4:]]


def test_responses_calls_outputs_and_thoughts_go_with_their_question() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "42"}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2"}]}
    items = [
        {"role": "developer", "content": "Be brief."},
        user("1"),
        thought,
        call,
        output,
        thought,
        message,
        asked,
        thought,
        call,
        output,
    ]
    assert every(items, Api.RESPONSES)[1:] == [[items[0], *items[7:]]]
    late = [user("1"), thought, call, asked, output, message, user("3")]
    assert every(late, Api.RESPONSES)[1:] == [late[6:]]


# where there is nothing to cut


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.TEXT, b'{"prompt": "x", "messages": []}'),
        (Api.NATIVE, b'{"prompt": "x"}'),
        (Api.WHOLE, b'{"messages": [], "input": []}'),
        (Api.CHAT, b"{}"),
        (Api.CHAT, b'{"input": []}'),
        (Api.CHAT, b'{"messages": null}'),
        (Api.CHAT, b'{"messages": {"role": "user"}}'),
        (Api.CHAT, b'{"messages": "[]"}'),
        (Api.CHAT, b'{"messages": [], "messages": 1}'),
        (Api.CHAT, b'{"more": {"messages": []}}'),
        (Api.RESPONSES, b'{"input": "a text"}'),
        (Api.RESPONSES, b'{"messages": []}'),
    ],
)
def test_a_body_without_a_list_of_turns_has_none(api: Api, body: bytes) -> None:
    assert Turns.of(api, body) is None


# the rest stays as it was written

ODD = (
    '{ "role" :"user", "content": "4",\t"n": [1e400, -0.0, 1.10, 1E5, 123456789012345678901234567890, 0.1e-7, '
    + "9" * 200
    + "] }",
    r'{"role":"user","content":"\ud83d\ude00 \u00e9 é 😀 \/ \u0000 \u2028"}',
    '{"content":"x","role":"user","role":"user"}',
    '{"role":"user",\r\n "content":""}',
)


@pytest.mark.parametrize("last", ODD)
def test_what_stays_keeps_every_byte(last: str) -> None:
    head = ' {"model":"tiny" , "seed": 18446744073709551615, "x":{"messages":[1]},"messages":"first", \n "mess\\u0061ges" : [ '
    system = '{"role": "system", "content": "\\u00fc", "n": 1.0}'
    first = '{"role":"user","content":"1"} , {"role":"assistant","content":"a"},'
    tail = f'{last} , {{"role":"assistant","content":"b"}}\n, {last} ] , "temperature":0.70, "é":[ ] }} \n'
    turns = Turns.of(Api.CHAT, f"{head}{system},{first} {tail}".encode())
    assert turns is not None
    assert turns.without(0) == f"{head}{system},{first} {tail}".encode()
    assert turns.without(1) == f"{head}{system},{tail}".encode()
    assert turns.without(2) == f"{head}{system},{tail[tail.rindex(last) :]}".encode()
    for groups in range(3):
        from_json(turns.without(groups))


def test_numbers_of_any_length_and_words_that_are_none_are_passed_over() -> None:
    big = "9" * 10_000
    body = f'{{"a":{big},"b":NaN,"c":-Infinity,"messages":[{{"role":"user"}},{{"role":"user","n":{big}}}]}}'
    turns = Turns.of(Api.CHAT, body.encode())
    assert turns is not None
    assert turns.without(1).decode() == f'{{"a":{big},"b":NaN,"c":-Infinity,"messages":[{{"role":"user","n":{big}}}]}}'


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    body = rb'{"messages":[{"role":"user"},{"role":"user","content":"\ud800"}],"\ud800":1}'
    turns = Turns.of(Api.CHAT, body)
    assert turns is not None
    assert turns.without(1) == rb'{"messages":[{"role":"user","content":"\ud800"}],"\ud800":1}'


# any dialogue


def dialogue(api: Api, rng: random.Random) -> list[Turn]:
    """Some turns, each with its number as ``n``; ids of calls are sometimes used again, results sometimes late."""
    items: list[Turn] = []
    for _ in range(rng.randrange(0, 3)):
        items.append({"role": rng.choice(["system", "developer"])})
    if rng.random() < 0.2:
        items.append(said("Hello!"))
    for number in range(rng.randrange(0, 9)):
        items.append(user("x" * rng.randrange(200)))
        if rng.random() < 0.1:
            items.append({"role": "system"})
        for step in range(rng.choice([0, 0, 1, 2])):
            ids = [f"c{number * rng.randrange(2)}.{step}.{each}" for each in range(rng.randrange(1, 3))]
            items += exchange(api, ids)
            if rng.random() < 0.1 and api is not Api.ANTHROPIC:
                items.insert(len(items) - 1, user("meanwhile"))
        if rng.random() < 0.8:
            items.append(said("y" * rng.randrange(200)))
    return [{**each, "n": number} for number, each in enumerate(items)]


def exchange(api: Api, ids: list[str]) -> Iterator[Turn]:
    """Tool calls and their results."""
    if api is Api.CHAT:
        yield called(*ids)
        yield from map(result, ids)
    elif api is Api.ANTHROPIC:
        yield {"role": "assistant", "content": [{"type": "tool_use", "id": each} for each in ids]}
        yield {"role": "user", "content": [{"type": "tool_result", "tool_use_id": each} for each in ids]}
    else:
        yield {"type": "reasoning", "summary": []}
        yield from ({"type": "function_call", "call_id": each} for each in ids)
        yield from ({"type": "function_call_output", "call_id": each} for each in ids)


def ends(items: list[Turn]) -> list[tuple[str, str]]:
    """Every call and every result, in order: (``call`` or ``result``, id)."""
    found = []
    for each in items:
        found += [("call", call["id"]) for call in each.get("tool_calls", [])]
        blocks = each["content"] if isinstance(each.get("content"), list) else []
        found += [("call", block["id"]) for block in blocks if block["type"] == "tool_use"]
        found += [("result", block["tool_use_id"]) for block in blocks if block["type"] == "tool_result"]
        if each.get("role") == "tool":
            found.append(("result", each["tool_call_id"]))
        if "call_id" in each:
            found.append(("result" if each["type"].endswith("_output") else "call", each["call_id"]))
    return found


def whole(items: list[Turn]) -> bool:
    """Whether each result has its call before it, and each call its result behind it."""
    open_calls: list[str] = []
    for what, name in ends(items):
        if what == "call":
            open_calls.append(name)
        elif name in open_calls:
            open_calls.remove(name)
        else:
            return False
    return not open_calls


def is_question(turn: Turn) -> bool:
    blocks = turn.get("content")
    return turn.get("role") == "user" and not (isinstance(blocks, list) and blocks[0]["type"] == "tool_result")


def is_system(turn: Turn) -> bool:
    return turn.get("role") in ("system", "developer")


@pytest.mark.parametrize("api", LISTS)
@pytest.mark.parametrize("seed", range(60))
def test_of_any_dialogue_whole_exchanges_go_and_every_one_may(api: Api, seed: int) -> None:
    rng = random.Random(f"{api} {seed}")
    items = dialogue(api, rng)
    assert whole(items)
    system = [each for each in items if is_system(each)]
    lefts = every(items, api)
    assert lefts[0] == items
    for kept in lefts[1:]:
        rest = [each for each in kept if not is_system(each)]
        assert [each for each in kept if is_system(each)] == system
        assert [each["n"] for each in kept] == sorted(each["n"] for each in kept)
        assert all(each == items[each["n"]] for each in kept)
        assert rest == [each for each in items[rest[0]["n"] :] if not is_system(each)]
        assert is_question(rest[0])
        assert whole(kept)
    # Nothing that could go by these rules has to stay.
    spoken = [each["n"] for each in items if not is_system(each)]
    legal = [each["n"] for each in items if is_question(each) and each["n"] != spoken[0] and whole(items[each["n"] :])]
    assert [next(each["n"] for each in kept if not is_system(each)) for kept in lefts[1:]] == legal


@pytest.mark.parametrize("api", LISTS)
@pytest.mark.parametrize("seed", range(20))
def test_the_fewest_groups_go_that_are_enough(api: Api, seed: int) -> None:
    rng = random.Random(f"{api} {seed}")
    turns = turns_of(dialogue(api, rng), api)
    counts = [len(turns.without(groups)) for groups in range(turns.groups + 1)]
    assert counts == sorted(counts, reverse=True)
    for most in {*counts, counts[-1] - 1, *(count - 1 for count in counts[:-1])} - {counts[0]}:
        search = Search(turns.groups, most)
        asked = []
        while (groups := search.next) is not None:
            asked.append(groups)
            search.tell(counts[groups])
        assert search.found == next((groups for groups, count in enumerate(counts) if count <= most), None)
        assert search.found is None or search.found in asked
        assert 0 not in asked
        assert len(asked) == len(set(asked)) <= math.ceil(math.log2(turns.groups + 1))


# room


@pytest.mark.parametrize(
    ("context", "asked", "tokens"),
    [
        (8192, None, 6144),
        (8192, -1, 6144),
        (8192, 100, 8092),
        (8192, 2048, 6144),
        (8192, 100_000, 6144),
        (8192, 0, 8191),
        (8192, 1, 8191),
        (256, None, 192),
    ],
)
def test_the_prompt_gets_what_the_answer_leaves(context: int, asked: int | None, tokens: int) -> None:
    assert room(context, asked) == tokens
