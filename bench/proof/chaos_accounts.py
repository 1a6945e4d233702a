"""The reckoning at the end of a box: what its clients had, what its ledger says, what the fake engine did, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections import Counter
from typing import Any, Final

import psutil

from bench.proof.chaos_box import BACK_S, LOOK_S, PRESET, PROBE_S, Box
from bench.proof.chaos_traffic import DYING_S, TEXT, End, unmatched
from bench.proof.visit import visit
from supervisor import accounts
from supervisor.argv import SOCKET
from tests import fakes

DIED: Final = ("engine_died", "engine_crashed")
"""The codes of an answer that a child took along. One that waits while its preset is given up hears another."""
KILLED_S: Final = 1.0
"""A connection that llmctl's death cut has been seen to end by then."""


async def settle(box: Box) -> None:
    """Let what is under way end, look at the slots, take llmctl down, and reconcile client, ledger and engine."""
    findings = box.findings
    box.traffic.open.clear()
    if not await box.until(lambda: sum(box.traffic.flying.values()) == 0, BACK_S):
        findings.blame("every request ends", f"{box.traffic.flying} are under way still")
    await _slots(box)
    if box.listener is not None:
        box.listener.cancel()  # a drain waits for it as for any request
    try:
        await box.command("down")
    except (RuntimeError, subprocess.TimeoutExpired) as problem:
        findings.blame("down takes it down", str(problem)[:500])
    await asyncio.sleep(LOOK_S * 5)
    left = left_behind(box)
    if left:
        findings.blame("no orphan", f"left after down: {left}", len(left))
    _outcomes(box)
    _ledger(box)
    if box.fake:
        _journal(box)


async def _slots(box: Box) -> None:
    socket = box.house.home.run / PRESET / SOCKET
    busy: list[Any] = []
    for _ in range(20):  # a slot is free within one batch of its client's leaving
        try:
            answer = await visit(str(socket), "/slots", longest_s=PROBE_S)
            busy = [slot for slot in json.loads(answer.body) if slot["is_processing"]]
        except (OSError, TimeoutError, ValueError) as problem:
            busy = [f"/slots: {problem!r}"]
        if not busy:
            break
        await asyncio.sleep(0.5)
    if busy:
        box.findings.blame("no stuck slot", f"busy at the end: {busy}"[:500], len(busy))
    try:
        told = json.loads(await box.command("status", "--json"))["presets"]
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as problem:
        box.findings.blame("no stuck slot", str(problem)[:500])
        return
    for each in told:
        if each["slots"]["busy"] or each["waiting"]:
            box.findings.blame("no stuck slot", f"llmctl says {each}"[:500])


def left_behind(box: Box) -> list[str]:
    """Processes that run from this home, and files in its run folder."""
    run, found = box.house.home.run, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("HOME", "").startswith(str(run)):
                found.append(f"{process.pid} {process.cmdline()}"[:200])
    return found + ([str(path) for path in run.rglob("*")] if run.exists() else [])


def _outcomes(box: Box) -> None:
    findings = box.findings
    for outcome in box.traffic.outcomes:
        findings.ends[outcome.end.value] += 1
        if outcome.end is End.TOLD:
            findings.told[f"{outcome.status} {outcome.code}"] += 1
        what = f"{outcome.request.name}: {outcome.end.value}, {outcome.status} {outcome.code} {outcome.said[-60:]!r}"
        when = f"{outcome.asked_s:.3f} to {outcome.ended_s:.3f}"
        if outcome.end in (End.LIE, End.GARBLED):
            findings.blame("no clean end of a cut answer", f"{what}, {when}")
        elif outcome.end is End.CUT and not any(
            outcome.asked_s - DYING_S <= at <= outcome.ended_s + KILLED_S for at in box.kills_s
        ):
            findings.blame("no connection is lost without a word", f"{what}, {when}")
        elif outcome.end is End.MUTE:
            findings.blame("an error has its envelope", f"{what}, {when}")
        elif outcome.end is End.STUCK:
            findings.blame("every request ends", f"{what}, {when}")
        elif outcome.end is End.TOLD and outcome.silent and outcome.code in DIED and not outcome.request.fake:
            ended = [life for life in box.lives if life.ended_s and outcome.asked_s <= life.ended_s <= outcome.ended_s]
            if len(ended) <= 1 and outcome.status in (200, 500, 502):
                findings.blame("what had no answer yet outlives a child", f"{what}, {when}")


def _ledger(box: Box) -> None:
    rows = list(accounts.records(box.house.home.ledger, 10_000_000))
    box.findings.records.update(row["status"] for row in rows)
    if still := sum(row["status"] == "open" for row in rows):
        box.findings.blame("every record is closed", f"{still} are open", still)
    for bursts in (False, True):
        mine = [each for each in box.traffic.outcomes if (each.request.route == TEXT) is bursts]
        due = [each.statuses(box.kills_s) for each in mine]
        seen = Counter(row["status"] for row in rows if (row["route"] == TEXT) is bursts)
        for said in unmatched(due, seen):
            box.findings.blame("one record a request", f"{'bursts' if bursts else 'clients'}: {said}")


def _journal(box: Box) -> None:
    """The fake engine's tasks: each ended, by itself or with its process, and whoever was answered was so by one that was done."""
    begun: dict[tuple[int, int], str] = {}
    ends: dict[tuple[int, int], str] = {}
    dead: set[int] = set()
    with (box.server.parent / fakes.JOURNAL).open() as file:
        for line in file:
            row = json.loads(line)
            if row["event"] == "request" and row["path"].endswith("completions"):
                begun[row["pid"], row["id"]] = _user(row["body"])
            elif row["event"] in ("finished", "client_closed"):
                ends[row["pid"], row["id"]] = row.get("how") or "client gone"
    dead = {life.pid for life in box.lives if life.ended_s is not None}
    done: Counter[str] = Counter()
    for task, name in begun.items():
        end = ends.get(task) or ("died" if task[0] in dead or not psutil.pid_exists(task[0]) else "none")
        box.findings.tasks[end] += 1
        if end == "none":
            box.findings.blame("every task of the engine ends", f"{task} {name}")
        if end == "done":
            done[name] += 1
    for outcome in box.traffic.outcomes:
        if outcome.end is End.OK and not done[outcome.request.name]:
            box.findings.blame("no clean end of a cut answer", f"{outcome.request.name} is ok, and no task of it was done")
    box.findings.tasks["requests answered twice"] = sum(count > 1 for count in done.values())


def _user(body: str) -> str:
    found = re.search(r'"user": ?"([^"]*)"', body)
    return found[1] if found else ""
