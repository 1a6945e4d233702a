"""``llmctl pull``: have a preset's model on this machine before it is asked for."""

from __future__ import annotations

import click

from supervisor import paths, preset, render, store


@click.command("pull", short_help="Fetch a preset's model.")
@click.argument("name", metavar="PRESET")
@click.option("--json", "as_json", is_flag=True, help="The files as JSON.")
def command(name: str, as_json: bool) -> None:
    """Fetch the model files of PRESET, checked against their sha256. A request never does: it may only start what is here."""
    home = paths.home()
    chosen = preset.load(name, home)
    with render.progress() as progress:
        models = (model for model in (chosen.model, chosen.draft_model) if model is not None)
        files = [str(store.pull(home, model, progress)) for model in models]
    if as_json:
        render.as_json({"preset": name, "files": files})
    else:
        for file in files:
            render.say(f"{name}: {file}")
