"""``llmctl restart``: start engines anew, without dropping a request."""

from __future__ import annotations

import click

from supervisor import following, paths, render
from supervisor.running import Running


@click.command("restart", short_help="Start engines anew, without dropping a request.")
@click.argument("name", metavar="[PRESET]", required=False)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(name: str | None, as_json: bool) -> None:
    """Start PRESET's engine anew when the requests in work have ended, or that of every preset that runs or was given up.

    It is planned anew for the memory there is then, from its file as it is then, with nothing given up. Requests that come meanwhile wait.
    What `llmctl drain` holds goes on.
    """
    running = Running.of(paths.home())
    asked = running.post("/llmctl/restart", {"preset": name} if name else {})["presets"]
    names = [each["preset"] for each in asked]
    for each in names:
        with running.events() as events:
            following.until_ready(each, events)
    if as_json:
        render.as_json({"presets": [{"preset": each, "state": "ready"} for each in names]})
    elif names:
        render.say(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} ready")
    else:
        render.say("no engine runs; the next request starts one")
