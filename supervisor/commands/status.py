"""``llmctl status``: what runs, asked of the running llmctl itself."""

from __future__ import annotations

from typing import Any

import click
import httpx2

from supervisor import paths, render, rundir
from supervisor.errors import Error, Exit


@click.command("status", short_help="Show what runs, and the memory it took.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """Show the running presets: state, process, slots, restarts, and the cause of the last end."""
    running = rundir.read(paths.home().run)
    if running is None:
        render.as_json({"address": None, "presets": []}) if as_json else render.say("nothing runs")
        return
    found = _ask(running)
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


def _ask(running: rundir.Instance) -> dict[str, Any]:
    try:
        reply = httpx2.get(
            f"{running.address}/llmctl/status", headers={"Authorization": f"Bearer {running.token}"}, timeout=5.0, trust_env=False
        )
        reply.raise_for_status()
        found = reply.json()
    except (httpx2.HTTPError, httpx2.InvalidURL) as exc:
        raise Error(
            f"llmctl (pid {running.process.pid}) doesn't answer at {running.address or 'any address yet'}: {exc}",
            exit=Exit.BUSY,
            hint="llmctl logs llmctl",
        ) from exc
    assert isinstance(found, dict)
    return found
