"""What people write and the keys they come with are kept nowhere: no file of the home, log, metric or command has them.

A word that stands nowhere else is put wherever a client can put one, on every route, in requests that are answered, refused, broken or cut,
under engines that die and an llmctl that is killed. Then the whole home is looked through, byte by byte, for the word, for the key, and
for what a key can be made into without a secret: base64, hex, a hash.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx2
import pytest

from supervisor import engine, rundir
from supervisor.logs import FORMATS
from supervisor.routes import ROUTES
from tests import fakes
from tests.conftest import WAIT_S, Box, Client, until

PROMPT: Final = "Kanarienvogel7f3b9c"
"""No file has it but this one."""
KEY: Final = "sk-canary-5d1e0ab97c42"
ANSWER: Final = "Zaunkoenig2e81d0"
"""A word of the fake's answers."""
WHOLE: Final = "zebra"
"""One token, as the real engine would write it where it logs tokens one at a time."""
TEXT: Final = f"Why does a {PROMPT} like a {WHOLE}?"
SLOW: Final = {"pace_s": 0.02, "tokens": 100_000}

Boxes = Callable[..., Box]


# Looking


def _aligned(data: bytes) -> Iterator[bytes]:
    """Base64 of the data wherever it begins in a longer text: what surrounds it changes the outermost digits."""
    for before in range(3):
        digits = base64.b64encode(bytes(before) + data)
        yield digits[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]


def forms(word: str, *, hashed: bool) -> dict[str, bytes]:
    """A word, and what it may be written as; a hash only of what is a whole value somewhere."""
    data = word.encode()
    found = {"plain": data, "hex": data.hex().encode(), "UTF-16": word.encode("utf-16-le")}
    found |= {f"base64, {number} before": digits for number, digits in enumerate(_aligned(data))}
    for name in ("md5", "sha1", "sha256", "sha512", "blake2b") if hashed else ():
        for what, value in ((name, data), (f"{name} of the header", b"Bearer " + data)):
            digest = hashlib.new(name, value).digest()
            found |= {what: digest, f"{what} in hex": digest.hex().encode(), f"{what} in base64": base64.b64encode(digest)[:-3]}
    return found


NEEDLES: Final[Mapping[str, bytes]] = {
    f"{what} ({form})": needle
    for what, word, hashed in (("prompt", PROMPT, False), ("key", KEY, True), ("answer", ANSWER, False))
    for form, needle in forms(word, hashed=hashed).items()
}


QUOTES: Final[Mapping[str, bytes]] = {
    "a malformed tool or field": rb"[^\n]* got exception: \{[^\n]*",  # tools/server/server.cpp:79
    "a pattern it can't keep to": rb"WARNING: JSON schema conversion was incomplete: [^\n]*",  # common/json-schema-to-grammar.cpp:980
    "a broken grammar": rb"parse: error parsing grammar: [^\n]*\n\n[^\n]*",  # src/llama-grammar.cpp:720
}
"""What the engine itself writes into its log, at any verbosity, of a request that it refuses for its form. llmctl adds nothing to it, and
takes nothing of it anywhere else."""


def without_quotes(log: bytes) -> bytes:
    """An engine's log without those lines."""
    return re.sub(rb"(?m)^(?:" + b"|".join(QUOTES.values()) + rb")$", b"", log)


def seen(where: str, data: bytes, needles: Mapping[str, bytes] = NEEDLES) -> list[str]:
    """What of the needles is in it, with what stands around."""
    lower = data.lower()
    found = []
    for name, needle in needles.items():
        at = max(data.find(needle), lower.find(needle.lower()))
        if at >= 0:
            found.append(f"{where}: {name}: {data[max(0, at - 120) : at + len(needle) + 40]!r}")
    return found


def in_files(root: Path, needles: Mapping[str, bytes] = NEEDLES) -> list[str]:
    """What is found in the files below, and in their names."""
    found = []
    for path in sorted(root.rglob("*")):
        found += seen("the name", os.fsencode(path.relative_to(root)), needles)
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                found += seen(str(path), without_quotes(data) if path.name.startswith("tiny.log") else data, needles)
    return found


