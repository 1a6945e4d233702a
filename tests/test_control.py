"""llmctl's own routes over a running llmctl: who may, what they take, what they say, and that the OpenAPI document tells the truth.

``schemathesis`` runs over them from that document, and finds what nobody thought of.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from supervisor import control
from supervisor.row import Row
from tests import fakes
from tests.conftest import Box, Client, until

OWN = {
    "/health": "GET",
    "/v1/models": "GET",
    "/v1/models/{model}": "GET",
    "/metrics": "GET",
    "/llmctl/status": "GET",
    "/llmctl/top": "GET",
    "/llmctl/events": "GET",
    "/llmctl/texts": "GET",
    "/llmctl/openapi.json": "GET",
    "/llmctl/switch": "POST",
    "/llmctl/unload": "POST",
    "/llmctl/restart": "POST",
    "/llmctl/drain": "POST",
}
OF_ALL = ("/llmctl/restart", "/llmctl/drain")
"""Without a preset they are about all."""
ENDLESS = ("/llmctl/events", "/llmctl/texts")
ADMIN = [path for path in OWN if path.startswith("/llmctl/")]
TOO_OLD = {"start_exit": 1, "start_log": "llama_model_load: error loading model: unknown model architecture: 'new'"}

Boxes = Callable[..., Box]


@pytest.fixture(scope="module")
def served(module_fake_box: Boxes) -> Client:
    box = module_fake_box(tokens=2)
    box.preset("other", about="another one", aliases=["o", "a/b:c"], slots=2, context=4096, max_tokens=100)
    box.preset("gone", model={"path": str(box.root / "no-such.gguf")})
    return box.up()


@pytest.fixture(scope="module")
def document(served: Client) -> dict[str, Any]:
    with served.admin as http:
        found: dict[str, Any] = http.get("/llmctl/openapi.json").json()
    return found


def filled(path: str) -> str:
    return path.replace("{model}", "tiny")


def checked(document: dict[str, Any], path: str, reply: httpx2.Response) -> Any:
    """Its body, which is what the document says of this route and status."""
    answer = document["paths"][path][reply.request.method.lower()]["responses"][str(reply.status_code)]
    ((kind, content),) = answer["content"].items()
    assert reply.headers["content-type"].partition(";")[0] == kind
    jsonschema.validate(body := reply.json(), content["schema"])
    return body


# Who may, and how it may be asked


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic {}", "{}x", "Bearer {}\u00e9"])
def test_only_who_has_this_starts_token_may_control_it(
    served: Client, document: dict[str, Any], path: str, given: str | None
) -> None:
    token = json.loads((served.box.home.run / "instance.json").read_text())["token"]
    headers = {} if given is None else {"Authorization": given.format(token).encode("latin-1")}
    with served.http as http:
        reply = http.request(OWN[path], path, headers=headers, json={"preset": "tiny"} if OWN[path] == "POST" else None)
    assert reply.status_code == 401
    error = checked(document, path, reply)["error"]
    assert (error["code"], error["source"]) == ("invalid_api_key", "llmctl")
    assert token not in reply.text
    assert served.presets()["tiny"]["state"] == "ready"


@pytest.mark.parametrize("path", OWN)
def test_head_is_get_without_its_body_and_ends(served: Client, path: str) -> None:
    """Also that of what never ends. The connection is of use afterwards."""
    with served.admin as http:
        for _ in range(2):
            head = http.head(filled(path))
            assert head.content == b""
            if OWN[path] == "POST":
                assert (head.status_code, head.headers["allow"]) == (405, "POST")
            else:
                assert head.status_code == 200
        # What moves has another length each time.
        if OWN[path] == "GET" and path not in (*ENDLESS, "/llmctl/top", "/metrics"):
            assert head.headers["content-length"] == http.get(filled(path)).headers["content-length"]
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", [*OWN, "/v1/chat/completions", "/tokenize"])
def test_options_says_what_a_path_takes_and_lets_no_page_in(served: Client, path: str) -> None:
    with served.http as http:
        reply = http.options(filled(path))
    takes = "GET, HEAD, OPTIONS" if OWN.get(path) == "GET" else "OPTIONS, POST"
    assert (reply.status_code, reply.headers["allow"], reply.content) == (204, takes, b"")
    assert not [name for name in reply.headers if name.startswith("access-control-")]


def test_options_of_an_unknown_path_is_a_404(served: Client) -> None:
    with served.http as http:
        assert http.options("/nothing").status_code == 404


@pytest.mark.parametrize("path", OWN)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "TRACE"])
def test_another_method_is_a_405_that_names_the_right_one(served: Client, path: str, method: str) -> None:
    if method == OWN[path]:
        return
    with served.admin as http:
        reply = http.request(method, filled(path), headers={"Content-Type": "application/json"})
    assert reply.status_code == 405
    assert OWN[path] in reply.headers["allow"]
    assert reply.json()["error"]["message"] == f"{filled(path)} doesn't take {method}"


@pytest.mark.parametrize("path", ["/llmctl/switch", "/llmctl/unload", *OF_ALL])
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
        (b"[]", 400, "invalid_request_error"),
        (b'"tiny"', 400, "invalid_request_error"),
        (b"{}", 400, "invalid_request_error"),
        (b'{"preset": null}', 400, "invalid_request_error"),
        (b'{"preset": ["tiny"]}', 400, "invalid_request_error"),
        (b'{"preset": "\xff"}', 400, "invalid_request_error"),
        (b"[" * 4000, 400, "invalid_request_error"),
        (b'{"preset": "nobody"}', 404, "preset_not_found"),
        (b'{"preset": "\\ud800"}', 404, "preset_not_found"),
        (b'{"preset": "../../etc/passwd"}', 404, "preset_not_found"),
        (b'{"preset": "/no/such.gguf"}', 404, "preset_not_found"),
        (b'{"preset": "tiny", "x": "' + b"y" * 100_000 + b'"}', 413, "body_too_large"),
    ],
)
def test_a_faulty_body_changes_nothing(
    served: Client, document: dict[str, Any], path: str, body: bytes, status: int, code: str
) -> None:
    if path in OF_ALL and body in (b"", b"{}"):
        return
    pid = served.presets()["tiny"]["pid"]
    with served.admin as http:
        reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert (reply.status_code, checked(document, path, reply)["error"]["code"]) == (status, code)
        assert http.get("/health").status_code == 200
    assert (served.presets()["tiny"]["state"], served.presets()["tiny"]["pid"]) == ("ready", pid)


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content-Type": "text/plain"}, 415), ({"Origin": "https://evil.example"}, 403), ({"Host": "evil.example"}, 403)],
)
def test_a_web_page_may_not_even_with_the_token(
    served: Client, document: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    with served.admin as http:
        reply = http.post("/llmctl/unload", content=b'{"preset": "tiny"}', headers={"Content-Type": "application/json"} | headers)
    assert reply.status_code == status
    checked(document, "/llmctl/unload", reply)


# What they say


def test_models_are_what_can_be_asked_for_without_a_download(served: Client, document: dict[str, Any]) -> None:
    with served.http as http:
        listed = checked(document, "/v1/models", http.get("/v1/models"))["data"]
        one = checked(document, "/v1/models/{model}", http.get("/v1/models/a/b:c"))
        missing = http.get("/v1/models/turbo_4b")
    models = {each["id"]: each for each in listed}
    assert {"tiny", "other"} <= models.keys()
    assert not {"gone", "turbo_4b"} & models.keys()
    assert models["tiny"]["state"] == "ready"
    assert one == models["other"]
    meta = one["meta"]
    assert (meta["about"], meta["n_ctx"], meta["slots"], meta["max_tokens"]) == ("another one", 2048, 2, 100)
    assert checked(document, "/v1/models/{model}", missing)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/models/fresh1", "/v1/models"])
def test_a_preset_written_just_now_is_found(served: Client, path: str) -> None:
    served.box.preset(f"fresh{path.count('/') - 2}")
    with served.http as http:
        assert "fresh" in http.get(path).text


def test_status_tells_of_every_preset_that_was_asked_for(served: Client, document: dict[str, Any]) -> None:
    with served.admin as http:
        status = checked(document, "/llmctl/status", http.get("/llmctl/status"))
    assert (status["address"], status["pid"]) == (served.address, served.process.pid)
    (tiny,) = [each for each in status["presets"] if each["name"] == "tiny"]
    assert (tiny["slots"], tiny["waiting"], tiny["loaded"], tiny["pinned"]) == ({"busy": 0, "total": 4}, 0, None, False)
    assert tiny["memory"]["planned_mib"]["device"]["kv"] > 0


def test_health_is_ill_while_a_preset_has_failed(fake_box: Boxes, document: dict[str, Any]) -> None:
    box = fake_box(tokens=2)
    client = box.up()
    box.preset("other")
    fakes.tune(box.engine.parent, **TOO_OLD)
    with client.admin as http:
        assert checked(document, "/health", http.get("/health")) == {"status": "ok", "presets": {"tiny": "ready"}}
        assert http.post("/llmctl/switch", json={"preset": "other"}).status_code == 202
        until(lambda: client.presets()["other"]["state"] == "failed")
        ill = http.get("/health")
        assert ill.status_code == 503
        assert checked(document, "/health", ill) == {"status": "unavailable", "presets": {"tiny": "ready", "other": "failed"}}
        reply = http.post("/llmctl/unload", json={"preset": "other"})  # nobody wants it any more
        assert checked(document, "/llmctl/unload", reply) == {"preset": "other", "state": "stopped"}
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("name", ["turbo_4b", "gone"])
def test_what_is_not_here_can_not_be_switched_to_and_is_unloaded_already(
    served: Client, document: dict[str, Any], name: str
) -> None:
    with served.admin as http:
        reply = http.post("/llmctl/switch", json={"preset": name})
        assert (reply.status_code, checked(document, "/llmctl/switch", reply)["error"]["code"]) == (503, "model_not_downloaded")
        reply = http.post("/llmctl/unload", json={"preset": name})
        assert (reply.status_code, checked(document, "/llmctl/unload", reply)) == (202, {"preset": name, "state": "stopped"})


@pytest.mark.parametrize("body", [b"", b"{}", b' {"preset": "tiny"} '])
def test_restart_and_drain_are_about_one_or_all(fake_box: Boxes, document: dict[str, Any], body: bytes) -> None:
    client = fake_box(tokens=2).up()

    def post(path: str) -> Any:
        with client.admin as http:
            reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code == 202
            return checked(document, path, reply)

    assert post("/llmctl/drain")["presets"][0]["preset"] == "tiny"
    until(lambda: client.presets()["tiny"]["state"] == "stopped")
    assert client.presets()["tiny"]["held"] is True
    assert post("/llmctl/drain") == {"presets": [{"preset": "tiny", "state": "stopped"}]}  # twice is harmless
    assert post("/llmctl/restart")["presets"][0]["preset"] == "tiny"
    until(lambda: client.presets()["tiny"]["state"] == "ready")
    with client.admin as http:
        checked(document, "/llmctl/status", http.get("/llmctl/status"))
    assert client.presets()["tiny"]["held"] is False


def events(reply: httpx2.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: "))


def test_events_begin_with_what_is_and_tell_each_change_and_how_far_a_load_is(fake_box: Boxes, document: dict[str, Any]) -> None:
    box = fake_box(tokens=2)
    client = box.up()
    box.preset("other")
    fakes.tune(box.engine.parent, tokens=2, load_s=0.8)
    with client.admin as http, http.stream("GET", "/llmctl/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-accel-buffering"] == "no"
        told = events(reply)
        assert next(told) == {"preset": "tiny", "state": "ready"}
        with client.admin as other:
            taken = other.post("/llmctl/switch", json={"preset": "other"})
            assert taken.status_code == 202
            checked(document, "/llmctl/switch", taken)
        loads: list[dict[str, Any]] = []
        while (said := next(told))["state"] != "ready":
            loads.append(said)
        assert said == {"preset": "other", "state": "ready"}
        assert {each["state"] for each in loads} == {"starting"}
        assert len(loads) >= 3  # the start, and its progress
        assert [each["loaded"] for each in loads] == sorted(each["loaded"] for each in loads)
        with client.admin as other:
            other.post("/llmctl/unload", json={"preset": "other"})
        assert [next(told)["state"] for _ in range(3)] == ["draining", "stopping", "stopped"]
    fakes.tune(box.engine.parent, **TOO_OLD)
    with client.admin as http:
        http.post("/llmctl/switch", json={"preset": "other"})
        until(lambda: client.presets()["other"]["state"] == "failed")
        with http.stream("GET", "/llmctl/events") as reply:
            told = events(reply)
            found = {said["preset"]: said for said in (next(told), next(told))}
    assert "too old for this model" in found["other"]["cause"]
    assert (found["other"]["exit"], found["other"]["try"]) == (8, "llmctl build")


# What it is asked, for who listens

ODD_TEXT = "a\u2028b\u0085c\r\nd \U0001f426"
"""What some readers of lines take for their ends."""


@contextlib.contextmanager
def listening(client: Client) -> Iterator[Iterator[dict[str, Any]]]:
    """What is told from here on."""
    with client.admin as http, http.stream("GET", "/llmctl/texts") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert next(lines) == ": listening"
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def test_who_listens_is_told_each_admitted_request_with_its_body_and_no_header(fake_box: Boxes) -> None:
    client = fake_box(tokens=2).up()
    chat = {"model": "tiny", "messages": [{"role": "user", "content": ODD_TEXT}], "max_tokens": 2}
    text = {"model": "tiny", "prompt": "once", "stream": True}
    with client.http as http:
        assert http.post("/v1/chat/completions", json=chat).status_code == 200  # nobody listens yet
        with listening(client) as told, listening(client) as other:
            key = {"Authorization": "Bearer sk-secret"}
            asked = http.post("/v1/chat/completions", json=chat, headers=key)
            refused = http.post("/v1/chat/completions", json={**chat, "model": "nobody"})
            broken = http.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"})
            assert (asked.status_code, refused.status_code, broken.status_code) == (200, 404, 400)
            assert http.post("/v1/completions", json=text).status_code == 200
            first, second = next(told), next(told)
            assert [next(other), next(other)] == [first, second]
    rows = {row["id"]: row for row in client.box.closed_records(5)}
    assert (first["path"], first["body"], second["path"], second["body"]) == (
        "/v1/chat/completions",
        chat,
        "/v1/completions",
        text,
    )
    assert first["id"] == asked.headers["x-request-id"]
    assert first["at_s"] == rows[first["id"]]["opened_at"]
    assert first.keys() == {"id", "path", "at_s", "body"}


def test_who_listens_hears_the_end_and_keeps_nothing_up(fake_box: Boxes) -> None:
    client = fake_box(tokens=2).up()
    with listening(client) as told:
        assert client.stop() == 0
        assert list(told) == []


def test_what_is_not_read_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many bytes wait; what came first is told first."""

    async def hear() -> list[dict[str, Any]]:
        heard = control._Texts()
        for number in range(5):
            heard.take(Row(f"req_{number}", 1.5, 0.0, "/v1/completions", "tiny"), b'{"prompt": "%d"}' % number)
        heard.end()
        told = []
        while (said := await heard.next()) is not None:
            told.append(json.loads(said.removeprefix(b"data: ")))
        return told

    monkeypatch.setattr(control, "TEXTS_KEPT_BYTES", 3 * 1100)
    *texts, last = asyncio.run(hear())
    assert [each["body"]["prompt"] for each in texts] == ["0", "1", "2"]
    assert last == {"dropped": 2}


