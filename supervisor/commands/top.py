"""``llmctl top``: what runs and what it does, live. What is drawn is in ``dashboard``; here it is asked for, and the terminal is kept.

llmctl is asked once an interval over one kept connection. The last requests are read from the ledger's file, which costs it nothing.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import click

from supervisor import accounts, paths, render, rundir
from supervisor.errors import Error, Exit
from supervisor.glance import SPAN_S, Glance, History, Rates, Tokens
from supervisor.paths import Home
from supervisor.record import Record, columns
from supervisor.running import ANSWER_S, Running

if TYPE_CHECKING:
    from rich.console import Console

    from supervisor.dashboard import Scene

ROUTE: Final = "/llmctl/top"
SNAPSHOT_ENDED: Final = 10
"""Requests that ended last, in a single picture."""
ANEW_POLL_S: Final = 0.1
"""How often to see whether an llmctl that was started anew has its address yet."""


@click.command("top", short_help="Watch what runs, live.")
@click.option(
    *("--interval", "interval_s"),
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.1, 60),
    metavar="SECONDS",
    help="From one look to the next.",
)
@click.option("--once", is_flag=True, help="One picture as plain text, as where there is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def command(interval_s: float, once: bool, as_json: bool) -> None:
    """Show tokens per second, slots, who waits, memory, power, what is in work and what ended last; q or Ctrl-C leaves."""
    home = paths.home()
    running = Running.of(home)
    if as_json:
        render.as_json(_as_json(home, running, interval_s))
        return
    from rich.console import Console

    console = Console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        _snapshot(home, running, interval_s, console)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(home, running, interval_s, console)


def _as_json(home: Home, running: Running, interval_s: float) -> dict[str, Any]:
    """The second of two answers, with what both say together, and the last requests as ``usage --records --json`` has them."""
    with running.polling(ROUTE) as ask:
        before = ask()
        time.sleep(interval_s)
        answer = ask()
    rates = Rates.between(Glance.read(before), Glance.read(answer))
    of_each = rates.by_preset if rates else {}
    return {
        **answer,
        "over_s": rates and round(rates.over_s, 3),
        "cpu_share": rates and round(rates.cpu_share, 4),
        "tokens_per_s": _per_s(rates.all if rates else None),
        "presets": [{**each, "tokens_per_s": _per_s(of_each.get(each["name"]))} for each in answer["presets"]],
        "ended": _ended(home, SNAPSHOT_ENDED, len(answer["in_work"])),
    }


def _per_s(tokens: Tokens | None) -> dict[str, float] | None:
    if tokens is None:
        return None
    return {"prompt": round(tokens.prompt, 2), "completion": round(tokens.completion, 2)}


def _ended(home: Home, count: int, in_work: int) -> list[dict[str, Any]]:
    """The requests that ended last, the last one first, as ``usage --records --json`` has them."""
    rows = [row for row in accounts.records(home.ledger, count + in_work) if row["status"] != "open"]
    return sorted(rows, key=lambda row: (row["closed_at"], row["seq"]), reverse=True)[:count]


def _snapshot(home: Home, running: Running, interval_s: float, console: Console) -> None:
    """The second of two looks, as text."""
    from supervisor import dashboard

    with contextlib.closing(_scenes(home, running, SNAPSHOT_ENDED)) as scenes:
        next(scenes)
        time.sleep(interval_s)
        width = console.width if console.is_terminal else render.PLAIN_WIDTH
        render.out(dashboard.plain(next(scenes), width, marks=_marks(console)))


def _marks(console: Console) -> str:
    from supervisor import dashboard

    return dashboard.BLOCKS if console.encoding.startswith("utf") else dashboard.ASCII


def _scenes(home: Home, running: Running, ended: int) -> Generator[Scene, None, None]:
    """A look each time that the next one is asked for; it goes on with an llmctl that was started anew. Raises :class:`Error`."""
    note = ""
    while True:
        try:
            yield from _of_one(home, running, ended, note)
        except Error as problem:
            running = _successor(home, running, problem)
            note = f"llmctl was started anew (pid {running.instance.process.pid}): what is shown begins there"


def _of_one(home: Home, running: Running, count: int, note: str) -> Generator[Scene, None, None]:
    """The looks at one llmctl, until it doesn't answer: then :class:`Error`."""
    from supervisor.dashboard import Scene

    made, prompts = History(), History()
    before: Glance | None = None
    until_s = time.monotonic() + SPAN_S
    with running.polling(ROUTE) as ask:
        while True:
            glance = Glance.read(ask())
            rates = Rates.between(before, glance) if before else None
            if rates is not None:
                made.add(glance.at_s, rates.over_s, rates.all.completion)
                prompts.add(glance.at_s, rates.over_s, rates.all.prompt)
            told = note if time.monotonic() < until_s else ""
            try:
                ended = tuple(
                    Record(**{name: row[name] for name in columns(Record)}) for row in _ended(home, count, len(glance.in_work))
                )
            except Error as problem:
                ended, told = (), problem.message
            yield Scene(glance, rates, made, prompts, ended, time.time(), told)
            before = glance


def _successor(home: Home, running: Running, problem: Error) -> Running:
    """Who runs in its place, once it can be asked. Raises ``problem`` when it runs still, else that it has ended."""
    until_s = time.monotonic() + ANSWER_S
    while True:
        found = rundir.read(home.run)
        if found is None:
            gone = running.instance
            hint = f"llmctl up {gone.presets[0]}" if gone.presets else "llmctl up tiny"
            raise Error(f"llmctl (pid {gone.process.pid}) has ended", exit=Exit.BUSY, hint=hint) from problem
        if found.process == running.instance.process or time.monotonic() > until_s:
            raise problem
        if found.address:
            return Running(found)
        time.sleep(ANEW_POLL_S)


def _watch(home: Home, running: Running, interval_s: float, console: Console) -> None:
    """Draw a look after the other until the person leaves."""
    from supervisor import dashboard
    from supervisor.screen import Screen

    marks = _marks(console)
    with contextlib.closing(_scenes(home, running, dashboard.ENDED)) as scenes, Screen(console) as screen:
        while True:
            due_s = time.monotonic() + interval_s
            screen.show(functools.partial(dashboard.draw, next(scenes), marks=marks))
            if not screen.wait(due_s):
                return