COMMANDS: Final = (
    ("usage", "--records", "--json", "--limit", "100000"),
    ("usage", "--json"),
    ("why", "last", "--json"),
    ("logs", "tiny", "-n", "100000"),
)


def told(box: Box, *commands: Sequence[str]) -> list[str]:
    """What is found in what the commands say."""
    found = []
    for words in commands:
        done = box.llmctl(*words)
        assert done.returncode == 0, (words, done.stderr)
        said = (done.stdout + done.stderr).encode()
        found += seen(" ".join(words), without_quotes(said) if words[:2] == ("logs", "tiny") else said)
    return found


def found_in(client: Client, needles: Mapping[str, bytes] = NEEDLES) -> list[str]:
    """Everywhere, while it runs."""
    with client.admin as http:
        pages = {path: http.get(path) for path in ("/metrics", "/llmctl/status", "/llmctl/top", "/v1/models", "/health")}
    statuses = {path: page.status_code for path, page in pages.items()}
    assert statuses == dict.fromkeys(pages, 200) | {
        "/health": statuses["/health"]
    }  # 503 while nothing of what was asked for is up
    found = [each for path, page in pages.items() for each in seen(path, page.content, needles)]
    found += told(client.box, ("status", "--json"), *COMMANDS)
    return found + in_files(client.box.root, needles)


# Asking


class Sent(NamedTuple):
    """A request."""

    path: str
    body: bytes
    headers: Mapping[str, str] = {}
    method: str = "POST"


MESSAGES: Final = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]
BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/responses": {"instructions": TEXT, "input": TEXT, "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": TEXT},
    "/v1/messages": {"system": TEXT, "messages": [MESSAGES[1]], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [MESSAGES[1]]},
    "/completion": {"prompt": TEXT, "n_predict": 4},
    "/infill": {"input_prefix": TEXT, "input_suffix": TEXT, "prompt": TEXT, "n_predict": 4},
    "/v1/embeddings": {"input": [TEXT, PROMPT]},
    "/v1/rerank": {"query": TEXT, "documents": [TEXT, PROMPT]},
    "/tokenize": {"content": TEXT, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2], "content": TEXT},
    "/apply-template": {"messages": MESSAGES},
}
"""Where each route has words of a person."""

_PARAMETERS: Final = {"type": "object", "properties": {PROMPT: {"type": "string", "description": TEXT}}}
_FUNCTION: Final = {"name": PROMPT, "description": TEXT, "parameters": _PARAMETERS}
TOOLS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "/v1/chat/completions": [{"type": "function", "function": _FUNCTION}],
    "/v1/responses": [{"type": "function", **_FUNCTION}],
    "/v1/messages": [{"name": PROMPT, "description": TEXT, "input_schema": _PARAMETERS}],
}
"""A tool in each tongue that has them."""

ODD: Final[Sequence[Mapping[str, Any]]] = (
    {"stop": [PROMPT], "stop_sequences": [PROMPT]},
    {"messages": PROMPT, "prompt": {PROMPT: PROMPT}, "input": {PROMPT: PROMPT}},
    {"messages": [{"role": PROMPT, "content": TEXT}]},
    {"messages": [{"role": "user", "content": [{"type": PROMPT, PROMPT: TEXT}]}]},
    {"messages": [{"role": "user", "content": TEXT}, {"role": "tool", "tool_call_id": PROMPT, "name": PROMPT, "content": TEXT}]},
    {PROMPT: PROMPT, "user": PROMPT, "metadata": {PROMPT: PROMPT, "user_id": PROMPT}, "service_tier": PROMPT},
    {"response_format": {"type": "json_schema", "json_schema": {"name": PROMPT, "schema": {"type": PROMPT, "pattern": PROMPT}}}},
    {"response_format": {"type": PROMPT}, "tool_choice": PROMPT},
    *({name: PROMPT} for name in ("max_tokens", "n", "stream", "temperature", "seed", "id_slot", "logit_bias")),
)
"""What may be wrong in a body, or is only odd there."""


