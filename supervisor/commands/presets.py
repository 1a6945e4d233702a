"""``llmctl presets``: what can be served, and on which machine."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any, Final

import click

from supervisor import paths, preset, render, store
from supervisor.errors import Error, Exit
from supervisor.paths import Home
from supervisor.preset import Preset
from supervisor.profile import NAMED
from supervisor.units import size
from supervisor.words import quoted

WIDTH: Final = 80
"""Of the list: a narrow terminal's."""


@click.command("presets")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """List the presets: the shipped ones, and your own, which win by name."""
    home = paths.home()
    found: list[Preset] = []
    broken = [
        Error(f"{path.parent}: a preset's file can't be called {quoted(path.name)}", exit=Exit.CONFIG, hint=NAMED)
        for path in preset.misnamed(home)
    ]
    for name in preset.names(home):
        try:
            found.append(preset.load(name, home))
        except Error as error:
            broken.append(error)
    if as_json:
        render.as_json({"presets": [as_dict(each, home) for each in found], "broken": [problem.message for problem in broken]})
        return
    for each in found:
        render.out(f"{each.name}\n{_text(each, home)}\n")
    if any(each.context_name or each.mode_name for each in found):
        render.out("* where nothing else is asked for")
    for problem in broken:
        render.error(problem)


def _text(found: Preset, home: Home) -> str:
    """What a person chooses by, indented."""
    count = f", {size(found.model.bytes)}" if found.model.bytes else ""
    lines = (
        found.about,
        found.machine and f"for {found.machine}",
        f"{found.model.file}{count}{', here' if store.have(home, found.model) else ', not fetched yet'}",
        f"--context {', '.join(_marked(found.contexts, found.context_name))}" if found.contexts else f"{found.context:,} tokens",
        found.modes and f"--mode {', '.join(_marked(found.modes, found.mode_name))}",
    )
    return "\n".join(
        textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in lines
        if line
    )


def as_dict(found: Preset, home: Home) -> dict[str, Any]:
    """One preset of ``presets --json``."""
    return {
        "name": found.name,
        "about": found.about,
        "machine": found.machine,
        "kind": found.kind,
        "model": dataclasses.asdict(found.model),
        "have": store.have(home, found.model),
        "context": found.context,
        "slots": found.slots,
        "contexts": list(found.contexts),
        "modes": list(found.modes),
        "default_context": found.context_name,
        "default_mode": found.mode_name,
    }


def _marked(names: tuple[str, ...], chosen: str) -> list[str]:
    """The names, the one that holds by itself with a star."""
    return [f"{name}*" if name == chosen else name for name in names]
