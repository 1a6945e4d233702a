"""Engines: reading --version, --help and manifests; which one runs; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor import engine, paths
from supervisor.engine import Engine
from supervisor.errors import Error, Exit

VERSION = "version: 0.5.0 (build 11312, commit 0c1e57098)\nbuilt with GNU 12.2.0 for Linux x86_64\n"
HELP = """----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
--perf, --no-perf                       whether to enable internal libllama performance timings (default:
                                        false)
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-lv,   --verbosity, --log-verbosity N   --not-a-flag stands in the text
                                        - 0: generic output
"""


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def server(path: Path, build: int = 11312) -> Path:
    return script(path, f"echo 'version: 0.5.0 (build {build}, commit 0c1e57098)' >&2")


def store(home: paths.Home, key: str, *, build: int = 11312, built_at: str = "2026-01-01T00:00:00Z") -> Engine:
    binary = server(home.engines / key / engine.SERVER, build)
    made = Engine(binary, key, "cpu", build, "0c1e57098", sha256={engine.SERVER: engine.sha256(binary)}, built_at=built_at)
    (binary.parent / engine.MANIFEST).write_text(json.dumps(engine.manifest(made)))
    return made


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path)})


def test_version() -> None:
    assert engine.parse_version(VERSION) == engine.Version("0.5.0", 11312, "0c1e57098")
    assert engine.parse_version("version: 6789 (abcdef12)\n") == engine.Version("", 6789, "abcdef12")
    assert engine.parse_version("version: 0.6.0-dev (build 0, commit unknown)") == engine.Version("0.6.0-dev", 0, "unknown")
    assert engine.parse_version("Python 3.11.7") is None


def test_help() -> None:
    assert engine.parse_help(HELP) == {
        *("-h", "--help", "--usage", "--version", "-t", "--threads", "--perf", "--no-perf"),
        *("-fa", "--flash-attn", "-lv", "--verbosity", "--log-verbosity"),
    }


def test_pin() -> None:
    pin = engine.pin()
    assert (pin.build, pin.commit[:9]) == (11312, "0c1e57098")
    assert [build for build in range(10735, 10755) if pin.refusal(build)] == list(range(10741, 10749))


def test_no_engine(home: paths.Home) -> None:
    with pytest.raises(Error, match="no engine yet") as caught:
        engine.locate(home, {})
    assert (caught.value.exit, caught.value.hint) == (Exit.ENGINE, "llmctl build")


def test_the_named_engine_wins(home: paths.Home, tmp_path: Path) -> None:
    store(home, "aaaa")
    engine.use(home, "aaaa")
    assert engine.locate(home, {}).key == "aaaa"
    found = engine.locate(home, {"LLMCTL_ENGINE": str(server(tmp_path / "else" / "llama-server", 12000))})
    assert (found.key, found.build, found.known) == ("external", 12000, False)
    assert engine.locate(home, {"LLMCTL_ENGINE": str(server(tmp_path / "same"))}).known


def test_a_named_engine_is_asked_its_version_once_and_again_when_it_changes(home: paths.Home, tmp_path: Path) -> None:
    """Every swap plans anew while a request waits for it."""
    asked = tmp_path / "asked"
    one = script(tmp_path / "llama-server", f"echo x >>{asked}; echo 'version: 0.5.0 (build 11312, commit 0c1e57098)'")
    for _ in range(2):
        assert engine.locate(home, {"LLMCTL_ENGINE": str(one)}).build == 11312
    assert asked.read_text() == "x\n"
    server(one, 12000)
    assert engine.locate(home, {"LLMCTL_ENGINE": str(one)}).build == 12000


@pytest.mark.parametrize("build", [10741, 10748])
def test_a_denied_build_is_refused(home: paths.Home, tmp_path: Path, build: int) -> None:
    with pytest.raises(Error, match=rf"b{build} .* must not be used: .*MTP") as caught:
        engine.locate(home, {"LLMCTL_ENGINE": str(server(tmp_path / "llama-server", build))})
    assert caught.value.exit is Exit.ENGINE
    store(home, "bbbb", build=build)
    with pytest.raises(Error, match="must not be used"):
        engine.use(home, "bbbb")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo hello", "is not a llama-server: --version says 'hello'"),
        ("exit 0", "--version says 'nothing'"),
        ("echo no libfoo >&2; exit 3", "ended with 3: no libfoo"),
        ("kill -ILL $$", "compiled for another CPU"),
    ],
)
def test_not_a_server(home: paths.Home, tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(Error, match=message):
        engine.locate(home, {"LLMCTL_ENGINE": str(script(tmp_path / "llama-server", body))})


def test_missing_and_not_executable(home: paths.Home, tmp_path: Path) -> None:
    with pytest.raises(Error, match="does not exist"):
        engine.locate(home, {"LLMCTL_ENGINE": str(tmp_path / "nowhere")})
    (tmp_path / "text").write_text("x")
    with pytest.raises(Error, match="is not executable"):
        engine.locate(home, {"LLMCTL_ENGINE": str(tmp_path / "text")})


def test_capabilities_follow_the_file(tmp_path: Path) -> None:
    binary = script(tmp_path / "llama-server", "echo '-fa,  --flash-attn X   text'")
    one = Engine(binary, "k", "cpu", 1, "c")
    assert engine.capabilities(one) == {"-fa", "--flash-attn"}
    script(tmp_path / "fresh", "echo '--jinja   text'").replace(binary)
    assert engine.capabilities(one) == {"--jinja"}


def test_the_store(home: paths.Home) -> None:
    assert engine.installed(home) == []
    old, new = store(home, "aaaa1", built_at="2026-01-01T00:00:00Z"), store(home, "aabb2", built_at="2026-02-01T00:00:00Z")
    (home.engines / ".new-cccc").mkdir()
    assert engine.installed(home) == [new, old]
    assert engine.current(home) is None
    assert engine.use(home, "aaa") == old
    assert engine.current(home) == "aaaa1"
    with pytest.raises(Error, match="2 engines begin with 'aa'"):
        engine.use(home, "aa")
    with pytest.raises(Error, match="no engine is called 'zz'"):
        engine.remove(home, "zz")
    engine.remove(home, "aaaa1")
    assert (engine.installed(home), engine.current(home)) == ([new], None)


def test_a_damaged_engine_is_named(home: paths.Home) -> None:
    made = store(home, "aaaa")
    assert engine.damaged(made) == []
    made.server.write_text("something else")
    assert engine.damaged(made) == [engine.SERVER]
    (made.folder / engine.MANIFEST).write_text("{")
    assert engine.installed(home) == []
    with pytest.raises(Error, match="holds no engine"):
        engine.read(made.folder)


def test_clean_env() -> None:
    env = engine.clean_env(
        {"PATH": "/bin", "LLAMA_ARG_CTX_SIZE": "1", "GGML_X": "1", "AIP_HTTP_PORT": "1", "CUDA_VISIBLE_DEVICES": "0"}
    )
    assert env == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "XDG_CONFIG_HOME": "/nonexistent"}


def test_tool(home: paths.Home) -> None:
    with pytest.raises(Error, match="has no llama-bench"):
        store(home, "aaaa").tool("llama-bench")
