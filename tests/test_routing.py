"""Which preset a request is for, and what a client is told that asks for none there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from supervisor import preset, routing
from supervisor.errors import Error, Exit
from supervisor.preset import Preset
from supervisor.routes import ROUTES
from tests.plans import NOWHERE

CHAT = ROUTES["/v1/chat/completions"]


def made(name: str, **options: Any) -> Preset:
    return dataclasses.replace(preset.load("tiny", NOWHERE), name=name, **options)


PRESETS = {
    each.name: each
    for each in (
        made("small", aliases=("gpt-4o-mini", "haiku")),
        made("large", aliases=("gpt-4o",)),
        made("vectors", kind="embedding", aliases=("text-embedding-3-small",)),
        made("order", kind="rerank"),
    )
}


def resolve(
    model: str | None,
    path: str = CHAT.path,
    *,
    presets: dict[str, Preset] = PRESETS,
    ordered: Sequence[str] = (),
    is_here: Callable[[str], bool] = lambda _: True,
) -> str:
    return routing.resolve(model, ROUTES[path], presets, ordered, is_here)


def refused(*args: Any, **more: Any) -> Error:
    with pytest.raises(Error) as caught:
        resolve(*args, **more)
    return caught.value


@pytest.mark.parametrize(
    ("model", "path", "name"),
    [
        ("small", "/v1/chat/completions", "small"),
        ("large", "/v1/messages", "large"),
        ("gpt-4o", "/v1/chat/completions", "large"),
        ("haiku", "/v1/messages", "small"),
        ("vectors", "/v1/embeddings", "vectors"),
        ("text-embedding-3-small", "/v1/embeddings", "vectors"),
        ("order", "/v1/rerank", "order"),
        ("vectors", "/tokenize", "vectors"),  # a tokenizer is of any kind
        ("small", "/tokenize", "small"),
        ("small", "/infill", "small"),
    ],
)
def test_a_name_or_an_alias_finds_its_preset(model: str, path: str, name: str) -> None:
    assert resolve(model, path) == name


def test_a_presets_own_name_wins_over_anothers_alias() -> None:
    presets = {each.name: each for each in (made("a", aliases=("b",)), made("b"))}
    assert resolve("b", presets=presets) == "b"


@pytest.mark.parametrize("model", ["gpt-5", "", "SMALL", "small ", None])
def test_the_default_preset_answers_for_all_other_names_and_for_none(model: str | None) -> None:
    presets = PRESETS | {"any": made("any", default=True)}
    assert resolve(model, presets=presets) == "any"
    assert resolve("small", presets=presets) == "small"
    assert resolve("gpt-4o", presets=presets) == "large"


def test_the_default_preset_wins_over_the_one_that_is_up() -> None:
    presets = PRESETS | {"any": made("any", default=True)}
    assert resolve(None, "/completion", presets=presets, ordered=("small",)) == "any"


@pytest.mark.parametrize("path", ["/completion", "/infill", "/tokenize", "/detokenize", "/apply-template"])
def test_on_llama_cpps_own_routes_no_name_is_the_one_that_up_was_given(path: str) -> None:
    assert resolve(None, path, ordered=("large",)) == "large"
    assert resolve("small", path, ordered=("large",)) == "small"
    for ordered in ((), ("small", "large")):
        error = refused(None, path, ordered=ordered)
        assert (error.status, error.code) == (400, "missing_model")
    assert refused("gpt-5", path, ordered=("large",)).status == 404


@pytest.mark.parametrize("path", [path for path in ROUTES if path.startswith("/v1/")])
def test_on_openais_and_anthropics_a_name_is_needed(path: str) -> None:
    error = refused(None, path, ordered=("small",))
    assert (error.status, error.code, error.exit) == (400, "missing_model", Exit.USAGE)
    assert error.message.startswith("the request names no model; there is: ")


def test_a_nameless_request_does_not_go_to_a_preset_of_another_kind() -> None:
    error = refused(None, "/completion", ordered=("vectors",))
    assert (error.status, error.code) == (400, "wrong_kind")


def test_an_unknown_name_is_told_which_there_are_for_that_route() -> None:
    error = refused("gpt-5")
    assert (error.status, error.code) == (404, "model_not_found")
    assert error.message == "the model 'gpt-5' does not exist; there is: small, large"
    assert error.hint == '"model": "small"'
    assert refused("gpt-5", "/v1/embeddings").message == "the model 'gpt-5' does not exist; there is: vectors"
    assert refused("gpt-5", "/tokenize").message == "the model 'gpt-5' does not exist; there is: small, large, vectors, order"


def test_only_presets_whose_model_is_here_are_offered() -> None:
    error = refused("gpt-5", is_here=lambda name: name == "large")
    assert (error.message, error.hint) == ("the model 'gpt-5' does not exist; there is: large", '"model": "large"')
    error = refused("gpt-5", is_here=lambda _: False)
    assert (error.message, error.hint) == ("the model 'gpt-5' does not exist; there is: none", "llmctl presets")


def test_a_known_name_is_found_also_where_its_model_is_not_here() -> None:
    """So that it is told what to fetch, and not that it doesn't exist."""
    assert resolve("small", is_here=lambda _: False) == "small"