def body(path: str, **fields: Any) -> dict[str, Any]:
    """The body of a good request."""
    names = {"embedding": "words", "rerank": "order"}
    return {"model": names.get(str(ROUTES[path].kind), "tiny"), **BODIES[path], **fields}


def _long(value: Any, times: int) -> Any:
    """The same with longer texts."""
    if isinstance(value, str):
        return f"{value} " * times if TEXT in value else value
    if isinstance(value, list):
        return [_long(each, times) for each in value]
    return {key: _long(each, times) for key, each in value.items()} if isinstance(value, dict) else value


def of_route(path: str) -> Iterator[Sent]:
    """Requests to one route: good ones, and others."""
    good = body(path)
    raw = json.dumps(good).encode()
    for fields in ({}, {"stream": True}, {"stream": True, "stop": [PROMPT], "stop_sequences": [PROMPT]}):
        yield Sent(path, json.dumps(good | fields).encode())
    if path in TOOLS:
        yield Sent(path, json.dumps(good | {"tools": TOOLS[path]}).encode())
    yield Sent(path, json.dumps(_long(good, 400)).encode())
    yield Sent(path, json.dumps(good | {"model": PROMPT}).encode())
    yield Sent(path, json.dumps(good | {"model": {PROMPT: TEXT}}).encode())
    for broken in (raw[:-1], raw[:-3], raw + b"}", b"[" + raw + b"]", b'"' + PROMPT.encode(), PROMPT.encode(), raw + b"\xff"):
        yield Sent(path, broken)
    yield Sent(path, raw, {"content-type": PROMPT})
    yield Sent(path, raw, {"x-request-class": PROMPT})
    yield Sent(path, raw, {"authorization": f"Basic {base64.b64encode(KEY.encode()).decode()}"})
    yield Sent(f"{path}?key={KEY}&q={PROMPT}", raw)


def odd(path: str) -> Iterator[Sent]:
    """Odd fields, in whole answers and in streams."""
    for fields in ODD:
        for stream in (False, True):
            yield Sent(path, json.dumps({**body(path), "stream": stream, **fields}).encode())


def elsewhere() -> Iterator[Sent]:
    """Where nobody would look for words of a person."""
    for path in ("/v1/models/", "/", "/v1/chat/completions/", "/llmctl/status?token="):
        yield Sent(f"{path}{PROMPT}{KEY}", b"", method="GET")
    for command in ("switch", "unload", "restart", "drain"):
        yield Sent(f"/llmctl/{command}", json.dumps({"preset": PROMPT, "model": PROMPT, "presets": [PROMPT]}).encode())
    yield Sent("/v1/chat/completions", b"{}", {"host": PROMPT})
    yield Sent("/v1/chat/completions", b"{}", {"origin": f"http://{PROMPT}"})
    yield Sent("/v1/chat/completions", PROMPT.encode(), method=PROMPT.upper())


def send(client: Client, sent: Iterator[Sent] | Sequence[Sent], *, admin: bool = False) -> set[int]:
    """Send all of them, with the key; returns the statuses that came."""
    keys = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "cookie": f"key={KEY}", "content-type": "application/json"}
    statuses = set()
    with client.admin if admin else client.http as http:
        for each in sent:
            given = {name: value for name, value in keys.items() if not (admin and name == "authorization")}
            with contextlib.suppress(httpx2.RemoteProtocolError):  # a stream that was cut
                statuses.add(http.request(each.method, each.path, content=each.body, headers=given | each.headers).status_code)
    return statuses


