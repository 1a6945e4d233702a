"""The table of routes hangs together."""

from __future__ import annotations

import pytest

from supervisor.routes import ROUTES, Api, Route, is_anthropic, served_by


def test_each_route_stands_under_its_path() -> None:
    assert all(path == route.path for path, route in ROUTES.items())


@pytest.mark.parametrize("route", [route for route in ROUTES.values() if route.count], ids=lambda route: route.path)
def test_what_counts_a_prompt_is_a_route_that_takes_no_slot(route: Route) -> None:
    counting = ROUTES[route.count]
    assert counting.api is Api.WHOLE
    assert not counting.decodes
    assert is_anthropic(counting.path) is is_anthropic(route.path)


def test_what_streams_takes_a_slot() -> None:
    assert all(route.decodes for route in ROUTES.values() if route.api is not Api.WHOLE)


def test_only_anthropics_routes_are_its() -> None:
    assert {path for path in ROUTES if is_anthropic(path)} == {"/v1/messages", "/v1/messages/count_tokens"}
    assert {route.path for route in ROUTES.values() if route.api is Api.ANTHROPIC} == {"/v1/messages"}


@pytest.mark.parametrize(
    ("kind", "path"), [("chat", "/v1/chat/completions"), ("embedding", "/v1/embeddings"), ("rerank", "/v1/rerank")]
)
def test_each_kind_of_preset_has_a_route(kind: str, path: str) -> None:
    assert served_by(kind) == path
