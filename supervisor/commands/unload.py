"""``llmctl unload``: give a preset's memory back, and go on serving."""

from __future__ import annotations

import click

from supervisor import paths, render
from supervisor.running import Running


@click.command("unload", short_help="Give a preset's memory back; its next request starts it again.")
@click.argument("name", metavar="PRESET")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(name: str, as_json: bool) -> None:
    """Stop PRESET's engine when the requests in work have ended. The next request for it starts it again."""
    asked = Running.of(paths.home()).post("/llmctl/unload", {"preset": name})
    if as_json:
        render.as_json(asked)
    else:
        done = {"stopped": "is not loaded", "draining": "ends its requests, then it is unloaded"}
        render.say(f"{name} {done.get(asked['state'], 'is being unloaded')}")
