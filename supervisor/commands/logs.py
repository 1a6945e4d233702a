"""``llmctl logs``: the engine's own words, and llmctl's where it runs detached."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TextIO

import click

from supervisor import paths, render, rundir
from supervisor.errors import Error, Exit
from supervisor.units import MIB

POLL_S = 0.2
OWN = "llmctl"
"""The log of the detached llmctl itself; no preset may be called so."""
MOST_BYTES = 4 * MIB


@click.command("logs", short_help="Print the end of a log.")
@click.argument("name", metavar="[PRESET]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as it grows; Ctrl-C ends.")
@click.option("-n", "--lines", default=50, show_default=True, type=click.IntRange(min=0), help="How many of the last lines.")
@click.option("--json", "as_json", is_flag=True, help="The file's path and lines as JSON.")
def command(name: str | None, follow: bool, lines: int, as_json: bool) -> None:
    """Print the end of a log: PRESET's engine (default: the one that wrote last), or `llmctl` for the detached llmctl itself."""
    home = paths.home()
    folder = home.logs
    path = folder / f"{name}.log" if name else _newest(folder)
    if path is None or not path.is_file():
        raise _none(name, home)
    if as_json and follow:
        raise click.UsageError("--follow has no --json")
    file = path.open(errors="replace")
    file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
    told = file.read().splitlines()
    last = told[-lines:] if lines else []
    if as_json:
        render.as_json({"file": str(path), "lines": last})
        return
    for line in last:
        render.out(line)
    if follow:
        try:
            _follow(path, file)
        except KeyboardInterrupt:
            return


def _none(name: str | None, home: paths.Home) -> Error:
    """There is no such log: it was never begun, or deleted, or its folder was full. A running engine begins one with its next start."""
    known = sorted(found.stem for found in home.logs.glob("*.log"))
    running = rundir.read(home.run)
    if name == OWN:
        hint = "llmctl down, then llmctl up with --detach" if running else "llmctl up tiny --detach"
    elif running and (name is None or name in running.presets):
        hint = f"llmctl restart {name or running.presets[0]}"
    else:
        hint = f"llmctl logs {known[0]}" if known else "llmctl up tiny"
    there_are = f"there are: {', '.join(known)}" if known else "there are none yet"
    return Error(f"there is no log of {name or 'any preset'} in {home.logs}; {there_are}", exit=Exit.USAGE, hint=hint)


def _newest(folder: Path) -> Path | None:
    """The log of the engine that wrote last."""
    engines = (path for path in folder.glob("*.log") if path.stem != OWN)
    return max(engines, key=lambda path: path.stat().st_mtime, default=None)


def _follow(path: Path, file: TextIO) -> None:
    """Print what is appended, through rotations: a new file under the name is read from its start, as one that was emptied."""
    while True:
        if line := file.readline():
            render.out(line.rstrip("\n"))
            continue
        time.sleep(POLL_S)
        if os.fstat(file.fileno()).st_size < file.tell():  # it was emptied in place
            file.seek(0)
        if path.exists() and not path.samefile(f"/proc/self/fd/{file.fileno()}"):
            file.close()
            file = path.open(errors="replace")