def garble(client: Client) -> None:
    """What isn't HTTP."""
    host, _, port = client.address.removeprefix("http://").rpartition(":")
    for raw in (
        f"{PROMPT} {KEY}\r\n\r\n",
        f"POST / HTTP/1.1\r\n{PROMPT}\r\n{KEY}: \0\r\n\r\n",
        f"GET /{KEY} HTTP/9.{PROMPT}\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as door:
            door.sendall(raw.encode())
            while door.recv(65536):
                pass


@contextlib.contextmanager
def slow_stream(client: Client, path: str) -> Iterator[None]:
    """One that is being answered, and has a record."""
    fields = {"fake": SLOW, "max_tokens": 100_000, "max_output_tokens": 100_000, "n_predict": 100_000}
    given = {"authorization": f"Bearer {KEY}"}
    with (
        contextlib.suppress(httpx2.RemoteProtocolError, httpx2.ReadError),
        client.http as http,
        http.stream("POST", path, json=body(path, stream=True) | fields, headers=given) as reply,
    ):
        pieces = reply.iter_raw()  # held: one that is let go of closes the reply
        assert (reply.status_code, bool(next(pieces))) == (200, True)
        until(lambda: is_open(client.box))
        yield
        del pieces


def is_open(box: Box) -> bool:
    """Whether the ledger has a record that isn't closed, which no command lists."""
    with contextlib.closing(sqlite3.connect(f"file:{box.home.ledger}?mode=ro", uri=True)) as file:
        (count,) = file.execute("SELECT count(*) FROM requests WHERE status = 'open'").fetchone()
    return bool(count)


def others(box: Box) -> None:
    """Presets for the routes that ``tiny`` doesn't serve, and one that steps down at its first start."""
    box.preset("words", kind="embedding", pooling="mean")
    box.preset("order", kind="rerank", pooling="rank")
    box.preset("small", context=2048, fallback=[{"context": 1024}])


def kill(client: Client) -> None:
    """As a power cut."""
    client.process.kill()
    client.process.wait(WAIT_S)


@pytest.fixture
def cores() -> Iterator[None]:
    """What dies may leave a dump of its memory, as on a machine of a developer; whoever starts llmctl may have allowed it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


# The search itself


def test_every_route_has_a_person_s_words() -> None:
    assert set(BODIES) == set(ROUTES)
    for path in ROUTES:
        assert PROMPT in json.dumps(body(path))


@pytest.mark.parametrize("name", NEEDLES)
def test_what_is_in_a_file_is_found(tmp_path: Path, name: str) -> None:
    file = tmp_path / "state" / "logs" / "deep.log"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * 100_000)
    assert in_files(tmp_path) == []
    file.write_bytes(b"x" * 100_000 + NEEDLES[name] + b"x")
    assert any(f": {name}: " in each for each in in_files(tmp_path))


def test_what_is_encoded_within_more_is_found(tmp_path: Path) -> None:
    for number in range(6):
        header = base64.b64encode(f"{'u' * number}:{KEY}:tail".encode())
        (tmp_path / "header").write_bytes(header)
        assert in_files(tmp_path), header


def test_a_file_s_name_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / PROMPT).mkdir()
    assert in_files(tmp_path)


# The fake engine


@pytest.fixture(scope="module")
def served(module_fake_box: Boxes) -> Client:
    """One that answers with a word of its own."""
    box = module_fake_box(tokens=4, text=f"says {ANSWER} twice", healthy_requests=1)
    others(box)
    return box.up("--set", "slots=2", "--log-format", "json")


@pytest.mark.parametrize("path", ROUTES)
def test_a_route_keeps_nothing(served: Client, path: str) -> None:
    statuses = send(served, of_route(path))
    assert {200, 400, 404, 415} <= statuses, statuses
    send(served, odd(path))
    assert in_files(served.box.root) == []
    assert found_in(served) == []


def test_what_is_for_no_route_keeps_nothing(served: Client) -> None:
    assert send(served, elsewhere()) & {401, 403, 404}
    assert send(served, elsewhere(), admin=True) & {400, 404}
    garble(served)
    assert found_in(served) == []


@pytest.mark.parametrize("path", [path for path, route in ROUTES.items() if route.decodes and route.kind == "chat"])
def test_while_it_is_in_work_nothing_is_kept(served: Client, path: str) -> None:
    with slow_stream(served, path):
        assert found_in(served) == []
    assert found_in(served) == []


def test_what_is_told_to_who_listens_is_kept_nowhere_and_has_no_key(served: Client) -> None:
    with served.admin as http, http.stream("GET", "/llmctl/texts") as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith(":")
        path = "/v1/chat/completions"
        assert send(served, [Sent(path, json.dumps(body(path)).encode())]) == {200}
        told = next(line for line in lines if line.startswith("data: "))
        assert PROMPT in told
        assert KEY not in told
        assert found_in(served) == []
    assert found_in(served) == []


@pytest.mark.parametrize("form", FORMATS)
def test_deaths_and_a_step_down_keep_nothing(fake_box: Boxes, cores: None, form: str) -> None:
    box = fake_box(tokens=4, text=f"says {ANSWER} twice", healthy_requests=1, oom_above_ctx=1024)
    others(box)
    client = box.up("--set", "context=1024", "--log-format", form)
    for path, streamed in (("/v1/chat/completions", False), ("/v1/messages", True)):
        dying = body(path, stream=streamed, fake={"die_after_tokens": 2, "die_exit": -6})
        send(client, [Sent(path, json.dumps(dying).encode())])
        for failing in ("error_after_tokens", "cut_after_tokens"):
            dying = body(path, stream=True, fake={failing: 2})
            send(client, [Sent(path, json.dumps(dying).encode())])
        assert in_files(box.root) == []
    assert client.presets()["tiny"]["restarts"] >= 3
    small = Sent("/v1/chat/completions", json.dumps(body("/v1/chat/completions", model="small")).encode())
    assert send(client, [small]) == {200}
    assert client.presets()["small"]["memory"]["given_up"]
    assert found_in(client) == []


def test_an_engine_s_words_are_not_taken_into_our_log(fake_box: Boxes) -> None:
    """Some of its errors quote the answer (common/chat.cpp:67)."""
    says = {"code": 500, "message": f"Invalid diff: '{ANSWER} {PROMPT}' not found at start of '{ANSWER}'", "type": "server_error"}
    client = fake_box(tokens=4, healthy_requests=1, error_body=says).up()
    for failing in ({"error_status": 500}, {"error_after_tokens": 1}):
        for stream in (False, True):
            fields = body("/v1/chat/completions", stream=stream, fake=failing)
            send(client, [Sent("/v1/chat/completions", json.dumps(fields).encode())])
    assert found_in(client) == []


def test_an_engine_s_last_words_are_told_without_a_request_s(fake_box: Boxes) -> None:
    """Its log quotes a malformed tool; whoever asks why it died is somebody else."""
    quote = json.dumps(
        {"error": {"code": 500, "message": f"Failed to parse tools: Missing tool type: {PROMPT}", "type": "server_error"}}
    )
    last = f"0.01.783.815 W srv    operator(): got exception: {quote}\n{fakes.CUDA_ABORT}"
    client = fake_box(tokens=4, healthy_requests=1, die_log=last).up()
    dying = body("/v1/chat/completions", fake={"die_after_tokens": 0})
    send(client, [Sent("/v1/chat/completions", json.dumps(dying).encode())])
    until(lambda: client.presets()["tiny"]["restarts"] and client.presets()["tiny"]["state"] == "ready")
    assert "CUDA" in client.presets()["tiny"]["cause"]
    assert found_in(client) == []


def test_killed_in_the_middle_it_leaves_nothing(fake_box: Boxes, cores: None) -> None:
    box = fake_box(tokens=4, text=f"says {ANSWER} twice", healthy_requests=1)
    client = box.up()
    with slow_stream(client, "/v1/chat/completions"):
        kill(client)
        assert in_files(box.root) == []
    until(lambda: rundir.read(box.home.run) is None)
    again = box.up()
    assert found_in(again) == []
    assert [row["status"] for row in box.records()] == ["interrupted"]


def test_an_aborted_llmctl_leaves_no_dump(fake_box: Boxes, cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lie in the folder in which it was started."""
    box = fake_box(tokens=4, healthy_requests=1)
    box.root.mkdir(parents=True)
    monkeypatch.chdir(box.root)
    client = box.up()
    with slow_stream(client, "/v1/chat/completions"):
        client.process.send_signal(signal.SIGABRT)
        client.process.wait(WAIT_S)
    assert in_files(box.root) == []


# The real engine


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, real_engine: engine.Engine, tiny_model: Path) -> Iterator[Client]:
    """Two slots of 512 tokens; its own log lies in the home, too."""
    box = Box(tmp_path_factory.mktemp("canary") / "home", real_engine.server, tiny_model)
    box.preset("words", kind="embedding", pooling="mean", context=512, threads=1)
    yield box.up(*(word for each in ("threads=1", "slots=2", "context=1024", "max_tokens=8") for word in ("--set", each)))
    box.close()


