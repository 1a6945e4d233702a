"""Who may come in: programs of this machine's user, and no web page."""

from __future__ import annotations

import pytest

from supervisor import gate
from supervisor.errors import Error

JSON = (b"content-type", b"application/json")


def host(name: str) -> tuple[bytes, bytes]:
    return (b"host", name.encode())


def refusal(method: str, *headers: tuple[bytes, bytes]) -> tuple[int, str]:
    with pytest.raises(Error) as raised:
        gate.check(method, headers)
    assert raised.value.hint
    return raised.value.status, raised.value.code


@pytest.mark.parametrize("name", ["127.0.0.1:8080", "127.0.0.1", "localhost:8080", "LocalHost", "[::1]:8080", "[::1]"])
def test_this_machines_own_names_come_in(name: str) -> None:
    gate.check("POST", [host(name), JSON])
    gate.check("GET", [host(name)])


@pytest.mark.parametrize(
    "name",
    [
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "192.168.1.2:8080",
        "0.0.0.0:8080",
        "[::2]:80",
        "",
        "127.0.0.1@evil.example",
        "evil.example:127.0.0.1",
        "[fe80::1]",
        "127.1",
        "localhost.",
    ],
)
def test_a_name_rebound_to_this_machine_is_refused(name: str) -> None:
    assert refusal("POST", host(name), JSON) == (403, "host_not_allowed")
    assert refusal("GET", host(name)) == (403, "host_not_allowed")


def test_without_a_host_header_nobody_comes_in() -> None:
    assert refusal("GET") == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://127.0.0.1:8080", "http://127.0.0.1:9999", "http://localhost:8080", "null", "file://", "x"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_a_foreign_page_is_refused(origin: str, method: str) -> None:
    assert refusal(method, host("127.0.0.1:8080"), JSON, (b"origin", origin.encode())) == (403, "origin_not_allowed")


def test_our_own_page_is_not() -> None:
    gate.check("POST", [host("127.0.0.1:8080"), JSON, (b"origin", b"http://127.0.0.1:8080")])


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", " application/json ;x"]
)
def test_json_comes_in(kind: str) -> None:
    gate.check("POST", [host("127.0.0.1"), (b"content-type", kind.encode())])


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
        "application/jsonp",
        "application/json/x",
        "\xff",
        "",
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_what_a_page_can_send_without_asking_is_refused(kind: str, method: str) -> None:
    """A form, or a fetch in mode no-cors, may only have these content types."""
    assert refusal(method, host("127.0.0.1"), (b"content-type", kind.encode("latin-1"))) == (415, "unsupported_media_type")


def test_no_content_type_is_said() -> None:
    with pytest.raises(Error, match="not no content type"):
        gate.check("POST", [host("127.0.0.1")])


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_what_has_no_body_needs_no_content_type(method: str) -> None:
    gate.check(method, [host("127.0.0.1")])
