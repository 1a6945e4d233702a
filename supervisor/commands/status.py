"""``llmctl status``: what runs, asked of the running llmctl itself."""

from __future__ import annotations

from typing import Any

import click

from supervisor import paths, render, rundir
from supervisor.running import Running


@click.command("status", short_help="Show what runs, and the memory it took.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """Show the running presets: state, process, slots, restarts, and the cause of the last end."""
    instance = rundir.read(paths.home().run)
    if instance is None:
        render.as_json({"address": None, "presets": []}) if as_json else render.say("nothing runs")
        return
    found = Running(instance).get("/llmctl/status")
    if as_json:
        render.as_json(found)
        return
    render.out(f"{found['address']}/v1  pid {found['pid']}  engine {found['engine']}")
    columns = ("preset", "state", "pid", "busy", "slots", "waiting", "restarts", "cause")
    rows = [
        (p["name"], p["state"], p["pid"], p["slots"]["busy"], p["slots"]["total"], p["waiting"], p["restarts"], p["cause"])
        for p in found["presets"]
    ]
    render.table(columns, rows)
    for each in found["presets"]:
        if each["memory"] is not None:
            render.out("")
            _show_memory(each["name"], each["memory"])


def _show_memory(name: str, memory: dict[str, Any]) -> None:
    """What was planned beside what the engine allocated, for the terms that it names."""
    for sentence in memory["given_up"]:
        render.out(f"given up: {sentence}")
    planned, seen = memory["planned_mib"], memory["allocated_mib"]
    if seen is None:
        return
    rows = []
    for place, title in (("device", memory["device"]), ("host", "host")):
        plans, has = planned[place], seen[place]
        for term in (term for term in plans if term in has):
            plan = plans[term] + (
                plans["scratch"] if term == "compute" and place == "device" else 0
            )  # the engine's line has both
            rows.append((term, title, round(plan), round(has[term]), f"{has[term] - plan:+.1f}"))
    render.table(("memory, MiB", "of", "planned", "allocated", "difference"), rows, title=name)
