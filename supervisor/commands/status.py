"""``llmctl status``: what runs, asked of the running llmctl itself."""

from __future__ import annotations

from typing import Any, Final

import click

from supervisor import glance, paths, render, rundir
from supervisor.running import Running
from supervisor.units import duration

COLUMNS: Final = ("preset", "state", "pid", "busy", "slots", "waiting", "restarts", "MiB used", "planned")


@click.command("status", short_help="Show what runs, and the memory it took.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """Show the running presets: state, process, slots, restarts, memory, and the cause of the last end."""
    instance = rundir.read(paths.home().run)
    if instance is None:
        render.as_json({"address": None, "presets": []}) if as_json else render.say("nothing runs")
        return
    found = Running(instance).get("/llmctl/status")
    if as_json:
        render.as_json(found)
        return
    render.out(f"{found['address']}/v1  pid {found['pid']}  engine {found['engine']}")
    render.table(COLUMNS, [_row(each) for each in found["presets"]])
    if found["records_lost"]:
        render.out(f"\n{found['records_lost']:,} records of requests could not be kept: the disk takes none")
        render.out("try: free some room on it, and llmctl usage")
    for each in found["presets"]:
        _show_guessing(each)
    for each in found["presets"]:
        _show_end(each)
    for each in found["presets"]:
        if each["pid"] is not None and each["memory"] is not None:
            _show_memory(each["name"], each["memory"])


def _row(preset: dict[str, Any]) -> tuple[object, ...]:
    used, planned = _memory(preset)
    slots = preset["slots"]
    return (
        *(preset["name"], _state(preset), preset["pid"], slots["busy"], slots["total"]),
        *(preset["waiting"], preset["restarts"], used, planned),
    )


def _state(preset: dict[str, Any]) -> str:
    """Its state, and what comes of it."""
    state, again_s, loaded = str(preset["state"]), preset["try_again_s"], preset["loaded"]
    if loaded:
        state += f", {loaded:.0%} read"
    if again_s is not None:
        state += f", again in {_about(again_s)}"
    return state + ", held" if preset["held"] else state


def _about(seconds: float) -> str:
    """Whole minutes where there are some: nobody counts the seconds of ten minutes."""
    return f"{round(seconds / 60)} min" if seconds >= 90 else duration(seconds)


def _memory(preset: dict[str, Any]) -> tuple[int | None, int | None]:
    """MiB that it has now, and of the plan, in whole: of the card, or of the machine where it has none.

    Of the machine's memory what is its own is told. The file of the model, which it shares with the page cache, is in the plan only.
    """
    memory = preset["memory"]
    if memory is None or preset["pid"] is None:
        return None, None
    return preset["used_mib"]["card" if glance.has_a_card(memory) else "host"], glance.planned_mib(memory)


def _show_guessing(preset: dict[str, Any]) -> None:
    """How well it guesses ahead, and why by another way than the preset's own."""
    guessing = preset["speculative"]
    if guessing["method"] is None or guessing["method"] == guessing["asked"] == "off":
        return
    share = guessing["acceptance"]
    told = "it has guessed nothing yet" if share is None else f"{share:.0%} of its late guesses were right"
    why = f" ({guessing['why']})" if guessing["why"] else ""
    method = guessing["method"]
    render.out(
        f"\n{preset['name']} " + ("guesses nothing ahead" if method == "off" else f"guesses ahead by {method}: {told}") + why
    )


def _show_end(preset: dict[str, Any]) -> None:
    """Why its engine ended last, and while it is down for that, what it said last."""
    if preset["cause"] is None:
        return
    if preset["pid"] is not None:
        ago = preset["died_s_ago"]
        when = f" {duration(ago)} ago" if ago is not None else ""
        render.out(f"\n{preset['name']} ended{when}: {preset['cause']}")
        return
    render.out(f"\n{preset['name']} is down: {preset['cause']}")
    if preset["try"]:
        render.out(f"try: {preset['try']}")
    if preset["log"]:
        render.out(f"{preset['name']} said last:")
        for line in preset["log"]:
            render.out(f"    {line}")


def _show_memory(name: str, memory: dict[str, Any]) -> None:
    """What was given up, and what was planned beside what the engine allocated, for the terms that it names."""
    for at, sentence in enumerate(memory["given_up"]):
        render.out(f"{'' if at else chr(10)}{name} gave up: {sentence}")
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
    render.out("")
    render.table(("memory, MiB", "of", "planned", "allocated", "difference"), rows, title=name)
