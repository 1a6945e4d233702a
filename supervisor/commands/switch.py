"""``llmctl switch``: have another preset up, without dropping a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from supervisor import paths, render
from supervisor.errors import Error, Exit
from supervisor.running import Running

COARSE = 100
"""Steps of the bar."""


@click.command("switch", short_help="Have another preset up in place of what runs.")
@click.argument("name", metavar="PRESET")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(name: str, as_json: bool) -> None:
    """Have PRESET up. What doesn't fit beside it ends its requests first; those that come meanwhile are held, not refused."""
    running = Running.of(paths.home())
    asked = running.post("/llmctl/switch", {"preset": name})
    if asked["state"] != "ready":
        with running.events() as events:
            _follow(name, events)
    if as_json:
        render.as_json({"preset": name, "state": "ready", "address": running.instance.address})
    else:
        render.say(f"{name} is ready at {running.instance.address}/v1")


def _follow(name: str, events: Iterable[dict[str, Any]]) -> None:
    """Show how its start goes. Raises :class:`Error` with the cause when it comes to nothing: exit code 4 no room for it, 8 it fails.

    The first events are the present states, read after the order was given: what it failed of before is not among them.
    """
    with render.progress() as progress:
        for event in events:
            state = event["state"]
            if event["preset"] != name:
                if state == "draining":
                    progress(f"{event['preset']} ends its requests", 0, 0)
                continue
            if state == "ready":
                return
            if state == "starting":
                progress(f"loading {name}", int(event.get("loaded", 0) * COARSE), COARSE)
            elif state in ("failed", "stopped") and "cause" in event:
                raise Error(f"{name} is not running: {event['cause']}", exit=Exit(event["exit"]), hint=event["try"])
