"""The command line is thin: commands are modules, imported when asked for. Exit codes and error lines are in ``test_errors``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor import cli

HEAVY = {"uvicorn", "starlette", "httpx2", "pynvml", "pydantic", "asyncio", "rich", "sqlite3", "ssl"}
"""Each takes as long to import as everything that these commands do."""


@pytest.mark.parametrize(
    "words", [("version",), ("plan", "turbo_4b", "--gpu", "rtx3070", "--json"), ("show", "tiny", "--json"), ("schema",)]
)
def test_what_only_looks_loads_no_web_server(tmp_path: Path, words: tuple[str, ...]) -> None:
    code = (
        f"import sys; from supervisor import cli; sys.argv = ['llmctl', *{words!r}]; cli.main(); "
        f"print(*sorted({HEAVY!r} & set(sys.modules)), sep=',', file=sys.stderr)"
    )
    env = {**os.environ, "LLMCTL_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout
    assert done.stderr == "\n"


def test_help_lists_the_commands_in_the_order_a_newcomer_meets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["llmctl", "-h"])
    cli.main()
    listed = capsys.readouterr().out.partition("Commands:\n")[2]
    assert [line.split()[0] for line in listed.splitlines() if line[2:3].strip()] == list(cli.COMMANDS)
