"""What of a body is read, and that the rest keeps its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from supervisor import ask
from supervisor.ask import Ask
from supervisor.errors import Error
from supervisor.routes import ROUTES, Api, Route
from tests.conftest import Box, Client

CHAT = ROUTES["/v1/chat/completions"]
TEXT = ROUTES["/v1/completions"]
RESPONSES = ROUTES["/v1/responses"]
MESSAGES = ROUTES["/v1/messages"]
NATIVE = ROUTES["/completion"]
INFILL = ROUTES["/infill"]
EMBEDDINGS = ROUTES["/v1/embeddings"]
RERANK = ROUTES["/v1/rerank"]


def test_the_fields_that_decide_a_requests_way_are_read() -> None:
    body = b'{"model": "tiny", "stream": true, "n": 2, "service_tier": "flex", "messages": [{"role": "user"}], "x": {"model": "other"}}'
    found = Ask.parse(body, CHAT)
    assert (found.model, found.streams, found.cost, found.service_tier) == ("tiny", True, 2, "flex")


def test_left_out_fields_have_harmless_values() -> None:
    found = Ask.parse(b"{}", CHAT)
    assert (found.model, found.streams, found.cost, found.service_tier, found.asked_tokens) == (None, False, 1, None, None)


@pytest.mark.parametrize(("value", "streams"), [("true", True), ("false", False), ("null", False)])
def test_only_true_streams(value: str, streams: bool) -> None:
    assert Ask.parse(b'{"stream": %b}' % value.encode(), CHAT).streams is streams


def test_a_route_of_one_answer_never_streams() -> None:
    assert not Ask.parse(b'{"stream": true}', EMBEDDINGS).streams


@pytest.mark.parametrize("value", ["1", '"true"', "[true]", "{}"])
def test_a_stream_that_is_no_boolean_is_refused(value: str) -> None:
    """As the engine does on every route that streams (tests/contract/test_assembly.py)."""
    with pytest.raises(Error, match="stream: ") as raised:
        Ask.parse(b'{"stream": %b}' % value.encode(), MESSAGES)
    assert raised.value.status == 400


@pytest.mark.parametrize("value", ["7", "null", "[]"])
def test_a_service_tier_of_another_type_is_none(value: str) -> None:
    assert Ask.parse(b'{"service_tier": %b}' % value.encode(), CHAT).service_tier is None


def test_the_last_of_two_equal_keys_wins_as_in_the_engine() -> None:
    found = Ask.parse(b'{"model": "a", "stream": false, "model": "b", "stream": true}', CHAT)
    assert (found.model, found.streams) == ("b", True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"a":1,}',
        b"{'a':1}",
        b'{"a":1} x',
        b'{"a":1}{"b":2}',
        b'{"a":\xff"}',
        b'{"a":"\xff"}',
        b'{"a":"\x01"}',
        b'{"a":"\\ud800"}',
        b'{"a":01}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":[{"b":Infinity}]}',
        b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b"\xef\xbb\xbf{}",
        b'{"model": 1}',
        b'{"model": ["tiny"]}',
    ],
)
def test_a_body_the_engine_would_choke_on_is_the_clients_fault(body: bytes) -> None:
    """llama-server answers malformed JSON with 500, which clients retry."""
    with pytest.raises(Error) as raised:
        Ask.parse(body, CHAT)
    assert (raised.value.status, raised.value.code) == (400, "invalid_request_error")
    assert "\n" not in raised.value.message


def test_a_bad_field_is_named() -> None:
    with pytest.raises(Error, match=r"model: .*string"):
        Ask.parse(b'{"model": 1}', CHAT)


@pytest.mark.parametrize("text", ["NaN", "Infinity and beyond", '\\"NaN\\"'])
def test_words_that_look_like_numbers_are_fine_in_text(text: str) -> None:
    assert Ask.parse(b'{"model": "tiny", "prompt": "%b"}' % text.encode(), TEXT).model == "tiny"


def test_a_body_quotes_none_of_its_text_in_an_error() -> None:
    """Prompts stay out of logs and error bodies."""
    with pytest.raises(Error) as raised:
        Ask.parse(b'{"prompt": "my secret", "model": {"my": "secret"}}', TEXT)
    assert "secret" not in raised.value.message


N = [
    ("", 1),
    ('"n": 3', 3),
    ('"n": 0', 1),
    ('"n": -1', 1),
    ('"n": -4294967294', 2),  # in the engine's 32 bits
    ('"n": null', 1),
    ('"n": "3"', 1),
    ('"n": 2.0', 2),  # as the engine has it
    ('"n_cmpl": 3', 3),
    ('"n": 2, "n_cmpl": 3', 3),
]


@pytest.mark.parametrize(("members", "cost"), N)
@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES, NATIVE, INFILL], ids=lambda route: route.path)
def test_choices_cost_their_number(route: Route, members: str, cost: int) -> None:
    assert Ask.parse(b"{%b}" % members.encode(), route).cost == cost


@pytest.mark.parametrize(
    ("route", "members", "cost"),
    [
        (TEXT, '"prompt": "a b c"', 1),
        (TEXT, '"prompt": ["a", "b"]', 2),
        (NATIVE, '"prompt": ["a", "b"]', 2),
        (TEXT, '"prompt": ["a", "b"], "n": 3', 6),
        (TEXT, '"prompt": [1, 2, 3]', 1),  # one prompt of three tokens
        (TEXT, '"prompt": ["a", 1]', 1),  # one prompt of text and tokens
        (TEXT, '"prompt": [[1, 2], [3]]', 2),
        (TEXT, '"prompt": ["a", {"prompt_string": "b"}, [2]]', 3),
        (TEXT, '"prompt": []', 1),
        (TEXT, '"prompt": {"prompt_string": "a"}', 1),
        (TEXT, '"prompt": null', 1),
        (CHAT, '"prompt": ["a", "b"], "input": ["a", "b"]', 1),  # not a chat's fields
        (INFILL, '"prompt": ["a", "b"]', 1),
        (RESPONSES, '"input": [{"role": "user"}, {"role": "assistant"}]', 1),  # one dialogue
        (MESSAGES, '"n": 5', 1),  # its converter drops it
        (EMBEDDINGS, '"input": ["a", "b", "c"]', 3),
        (EMBEDDINGS, '"content": ["a", "b", "c"]', 3),
        (EMBEDDINGS, '"input": [1, 2, 3], "n": 5', 1),
        (RERANK, '"query": "a", "documents": ["b", {"text": "c"}]', 2),
        (RERANK, '"query": "a", "texts": ["b", "c"]', 2),
    ],
)
def test_a_request_costs_the_sequences_it_decodes(route: Route, members: str, cost: int) -> None:
    assert Ask.parse(b"{%b}" % members.encode(), route).cost == cost


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"model": "tiny", "temperature": 0.10, "seed": 12345678901234567890, "x": "\\u00e9"}  \r\n',
        b'{"messages": [{"content": "id_slot and lora"}]}',
        b'{"id_slot": null, "lora": null}',
    ],
)
def test_a_harmless_body_passes_byte_for_byte(body: bytes) -> None:
    assert Ask.parse(body, CHAT).spliced(body, None) is body


@pytest.mark.parametrize(
    "members",
    [
        '"id_slot": 3',
        '"lora": [{"id": 0, "scale": 1}]',
        '"id_slot": 0, "id_slot": 3, "lora": []',
        '"id\\u005fslot": 3',
        '"model": "tiny", "id_slot": 3, "x": {"id_slot": 4}',
        '"id_slot": "3"',
        '"id_slot": 3 ',
    ],
)
def test_what_a_client_may_not_choose_is_overruled_by_the_last_member(members: str) -> None:
    for body in (b"{%b}" % members.encode(), b" {%b\n} \r\n\t" % members.encode()):
        sent = Ask.parse(body, CHAT).spliced(body, None)
        found = json.loads(sent)
        assert (found["id_slot"], found["lora"]) == (-1, [])
        assert sent.startswith(body.rstrip()[:-1].rstrip())
        assert {key: value for key, value in json.loads(body).items() if key not in ("id_slot", "lora")} == {
            key: value for key, value in found.items() if key not in ("id_slot", "lora")
        }


@pytest.mark.parametrize(
    ("body", "extended"),
    [
        (b"{}", b'{"a":1}'),
        (b" { } ", b' {"a":1}'),
        (b'{"b":{}}', b'{"b":{},"a":1}'),
        (b'{"b":2 \n}\n', b'{"b":2,"a":1}'),
        (b'{"a":{"a":2}}', b'{"a":{"a":2},"a":1}'),
    ],
)
def test_members_are_added_at_the_end(body: bytes, extended: bytes) -> None:
    assert ask.extend(body, b'"a":1') == extended


def test_fields_are_the_whole_body() -> None:
    assert ask.fields(b'{"logprobs": true, "tools": []}') == {"logprobs": True, "tools": []}


CAPPED = [
    ("", False),
    ('"max_tokens": 8', False),
    ('"max_tokens": 9', True),
    ('"max_completion_tokens": 9', True),
    ('"n_predict": 9', True),
    ('"max_tokens": 9.0', True),
    ('"max_tokens": -1', False),
    ('"max_tokens": null', False),
    ('"n_predict": -1, "max_tokens": 9', False),
    ('"max_completion_tokens": 3, "max_tokens": 9', False),
    ('"n_predict": null, "max_tokens": 9', True),
    ('"max_tokens": "many"', False),
    ('"max_tokens": -4294967196', True),  # 100 in the engine's 32 bits
    ('"n_predict": 4294967396', True),
    ('"max_tokens": 4294967295', False),  # -1
    ('"max_tokens": 1e300', True),
]


@pytest.mark.parametrize(("members", "capped"), CAPPED)
@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE, INFILL, RESPONSES], ids=lambda route: route.path)
def test_an_answer_is_no_longer_than_the_preset_allows(route: Route, members: str, capped: bool) -> None:
    body = b"{%b}" % members.encode()
    sent = Ask.parse(body, route).spliced(body, 8)
    assert (sent != body) is capped
    assert not capped or json.loads(sent)["n_predict"] == 8
    assert Ask.parse(body, route).spliced(body, None) is body


@pytest.mark.parametrize(
    ("members", "capped"),
    [
        ('"max_output_tokens": 9', True),
        ('"max_output_tokens": 8', False),
        ('"max_output_tokens": 3, "max_tokens": 9', False),
        ('"max_output_tokens": null, "max_tokens": 9', False),  # it is renamed, null too, over the other
        ('"max_output_tokens": 9, "n_predict": 3', False),
    ],
)
def test_a_response_has_one_more_name_for_it(members: str, capped: bool) -> None:
    body = b"{%b}" % members.encode()
    assert (Ask.parse(body, RESPONSES).spliced(body, 8) != body) is capped
    assert Ask.parse(b'{"max_output_tokens": 9}', CHAT).asked_tokens is None


@pytest.mark.parametrize(
    ("members", "capped"),
    [
        ("", True),  # the engine's converter would take 4096
        ('"max_tokens": 9', True),
        ('"max_tokens": 8', False),
        ('"max_tokens": null', False),
        ('"max_tokens": -1', False),
        ('"max_tokens": 3, "n_predict": 9, "max_completion_tokens": 9', False),
    ],
)
def test_a_message_has_one_name_for_it(members: str, capped: bool) -> None:
    body = b"{%b}" % members.encode()
    sent = Ask.parse(body, MESSAGES).spliced(body, 8)
    assert (sent != body) is capped
    assert not capped or json.loads(sent) == {**json.loads(body), "max_tokens": 8}
    assert Ask.parse(b"{}", MESSAGES).spliced(b"{}", 4096) == b"{}"


@pytest.fixture(scope="module")
def short_answers(real_box: Box) -> Iterator[Client]:
    """The real engine behind a preset whose answers have 8 tokens at most."""
    client = real_box.up("--set", "max_tokens=8", "--set", "threads=1", "--set", "context=2048", "--set", "slots=1")
    yield client
    assert client.stop() == 0


CONTENT: dict[Api, dict[str, object]] = {
    Api.CHAT: {"messages": [{"role": "user", "content": "Count to a hundred."}]},
    Api.TEXT: {"prompt": "One, two, three,"},
    Api.NATIVE: {"prompt": "One, two, three,"},
    Api.RESPONSES: {"input": "Count to a hundred."},
    Api.ANTHROPIC: {"messages": [{"role": "user", "content": "Count to a hundred, one by one, in words."}]},
}


def tokens_of(client: Client, route: Route, asked: dict[str, int | None]) -> int:
    """How many tokens the answer had, by the engine's own count."""
    with client.http as http:
        reply = http.post(route.path, json={"model": "tiny", "temperature": 0, "ignore_eos": True, **CONTENT[route.api], **asked})
    body = reply.json()
    if route.api is Api.NATIVE:
        return int(body["tokens_predicted"])
    return int(body["usage"]["completion_tokens" if route.api in (Api.CHAT, Api.TEXT) else "output_tokens"])


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({}, 8),
        ({"max_tokens": 20}, 8),
        ({"max_completion_tokens": 20}, 8),
        ({"n_predict": 20}, 8),
        ({"max_tokens": -1}, 8),
        ({"max_tokens": -4294967196}, 8),
        ({"max_tokens": None}, 8),
        ({"n_predict": -1, "max_tokens": 3}, 8),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": 20}, 3),
    ],
)
@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE, RESPONSES], ids=lambda route: route.path)
def test_the_engine_keeps_to_it(short_answers: Client, route: Route, asked: dict[str, int | None], tokens: int) -> None:
    assert tokens_of(short_answers, route, asked) == tokens


@pytest.mark.parametrize(
    ("route", "asked", "tokens"),
    [
        (RESPONSES, {"max_output_tokens": 20}, 8),
        (RESPONSES, {"max_output_tokens": -1}, 8),
        (RESPONSES, {"max_output_tokens": None, "max_tokens": 3}, 8),
        (RESPONSES, {"max_output_tokens": 3, "max_tokens": 20}, 3),
        (MESSAGES, {}, 8),
        (MESSAGES, {"max_tokens": 20}, 8),
        (MESSAGES, {"max_tokens": -1}, 8),
        (MESSAGES, {"max_tokens": None}, 8),
        (MESSAGES, {"max_tokens": 3, "n_predict": 20}, 3),
    ],
)
def test_the_engine_keeps_to_it_by_every_name(
    short_answers: Client, route: Route, asked: dict[str, int | None], tokens: int
) -> None:
    assert tokens_of(short_answers, route, asked) == tokens
