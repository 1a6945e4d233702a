"""``llmctl version``."""

from __future__ import annotations

import click

from supervisor import __version__, render


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> None:
    """Print llmctl's version and the engine it would use."""
    if as_json:
        render.as_json({"llmctl": __version__})
    else:
        render.out(f"llmctl {__version__}")