REAL: Final = NEEDLES | {"a token of the prompt": f" {WHOLE}".encode(), "a token, quoted": f"{WHOLE}'".encode()}


@pytest.mark.parametrize("path", [path for path in ROUTES if path not in ("/infill", "/v1/rerank")])
def test_the_real_engine_keeps_nothing(real: Client, path: str) -> None:
    """``tiny`` has no tokens to fill in with, and ranks nothing."""
    statuses = send(real, of_route(path))
    assert {200, 400, 404, 415} <= statuses, statuses
    assert found_in(real, REAL) == []


def test_what_the_real_engine_quotes_is_known(real: Client) -> None:
    """A limit that the README names. Where one of these no longer holds, take it off the list."""
    path = "/v1/chat/completions"
    faulty = ({"tools": [PROMPT]}, {"json_schema": {"pattern": PROMPT}}, {"grammar": f"root ::= {PROMPT}"})
    send(real, [Sent(path, json.dumps({**body(path), **fields}).encode()) for fields in faulty])
    log = (real.box.home.logs / "tiny.log").read_bytes()
    for what, quote in QUOTES.items():
        assert any(PROMPT.encode() in each for each in re.findall(rb"(?m)^" + quote + rb"$", log)), what
    assert found_in(real, REAL) == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_the_real_engine_keeps_nothing_of_what_is_odd(real: Client, path: str) -> None:
    send(real, odd(path))
    assert found_in(real, REAL) == []


