"""What the commands that measure have in common: who is measured, served for as long as it takes, and what becomes of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from supervisor import paths, render, rundir
from supervisor.errors import Error, Exit
from supervisor.order import Order
from supervisor.running import Running

if TYPE_CHECKING:
    from bench.result import Result
    from bench.run import Order as Measurement
    from bench.target import Target

CTRL_C: Final = 130


@contextlib.contextmanager
def subjects(order: Order | None, urls: tuple[str, ...], key: str) -> Iterator[tuple[Target, ...]]:
    """Those that are to be measured, served for as long as the block runs where nobody serves them yet."""
    import asyncio

    from bench import target

    home = paths.home()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_interruptible())
        wanted = [(*_place(url), key, False) for url in urls]
        if order is not None:
            wanted.insert(0, (stack.enter_context(_served(home, order)), order.name, "", True))
        elif not wanted:
            running = Running.of(home)  # says what to try where nothing runs
            wanted.insert(0, (running.instance.address, "", "", True))
        with render.progress() as progress:

            async def find() -> list[Target]:
                return [
                    await target.find(url, model=model, key=of, home=home if ours else None, progress=progress)
                    for url, model, of, ours in wanted
                ]

            found = asyncio.run(find())
        yield _named(found)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Whatever asks for an end is Ctrl-C while the block runs, also where whoever started us ignores that: what was begun is ended."""

    def end(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _place(url: str) -> tuple[str, str]:
    """``http://host:port#model``."""
    place, _, model = url.partition("#")
    return place, model


def _named(found: list[Target]) -> tuple[Target, ...]:
    """Each with a name of its own."""
    import dataclasses

    names: list[str] = []
    for each in found:
        count = sum(name.partition(" (")[0] == each.name for name in names)
        names.append(f"{each.name} ({count + 1})" if count else each.name)
    return tuple(dataclasses.replace(each, name=name) for each, name in zip(found, names, strict=True))


@contextlib.contextmanager
def _served(home: paths.Home, order: Order) -> Iterator[str]:
    """The address at which a preset is served while the block runs: that of the llmctl that runs, or of one that is started for it."""
    running = rundir.read(home.run)
    if running is not None:
        if order.words() != [order.name]:
            raise Error(
                f"llmctl runs already (pid {running.process.pid}), and {order.name} is to be measured in another way than it serves",
                exit=Exit.BUSY,
                hint="llmctl down",
            )
        _ = order.preset  # says which there are
        yield running.address
        return
    llmctl = [sys.executable, "-m", "supervisor"]
    started = subprocess.run(
        [*llmctl, "up", *order.words(), "--port", "0", "--detach", "--json"], stdout=subprocess.PIPE, check=False
    )
    if started.returncode:
        raise click.exceptions.Exit(started.returncode)  # it has said why
    try:
        yield json.loads(started.stdout)["address"]
    finally:
        subprocess.run([*llmctl, "down", "--now"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def measure(order: Measurement, out: Path | None, *, as_json: bool) -> Result:
    """Measure, keep, show. Ctrl-C keeps what was measured whole."""
    import uvloop

    from bench import page, result, show, workload
    from bench.run import Run

    path = out or _path(order)
    names = " and ".join(target.name for target in order.targets)
    render.say(f"{names} by {workload.told(order.workload)}; {order.requests()} requests")
    stopped = False
    with render.progress() as progress:
        measuring = Run(order, progress=progress, say=render.say)
        try:
            uvloop.run(measuring.measure())
        except KeyboardInterrupt:
            stopped = True
    found, samples = measuring.result(), measuring.samples
    if not samples:
        render.say("it was ended before anything was measured whole")
        raise click.exceptions.Exit(CTRL_C)
    try:
        result.write(found, samples, page.render(found, samples), path)
    finally:  # what took so long is at least shown
        if as_json:
            render.as_json({"file": str(path), **found.as_dict()})
        else:
            show.result(found, path)
    if stopped:
        render.say("it was ended before its end: what is here was measured whole")
        raise click.exceptions.Exit(CTRL_C)
    return found


def check_place(out: Path | None, suffix: str) -> None:
    """Raise :class:`Error` (exit code 2) for a file that can't be made there, before anything takes its time."""
    if out is None:
        return
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    hint = f"--out run{suffix}"
    if not out.name.endswith(suffix):
        raise Error(f"--out is {out}, but should end in {suffix}", exit=Exit.USAGE, hint=hint)
    if os.path.lexists(out):
        raise Error(f"--out is {out}, which is there already", exit=Exit.USAGE, hint=f"{hint}, or remove it")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise Error(f"--out is {out}, but nothing can be written in {folder}", exit=Exit.USAGE, hint=hint)


def _path(order: Measurement) -> Path:
    stamp = f"{datetime.now():%Y-%m-%dT%H-%M-%S}"
    plain = re.sub(r"[^\w.-]+", "-", f"{stamp}-{order.targets[0].name}-{order.workload.name}")
    numbered = (f"{plain}{f'-{number}' if number else ''}.json" for number in itertools.count())
    return next(path for name in numbered if not (path := paths.home().bench / name).exists())
