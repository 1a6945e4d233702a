"""``llmctl pack``."""

from __future__ import annotations

from pathlib import Path

import click

from supervisor import pack, paths, render
from supervisor.units import size


@click.command("pack", short_help="Bundle a trial of memory and speed for another box.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="3.N",
    help="A Python version that the box may have; may be repeated [default: this one's, and 3.12].",
)
@click.option("--source", type=click.Path(path_type=Path), help="A llama.cpp tree to pack instead of the pinned one.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(folder: Path, pythons: tuple[str, ...], source: Path | None, as_json: bool) -> None:
    """Make the folder DIR that measures memory and speed on a box with a card, a CUDA toolkit and no network.

    There, `sh DIR/run.sh` builds the engine for that card, starts Qwen3.5 4B and 9B without their weights in some configurations,
    and prints what each takes and was planned to, and how fast it is: prefill and decode by depth, 1 to 4 streams at once, and MTP
    with guesses that are right as often as it is told.
    """
    with render.progress() as progress:
        made = pack.make(paths.home(), folder, pythons=pythons, source_dir=source, progress=progress)
    if as_json:
        parts = {part.name: part.bytes for part in made.parts}
        render.as_json({"folder": str(made.folder), "pythons": list(made.pythons), "bytes": made.bytes, "parts": parts})
        return
    render.table(("part", "size"), [(part.name, size(part.bytes)) for part in made.parts])
    said = f"{made.folder}: {size(made.bytes)} of at most {size(pack.LIMIT_BYTES)}, for Python {' or '.join(made.pythons)}"
    render.out(f"{said}\ncopy it to the box, and there: sh {made.folder.name}/run.sh")
