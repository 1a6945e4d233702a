"""The error class, and what the command line makes of it: one sentence, a ``try:`` line, an exit code, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from supervisor import cli
from supervisor.errors import Error, Exit


def test_exit_codes_are_the_documented_ones() -> None:
    """Scripts rely on them."""
    assert {code.name: code.value for code in Exit} == {
        "OK": 0,
        "USAGE": 2,
        "CONFIG": 3,
        "NO_FIT": 4,
        "ENGINE": 5,
        "MODEL": 6,
        "BUSY": 7,
        "CHILD": 8,
    }


def test_an_error_says_what_it_is_to_a_person_and_to_a_debugger() -> None:
    error = Error("port 8080 is taken", exit=Exit.BUSY, hint="--port 8081")
    assert str(error) == error.message == "port 8080 is taken"
    assert repr(error) == "<Error BUSY 'port 8080 is taken'>"
    assert (error.status, error.code, error.retry_after_s, error.retry) == (500, "internal_error", None, None)


def run(monkeypatch: pytest.MonkeyPatch, raised: BaseException, *words: str) -> int:
    """``llmctl WORDS version`` in this process, with a command that raises; its exit code."""

    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(sys, "argv", ["llmctl", *words, "version"])
    monkeypatch.setattr("supervisor.commands.version.command", click.Command("version", callback=fail))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(str(ended.value.code))


@pytest.mark.parametrize("code", [code for code in Exit if code is not Exit.OK])
def test_an_error_becomes_a_sentence_a_try_line_and_its_exit_code(
    code: Exit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, Error("it is broken", exit=code, hint="llmctl mend")) == code
    assert capsys.readouterr() == ("", "error: it is broken\ntry: llmctl mend\n")


def test_without_a_hint_there_is_no_try_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, Error("it is broken", exit=Exit.CHILD)) == 8
    assert capsys.readouterr().err == "error: it is broken\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    error = Error("it is broken", exit=Exit.CHILD)
    monkeypatch.setattr(cli.sys, "argv", ["llmctl", "--debug", "version"])
    monkeypatch.setattr("supervisor.commands.version.command", click.Command("version", callback=lambda: _raise(error)))
    with pytest.raises(Error) as raised:
        cli.main()
    assert raised.value is error


def _raise(error: BaseException) -> None:
    raise error


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, click.Abort()) == 130


def test_a_reader_that_left_is_no_error(tmp_path: Path) -> None:
    """``llmctl presets | head``: exit code 0 and not a word on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "presets", "--json"],
        env=os.environ | {"LLMCTL_HOME": str(tmp_path)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def llmctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command line in this process, in an empty home; its exit code."""
    monkeypatch.setenv("LLMCTL_HOME", str(tmp_path))
    monkeypatch.delenv("LLMCTL_ENGINE", raising=False)

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["llmctl", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(str(ended.value.code))

    return call


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["up", "tinny"],
            Exit.CONFIG,
            ["error: there is no preset 'tinny'; there are: balanced_9b, cpu_fallback, tiny, turbo_4b", "try: llmctl up tiny"],
        ),
        (["up", "tiny", "--set", "slot=2"], Exit.CONFIG, ["error: --set slot: there is no such option", "try: --set slots=…"]),
        (["up", "tiny", "--host", "0.0.0.0"], Exit.USAGE, ["error: ", "try: "]),
        (["up", "tiny"], Exit.ENGINE, ["error: ", "try: llmctl build"]),
        (["logs"], Exit.USAGE, ["error: ", "try: "]),
    ],
)
def test_bad_input_gets_two_lines(
    words: list[str], code: Exit, said: list[str], llmctl: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong preset is said first, whatever else is missing."""
    assert llmctl(*words) == code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == len(said), err
    assert all(line.startswith(begin) for line, begin in zip(lines, said, strict=True)), err
    assert out == ""


@pytest.mark.parametrize("words", [["fly"], ["up"], ["up", "tiny", "--port", "x"], ["--flag"]])
def test_wrong_usage_is_2(words: list[str], llmctl: Callable[..., int]) -> None:
    assert llmctl(*words) == Exit.USAGE


def test_every_command_is_there_and_has_help() -> None:
    group = cli.llmctl
    assert isinstance(group, click.Group)
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.help
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.hidden or parameter.help, f"{name} {parameter.name}"