# The document


def test_the_document_is_openapi_3_1_and_names_every_route_of_its_own(document: dict[str, Any]) -> None:
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert {"title", "version"} <= document["info"].keys()
    assert {path: "".join(what).upper() for path, what in document["paths"].items()} == OWN
    schemes = document["components"]["securitySchemes"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["responses"]
            assert all(name in schemes for need in operation.get("security", ()) for name in need)
            assert (path in ADMIN) == ("security" in operation)
            assert [each["name"] for each in operation.get("parameters", ())] == re.findall(r"{(\w+)}", path)
            told = [*operation["responses"].values(), *([operation["requestBody"]] if "requestBody" in operation else [])]
            for content in (kind for each in told for kind in each["content"].values()):
                jsonschema.Draft202012Validator.check_schema(content["schema"])


def test_schemathesis_finds_nothing(served: Client, tmp_path: Path) -> None:
    """Every answer to made-up requests has a status, a type and a shape that the document names. Without what never ends."""
    token = json.loads((served.box.home.run / "instance.json").read_text())["token"]
    checks = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{served.address}/llmctl/openapi.json",
            "--header",
            f"Authorization: Bearer {token}",
            *(word for path in ENDLESS for word in ("--exclude-path", path)),
            "--checks",
            ",".join(checks),
            "--max-examples",
            "10",
            "--seed",
            "4",
        ],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"Tested: (\d+)", done.stdout)
    assert found, done.stdout
    assert int(found[1]) >= 6
    with served.http as http:
        assert http.get("/v1/models").status_code == 200
