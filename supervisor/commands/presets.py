"""``llmctl presets``: what can be served."""

from __future__ import annotations

import click

from supervisor import paths, preset, render, store
from supervisor.errors import Error
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
        presets = [each.model_dump() | {"have": store.have(home, each.model)} for each in found]
        render.as_json({"presets": presets, "broken": [problem.message for problem in broken]})
        return
    rows = [(each.name, size(each.model.bytes), "yes" if store.have(home, each.model) else "no", each.about) for each in found]
    render.table(("preset", "model", "here", "about"), rows)
    for problem in broken:
        render.error(problem)
