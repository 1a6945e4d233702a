"""The launcher sets the death signal, sees that the parent is still there, and becomes the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor import launcher

PDEATHSIG = (
    "import ctypes; got = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(got)); print(got.value)"  # PR_GET_PDEATHSIG
)


def launch(parent: int, *command: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-I", "-S", launcher.__file__, str(parent), *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_it_becomes_the_program_with_its_arguments_and_exit_code() -> None:
    done = launch(os.getpid(), "/bin/sh", "-c", 'echo "$0|$1|$2"; exit 7', "a b", "", "ü")
    assert (done.returncode, done.stdout, done.stderr) == (7, "a b||ü\n", "")


def test_the_program_has_the_death_signal() -> None:
    assert launch(os.getpid(), sys.executable, "-I", "-c", PDEATHSIG).stdout == "9\n"


def test_a_parent_that_died_before_is_noticed_and_the_program_never_runs(tmp_path: Path) -> None:
    """The death signal was set too late for it: our real parent is not the one that asked."""
    mark = tmp_path / "ran"
    done = launch(os.getppid(), "/bin/sh", "-c", f"touch {mark}")
    assert (done.returncode, done.stderr) == (1, "error: the parent ended before its child began\n")
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["missing", "not executable", "not a program", "folder"])
def test_a_program_that_can_not_be_started_is_one_line(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    if kind == "folder":
        program.mkdir()
    elif kind != "missing":
        program.write_text("\x7fELF? no")
        program.chmod(0o755 if kind == "not a program" else 0o644)
    done = launch(os.getpid(), str(program))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {program} can't be started: ")
    assert done.stderr.count("\n") == 1


def test_it_imports_nothing_of_ours_and_little_of_pythons() -> None:
    """It stands in front of every start."""
    code = (
        "import sys, runpy; before = set(sys.modules); sys.argv = ['x', '0', 'y']\n"
        f"try: runpy.run_path({launcher.__file__!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(len(set(sys.modules) - before), 'supervisor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    count, ours = done.stdout.split()
    assert int(count) < 40
    assert ours == "False"
