"""The command line is thin: commands are modules, imported when asked for. Exit codes and error lines are in ``test_errors``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from supervisor import cli


def test_help_and_version_load_no_web_server() -> None:
    code = (
        "import sys; from supervisor import cli; sys.argv = ['llmctl', 'version']; cli.main(); "
        "print(*sorted({'uvicorn', 'starlette', 'httpx2', 'pynvml'} & set(sys.modules)), sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1:] == [""]


def test_help_lists_the_commands_in_the_order_a_newcomer_meets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["llmctl", "-h"])
    cli.main()
    listed = capsys.readouterr().out.partition("Commands:\n")[2]
    assert [line.split()[0] for line in listed.splitlines() if line[2:3].strip()] == list(cli.COMMANDS)
