"""``llmctl drain``: stop engines without refusing anybody, to have the machine for oneself."""

from __future__ import annotations

import click

from supervisor import following, paths, render
from supervisor.running import Running


@click.command("drain", short_help="Stop engines and hold their requests until llmctl restart.")
@click.argument("name", metavar="[PRESET]", required=False)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(name: str | None, as_json: bool) -> None:
    """Stop PRESET's engine, or all, when the requests in work have ended. Those that come wait, up to their preset's max_wait.

    For a game, an upgrade of the driver, a look at the card: nobody is refused. `llmctl restart` lets them go on.
    """
    running = Running.of(paths.home())
    asked = running.post("/llmctl/drain", {"preset": name} if name else {})["presets"]
    left = {each["preset"] for each in asked if each["state"] not in following.ENDED}
    if left:
        with running.events() as events:
            following.until_ended(left, events)
    names = [each["preset"] for each in asked]
    if as_json:
        render.as_json({"presets": [{"preset": each, "state": "stopped"} for each in names]})
    else:
        again = f"llmctl restart {name}" if name else "llmctl restart"
        render.say(f"{' and '.join(names) or 'nothing'} runs no more; requests wait, {again} lets them go on")
