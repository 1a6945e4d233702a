"""``llmctl switch``: have another preset up, without dropping a request."""

from __future__ import annotations

import click

from supervisor import following, paths, render
from supervisor.running import Running


@click.command("switch", short_help="Have another preset up in place of what runs.")
@click.argument("name", metavar="PRESET")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(name: str, as_json: bool) -> None:
    """Have PRESET up. What doesn't fit beside it ends its requests first; those that come meanwhile are held, not refused."""
    running = Running.of(paths.home())
    asked = running.post("/llmctl/switch", {"preset": name})
    if asked["state"] != "ready":
        with running.events() as events:
            following.until_ready(name, events)
    if as_json:
        render.as_json({"preset": name, "state": "ready", "address": running.instance.address})
    else:
        render.say(f"{name} is ready at {running.instance.address}/v1")
