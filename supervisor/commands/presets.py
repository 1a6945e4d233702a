"""``llmctl presets``: what can be served."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from supervisor import paths, preset, render, store
from supervisor.errors import Error
from supervisor.paths import Home
from supervisor.preset import Preset
from supervisor.units import size


@click.command("presets")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """List the presets: the shipped ones, and your own, which win by name."""
    home = paths.home()
    found, broken = [], []
    for name in preset.names(home):
        try:
            found.append(preset.load(name, home))
        except Error as error:
            broken.append(error)
    if as_json:
        render.as_json({"presets": [as_dict(each, home) for each in found], "broken": [problem.message for problem in broken]})
        return
    rows = [
        (
            each.name,
            each.model.file,
            size(each.model.bytes) if each.model.bytes else None,
            "yes" if store.have(home, each.model) else "no",
            ", ".join(_marked(each.contexts, each.context_name)) or f"{each.context}",
            ", ".join(_marked(each.modes, each.mode_name)) or None,
            each.about,
        )
        for each in found
    ]
    render.table(("preset", "model", "size", "here", "contexts", "modes", "about"), rows)
    for problem in broken:
        render.error(problem)


def as_dict(found: Preset, home: Home) -> dict[str, Any]:
    """One preset of ``presets --json``."""
    return {
        "name": found.name,
        "about": found.about,
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
