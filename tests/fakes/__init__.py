"""Stand-ins for what llmctl runs: a llama-server with knobs, and a model file it may be given.

>>> server = fakes.install(tmp_path / "engine", load_s=0.1, die_after_tokens=3)   # an executable named llama-server
>>> fakes.events(tmp_path / "engine", "start")[0]["argv"]                          # what it was started with, and what happened
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from tests.fakes.knobs import CUDA_ABORT, CUDA_OOM, NAMES

__all__ = ["CUDA_ABORT", "CUDA_OOM", "events", "install", "tune", "wait_event"]

JOURNAL = "journal.jsonl"
TOLD = {"version": " >&2", "help": ""}
"""What the wrapper answers by itself, and where to: every start asks for both, and Python takes 0.2 s to say so."""


def install(folder: Path, **knobs: Any) -> Path:
    """Write an executable ``llama-server`` into ``folder`` with these :class:`~tests.fakes.knobs.Knobs`; its journal lies beside.

    The knobs sit in a file and not in the environment, since llmctl passes none on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tune(folder, **knobs)
    script = Path(__file__).with_name("llama_server.py")
    words = [sys.executable, "-I", str(script), "--fake-knobs", str(folder / "knobs.json")]
    wrapper = folder / "llama-server"
    told = "".join(f'*" --{name} "*) cat {shlex.quote(str(folder / name))}{to}; exit ;;\n' for name, to in TOLD.items())
    wrapper.write_text(f'#!/bin/sh\ncase " $* " in\n{told}esac\nexec {shlex.join(words)} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


def tune(folder: Path, **knobs: Any) -> None:
    """Change an installed fake's knobs, all of them; the next start reads them. Each file is replaced whole: one may be starting now."""
    if unknown := knobs.keys() - NAMES:
        raise TypeError(f"no such knob: {', '.join(sorted(unknown))}")
    from tests.fakes import llama_server

    _replace(folder / "knobs.json", json.dumps({**knobs, "journal": str(folder / JOURNAL)}))
    _replace(folder / "help", llama_server.help_text(knobs.get("hide_flags", [])))
    _replace(folder / "version", llama_server.VERSION)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def events(folder: Path, kind: str | None = None, **match: Any) -> list[dict[str, Any]]:
    """The journal of every fake started from ``folder``, oldest first: of one kind, with fields equal to ``match``."""
    path = folder / JOURNAL
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if kind in (None, row["event"]) and match.items() <= row.items()]


def wait_event(folder: Path, kind: str, *, count: int = 1, timeout_s: float = 60.0, **match: Any) -> dict[str, Any]:
    """The ``count``-th event of a kind, as soon as it is there. Looks at a file every 5 ms; AssertionError after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while len(found := events(folder, kind, **match)) < count:
        assert time.monotonic() < until, f"no {kind} {match or ''} within {timeout_s} s; journal: {events(folder)}"
        time.sleep(0.005)
    return found[count - 1]
