"""Programs that people have, as they come: curl, ``llm`` on the command line, nginx in front. The Python SDKs have tests of their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests import fakes
from tests.conftest import WAIT_S, Box, Client, until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hello."}]
JSON = ("-H", "Content-Type: application/json")

Boxes = Callable[..., Box]


def body(**fields: Any) -> str:
    return json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0} | fields)


def loopback() -> list[str]:
    """The names of this machine that llmctl listens on."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return ["127.0.0.1", "localhost"]
    return ["127.0.0.1", "localhost", "[::1]"]


@pytest.fixture(scope="module")
def port(tiny: Client) -> int:
    return int(tiny.address.rpartition(":")[2])


# curl


def curl(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("there is no curl")
    return subprocess.run(
        [program, "--silent", "--show-error", "--globoff", "--noproxy", "*", "--max-time", str(WAIT_S), *words],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("name", loopback())
@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_streams_by_every_name_of_this_machine(port: int, name: str, version: str) -> None:
    done = curl("--no-buffer", version, *JSON, "-d", body(stream=True), f"http://{name}:{port}{CHAT}")
    *tokens, end = [line for line in done.stdout.split("\n\n") if line]
    assert end == "data: [DONE]"
    assert all(json.loads(token.removeprefix("data: "))["object"] == "chat.completion.chunk" for token in tokens)


def test_curl_gets_one_answer(tiny: Client) -> None:
    reply = json.loads(curl(*JSON, "-d", body(), tiny.address + CHAT).stdout)
    assert reply["choices"][0]["message"]["content"]
    assert reply["timings"]["predicted_n"] == reply["usage"]["completion_tokens"]


@pytest.mark.parametrize("streamed", [True, False])
def test_curl_uses_one_connection_for_several_requests(tiny: Client, streamed: bool) -> None:
    one = ("-w", "%{stderr}%{num_connects} %{http_code}\n", *JSON, "-d", body(stream=streamed), tiny.address + CHAT)
    done = curl(*one, "--next", "--silent", *one, "--next", "--silent", *one)
    assert done.stderr.splitlines() == ["1 200", "0 200", "0 200"]


def test_curl_asks_before_it_sends_a_large_body(tiny: Client, tmp_path: Path) -> None:
    """Without ``100 Continue`` it would wait a second for it; the engine counts the tokens: it is too long, and said to be."""
    large = tmp_path / "large.json"
    large.write_text(body(messages=[{"role": "user", "content": "word " * 400_000}]))
    asks = ("-v", "-H", "Expect: 100-continue", "--expect100-timeout", "30", "--data-binary", f"@{large}")
    done = curl(*JSON, *asks, tiny.address + CHAT)
    assert "HTTP/1.1 100 Continue" in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "context_length_exceeded"


def test_curl_is_refused_before_it_sends_a_body_in_vain(tiny: Client, tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    large.write_text("x" * 2_000_000)
    asks = ("-v", "-H", "Expect: 100-continue", "--expect100-timeout", "30", "--data-binary", f"@{large}")
    done = curl("-H", "Content-Type: text/plain", *asks, tiny.address + CHAT)
    assert "100 Continue" not in done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "unsupported_media_type"


def test_curl_head_and_options(tiny: Client) -> None:
    assert curl("--head", tiny.address + "/v1/models").stdout.startswith("HTTP/1.1 200 ")
    assert "allow: POST" in curl("--head", tiny.address + CHAT).stdout
    said = curl("-i", "-X", "OPTIONS", tiny.address + CHAT).stdout
    assert said.startswith("HTTP/1.1 204 ")
    assert "allow: OPTIONS, POST" in said


# llm, a client on the command line (llm.datasette.io)


@pytest.fixture
def llm(tiny: Client, tmp_path: Path) -> Callable[..., str]:
    """Runs ``llm`` as its documentation says for an OpenAI-compatible server."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "box", "model_name": "tiny", "api_base": f"{tiny.address}/v1"}])
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words],
            env=env | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "-"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        return done.stdout if done.returncode == 0 else f"{done.returncode}: {done.stderr}"

    return run


def test_llm_says_the_same_streamed_and_whole(llm: Callable[..., str], tiny: Client) -> None:
    words = ("-m", "box", "-o", "max_tokens", "8", "-o", "temperature", "0")
    streamed = llm(*words, "Say hello.")
    assert streamed.strip()
    assert llm(*words, "--no-stream", "Say hello.") == streamed
    streamed_row, whole_row = tiny.box.closed_records(2)[-2:]
    assert (streamed_row["stream"], whole_row["stream"]) == (1, 0)
    assert streamed_row["status"] == whole_row["status"] == "ok"


def test_llm_shows_our_error(llm: Callable[..., str], tiny: Client, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "nobody", "model_name": "gpt-4", "api_base": f"{tiny.address}/v1"}])
    )
    said = llm("-m", "nobody", "Hello")
    assert said.startswith("1: ")
    assert "the model 'gpt-4' does not exist" in said


# nginx in front

NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {address}; }}
    }}
}}
"""
"""As its documentation begins: nothing is said of buffering, which is on."""


@contextmanager
def nginx(folder: Path, address: str) -> Iterator[str]:
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("there is no nginx")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, address=address))
    process = subprocess.Popen(
        [program, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def listens() -> bool:
            assert process.poll() is None
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WAIT_S)


def test_behind_nginx_a_token_comes_when_it_is_made(fake_box: Boxes, tmp_path: Path) -> None:
    """The engine says three words and then nothing for ever: what came was not held back for more."""
    client = fake_box(healthy_requests=1, tokens=100, pace_s=0.05, stall_after_tokens=3).up()
    asked = json.loads(body(stream=True))
    with nginx(tmp_path / "nginx", client.address) as front:
        for address, heard in ((client.address, "no"), (front, None)):  # nginx keeps the word that is for it
            with httpx2.Client(base_url=address, timeout=WAIT_S) as http, http.stream("POST", CHAT, json=asked) as reply:
                assert reply.headers.get("x-accel-buffering") == heard
                assert any(b"t2" in piece for piece in reply.iter_raw())
        fakes.wait_event(client.box.engine.parent, "client_closed", count=2)  # that we left went through as well
    assert [row["status"] for row in client.box.closed_records(2)] == ["cancelled", "cancelled"]


def test_behind_nginx_events_and_whole_answers_come_too(tiny: Client, tmp_path: Path) -> None:
    with nginx(tmp_path / "nginx", tiny.address) as front, httpx2.Client(base_url=front, timeout=WAIT_S) as http:
        assert http.post(CHAT, json=json.loads(body())).json()["choices"][0]["message"]["content"]
        token = json.loads((tiny.box.home.run / "instance.json").read_text())["token"]
        with http.stream("GET", "/llmctl/events", headers={"Authorization": f"Bearer {token}"}) as reply:
            assert next(reply.iter_lines()) == 'data: {"preset":"tiny","state":"ready"}'
