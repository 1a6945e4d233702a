"""``llmctl down``: stop what runs, and clear away what a killed llmctl left."""

from __future__ import annotations

import signal
import time
from typing import Final

import click

from supervisor import paths, render, rundir
from supervisor.errors import Error, Exit
from supervisor.rundir import Process

STOP_S: Final = 15.0
"""Beyond the drain: a child's stop takes at most 7 s, then it is killed."""
POLL_S: Final = 0.02
PRESS_S: Final = 0.3


@click.command("down", short_help="Stop what runs.")
@click.option("--now", is_flag=True, help="Cut running requests instead of letting them end.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(now: bool, as_json: bool) -> None:
    """Stop the running llmctl: no new requests, those in work may end within 30 s."""
    home = paths.home()
    running = rundir.read(home.run)
    if running is None:
        swept = rundir.clear(home.run)
        said = "nothing runs; cleared what a killed llmctl had left" if swept else "nothing runs"
        render.as_json({"stopped": False, "cleared": swept}) if as_json else render.say(said)
        return
    from supervisor import serve  # a web server: only where there is one to wait for

    running.process.signal(signal.SIGTERM)
    if not _gone(running.process, STOP_S + (0 if now else serve.DRAIN_S), press=now):
        running.process.signal(signal.SIGKILL)
        if not _gone(running.process, STOP_S):
            raise Error(f"llmctl (pid {running.process.pid}) can't be killed", exit=Exit.CHILD, hint="restart the machine")
        rundir.clear(home.run)
    if as_json:
        render.as_json({"stopped": True, "presets": list(running.presets)})
    else:
        render.say(f"{', '.join(running.presets)} stopped")


def _gone(process: Process, patience_s: float, *, press: bool = False) -> bool:
    """Wait for its end. ``press`` repeats the signal: a second one forces, but two that are pending together count as one."""
    began = pressed = time.monotonic()
    while process.alive():
        now = time.monotonic()
        if now - began > patience_s:
            return False
        if press and now - pressed > PRESS_S:
            process.signal(signal.SIGTERM)
            pressed = now
        time.sleep(POLL_S)
    return True