def test_the_real_engine_killed_in_the_middle_leaves_nothing(
    cores: None, tmp_path: Path, real_engine: engine.Engine, tiny_model: Path
) -> None:
    box = Box(tmp_path / "home", real_engine.server, tiny_model)
    with contextlib.closing(box):
        client = box.up("--set", "threads=1")
        with slow_stream(client, "/v1/chat/completions"):
            os.kill(client.child_pid(), signal.SIGABRT)
            until(lambda: client.presets()["tiny"]["restarts"])
        assert in_files(box.root, REAL) == []
        until(lambda: client.presets()["tiny"]["state"] == "ready")
        with slow_stream(client, "/v1/chat/completions"):
            kill(client)
        assert in_files(box.root, REAL) == []
        assert found_in(box.up("--set", "threads=1"), REAL) == []


def test_logs_llmctl_of_a_detached_one_has_nothing(fake_box: Boxes) -> None:
    box = fake_box(tokens=4, text=f"says {ANSWER} twice", healthy_requests=1)
    done: subprocess.CompletedProcess[str] = box.llmctl(
        "up", "tiny", "--port", "0", "--model", str(box.model), "--detach", "--json", "--log-format", "json"
    )
    assert done.returncode == 0, done.stderr
    with httpx2.Client(base_url=json.loads(done.stdout)["address"], timeout=WAIT_S) as http:
        for each in of_route("/v1/chat/completions"):
            given = {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | each.headers
            http.post(each.path, content=each.body, headers=given)
    assert told(box, ("logs", "llmctl", "-n", "100000"), *COMMANDS) == []
    assert box.llmctl("down", "--now").returncode == 0
    assert in_files(box.root) == []