@pytest.mark.parametrize(
    ("model", "path", "message", "hint"),
    [
        (
            "vectors",
            "/v1/chat/completions",
            "vectors is a preset for embedding, and /v1/chat/completions wants one for chat",
            '"model": "small"',
        ),
        (
            "gpt-4o",
            "/v1/embeddings",
            "large is a preset for chat, and /v1/embeddings wants one for embedding",
            '"model": "vectors"',
        ),
        ("small", "/v1/rerank", "small is a preset for chat, and /v1/rerank wants one for rerank", '"model": "order"'),
        ("order", "/apply-template", "order is a preset for rerank, and /apply-template wants one for chat", '"model": "small"'),
    ],
)
def test_a_preset_of_another_kind_is_a_fault_of_the_request(model: str, path: str, message: str, hint: str) -> None:
    error = refused(model, path)
    assert (error.message, error.hint, error.status, error.code) == (message, hint, 400, "wrong_kind")


def test_where_no_preset_is_of_that_kind_the_hint_is_a_route_that_the_named_one_serves() -> None:
    error = refused("vectors", presets={"vectors": PRESETS["vectors"]})
    assert error.hint == "/v1/embeddings"
    error = refused("small", "/v1/embeddings", presets={"small": PRESETS["small"]})
    assert error.hint == "/v1/chat/completions"


def test_a_default_of_another_kind_is_no_answer() -> None:
    error = refused("gpt-5", "/v1/embeddings", presets={"any": made("any", default=True)})
    assert (error.status, error.code) == (400, "wrong_kind")


# What two presets can't both have.


def clash(*presets: Preset) -> str | None:
    return routing.clash({each.name: each for each in presets})


def test_presets_that_differ_in_all_names_do_not_clash() -> None:
    assert routing.clash(PRESETS) is None
    assert routing.clash({}) is None
    assert clash(made("a", default=True), made("b")) is None


def test_an_alias_that_two_have() -> None:
    assert clash(made("a", aliases=("x",)), made("b", aliases=("y", "x"))) == "'x' is an alias of a and b"


@pytest.mark.parametrize("turn", [1, -1])
def test_an_alias_that_is_a_presets_name(turn: int) -> None:
    presets = [made("a", aliases=("b",)), made("b")][::turn]
    assert clash(*presets) == "'b' is a preset, and an alias of a"


def test_a_presets_own_name_as_its_alias_is_no_clash() -> None:
    assert clash(made("a", aliases=("a",))) is None


def test_two_defaults() -> None:
    assert clash(made("a", default=True), made("b"), made("c", default=True)) == "a and c both have default: on"
