"""A running llmctl's events on the terminal, until what was asked of it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from supervisor import render
from supervisor.errors import Error, Exit

COARSE: Final = 100
"""Steps of the bar."""
ENDED: Final = ("stopped", "failed")


def until_ready(name: str, events: Iterable[dict[str, Any]]) -> None:
    """Show how its start goes, until it is ready. Raises :class:`Error` with the cause when not: exit code 4 no room for it, 8 it fails.

    The first events are the present states, read after the order was given: what it failed of before is not among them.
    """
    with render.progress() as progress:
        for event in events:
            state = event["state"]
            if state == "draining":
                progress(f"{event['preset']} ends its requests", 0, 0)
            if event["preset"] != name:
                continue
            if state == "ready":
                return
            if state == "starting":
                progress(f"loading {name}", int(event.get("loaded", 0) * COARSE), COARSE)
            elif state in ("failed", "stopped") and "cause" in event:
                raise Error(f"{name} is not running: {event['cause']}", exit=Exit(event["exit"]), hint=event["try"])


def until_ended(left: set[str], events: Iterable[dict[str, Any]]) -> None:
    """Show that these end, until all have."""
    with render.progress() as progress:
        for event in events:
            if event["preset"] in left and event["state"] in ENDED:
                left.discard(event["preset"])
            if not left:
                return
            progress(f"{' and '.join(sorted(left))} ends its requests", 0, 0)
