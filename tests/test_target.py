"""Who is asked: what kind of server it is, what is known of it, and how it counts."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from pathlib import Path
from typing import Any

import pytest

from bench import here, target
from bench.result import Kind
from bench.target import Target
from supervisor import paths
from supervisor.errors import Error, Exit
from tests.conftest import Client
from tests.fakes import peers
from tests.fakes.peers import Peer

HI = [{"role": "user", "content": "Text of it"}]


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path)})


def found(url: str, home: paths.Home, **more: Any) -> Target:
    return asyncio.run(target.find(url, home=home, **more))


def refusal(url: str, home: paths.Home, **more: Any) -> Error:
    with pytest.raises(Error) as caught:
        found(url, home, **more)
    return caught.value


@pytest.mark.parametrize(
    ("routes", "kind", "version"),
    [
        (peers.vllm("m"), Kind.VLLM, "0.11.0"),
        (peers.ollama("m"), Kind.OLLAMA, "0.12.3"),
        (peers.openai("m"), Kind.OPENAI, ""),
    ],
)
def test_each_kind_is_known_by_what_only_it_answers(routes: Any, kind: Kind, version: str, home: paths.Home) -> None:
    with Peer(routes).served() as peer:
        this = found(peer.url, home)
    assert (this.kind, this.model, this.name) == (kind, "m", f"{kind} m")
    assert (this.subject.kind, this.subject.version, this.subject.url) == (kind.value, version, peer.url)


def test_vllm_counts_by_its_tokenizer_and_others_by_a_requests_usage(home: paths.Home) -> None:
    for routes, has_tokenizer in ((peers.vllm("m"), True), (peers.ollama("m"), False)):
        with Peer(routes).served() as peer:
            this = found(peer.url, home)
            assert asyncio.run(this.count("Text of it")) == (3 if has_tokenizer else None)
            assert asyncio.run(this.count_chat(HI)) == len(peers.chat_tokens(HI))
            completions = [body for path, body in peer.asked if path == "/v1/chat/completions" and body["messages"] == HI]
            assert [body["max_tokens"] for body in completions] == ([] if has_tokenizer else [1])


@pytest.mark.parametrize("told", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_an_address_may_be_written_as_clients_write_it(told: str, home: paths.Home) -> None:
    with Peer(peers.openai("m")).served() as peer:
        for url in (peer.url, peer.url.removeprefix("http://")):
            assert found(told.format(url), home).url == peer.url


def test_a_model_is_the_one_that_is_asked_for_else_the_first(home: paths.Home) -> None:
    with Peer(peers.ollama("llama:latest", "qwen:1b")).served() as peer:
        assert found(peer.url, home).model == "llama:latest"
        assert found(peer.url, home, model="qwen:1b").model == "qwen:1b"
        assert found(peer.url, home, model="llama").model == "llama"
        error = refusal(peer.url, home, model="qwen:2b")
    assert error.exit == Exit.USAGE
    assert error.message == f"{peer.url} has no model 'qwen:2b'; it has: llama:latest, qwen:1b"
    assert error.hint == f"--url {peer.url}#qwen:1b"


def test_a_key_is_sent_and_shown_nowhere(home: paths.Home) -> None:
    with Peer(peers.vllm("m"), key="sesame").served() as peer:
        this = found(peer.url, home, key="sesame")
        assert asyncio.run(this.count("Text")) == 1
        assert "sesame" not in repr(this)
        without, wrong = refusal(peer.url, home), refusal(peer.url, home, key="x")
    assert without.message == f"{peer.url} wants an API key (401)"
    assert wrong.message == f"{peer.url} refuses the key it was given (401)"
    assert (without.exit, without.hint) == (Exit.USAGE, "--key-env NAME")


def test_what_cannot_be_asked_is_said(home: paths.Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    assert refusal(f"127.0.0.1:{port}", home).exit == Exit.BUSY
    for nonsense in ("ftp://x", "http://", "http://x:y", ""):
        assert refusal(nonsense, home).message == f"{nonsense!r} is no address of a server"
    loading = peers.openai("m") | {"/v1/models": lambda _: (503, {"error": {"message": "Loading model"}})}
    with Peer(loading).served() as peer:
        error = refusal(peer.url, home)
        assert (error.exit, error.message) == (Exit.BUSY, f"{peer.url} isn't ready: Loading model")
    for answer in ((404, "no"), (200, "<html>"), (200, [])):
        with Peer({"/v1/models": lambda _, answer=answer: answer}).served() as peer:  # type: ignore[misc]
            error = refusal(peer.url, home)
            assert error.exit == Exit.USAGE
            assert "doesn't speak OpenAI's API" in error.message
    with Peer(peers.openai()).served() as peer:
        assert refusal(peer.url, home).message == f"{peer.url} has no model"


def test_a_port_that_speaks_something_else_is_no_server(home: paths.Home) -> None:
    async def go() -> Error:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(Error) as caught:
                await target.find(f"127.0.0.1:{port}", home=home)
        return caught.value

    error = asyncio.run(go())
    assert error.exit == Exit.USAGE
    assert "doesn't speak HTTP" in error.message


def test_a_command_line_is_kept_without_its_secrets() -> None:
    argv = ["llama-server", "--api-key", "sesame", "-m", "a.gguf", "--hf-token=sesame", "-hft", "sesame"]
    kept = here._without_secrets(argv)
    assert kept == ("llama-server", "--api-key", "***", "-m", "a.gguf", "--hf-token=***", "-hft", "***")


def test_a_files_checksum_is_worked_out_once(home: paths.Home, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    said: list[tuple[str, int, int]] = []
    for data, reports in ((b"one", 1), (b"one", 1), (b"other", 2)):
        if not file.exists() or file.read_bytes() != data:
            file.write_bytes(data)
        digest = here.sha256(file, home, lambda *told: said.append(told))
        assert (digest, len(said)) == (hashlib.sha256(data).hexdigest(), reports)


def test_a_llama_server_of_this_machine_is_known_to_its_file(engine_server: Any, tiny_model: Path, home: paths.Home) -> None:
    this = found(str(engine_server.base_url), home)
    subject = this.subject
    assert (this.kind, subject.file, subject.slots, subject.context) == (Kind.LLAMA_CPP, tiny_model.name, 2, 2048)
    assert subject.sha256 == hashlib.sha256(tiny_model.read_bytes()).hexdigest()
    assert subject.argv[1:3] == ("-m", str(tiny_model))
    assert subject.engine.startswith("b")
    assert len(this.pids) == 1
    assert asyncio.run(this.count_chat(HI)) == asyncio.run(this.used("/v1/chat/completions", {"messages": HI}))


def test_an_llmctl_is_known_to_its_childs_command_line(tiny: Client, tiny_model: Path, home: paths.Home) -> None:
    told = [found(tiny.address, home), found(tiny.address, tiny.box.home)]
    for this in told:
        subject = this.subject
        assert (this.kind, this.name, subject.preset) == (Kind.LLMCTL, "tiny", "tiny")
        assert (subject.slots, subject.context, subject.file) == (2, 2048, tiny_model.name)
        assert subject.sha256 == hashlib.sha256(tiny_model.read_bytes()).hexdigest()
        assert "--api-key" not in subject.argv
        assert set(this.pids) == {tiny.process.pid, tiny.child_pid()}
        assert asyncio.run(this.count_chat(HI)) == asyncio.run(this.used("/v1/chat/completions", {"messages": HI}))
    assert told[0].subject.engine.split(" ")[0] == told[1].subject.engine.split(" ")[0]
