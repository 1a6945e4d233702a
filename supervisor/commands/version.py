"""``llmctl version``."""

from __future__ import annotations

import click

from supervisor import __version__, engine, paths, render
from supervisor.errors import Error


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """Print llmctl's version and the engine it would use."""
    try:
        title = engine.locate(paths.home()).title
    except Error:
        title = None
    if as_json:
        render.as_json({"llmctl": __version__, "engine": title})
    else:
        render.out(f"llmctl {__version__}, engine {title or 'none yet (llmctl build)'}")
