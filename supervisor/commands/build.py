"""``llmctl build``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from supervisor import build, engine, paths, preset, render, store
from supervisor.errors import Error
from supervisor.paths import Home
from supervisor.toolkit import Choice
from supervisor.units import Progress, duration


@click.command("build")
@click.option(
    "--variant",
    type=click.Choice(["native", "dev", "cpu"]),
    default="native",
    show_default=True,
    help="native: this machine, with CUDA where a card is. dev: quick to compile. cpu: never CUDA.",
)
@click.option("--source", type=click.Path(path_type=Path), help="A llama.cpp tree to build instead of the pinned one.")
@click.option("--cuda-arch", metavar="N", help="Build for CUDA without a card: 86 is the RTX 3070.")
@click.option(
    "--toolkit",
    type=click.Choice(["auto", "system", "wheels"]),
    default="auto",
    show_default=True,
    help="The CUDA toolkit: the system's, or one made from NVIDIA's PyPI wheels (530 MB).",
)
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compilers at once [default: one a CPU].")
@click.option(
    "--smoke-model",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A GGUF file to try the new engine with [default: tiny's].",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(
    variant: str,
    source: Path | None,
    cuda_arch: str | None,
    toolkit: str,
    jobs: int | None,
    smoke_model: Path | None,
    as_json: bool,
) -> None:
    """Build the engine, stock llama.cpp, and pick it. Does nothing if this very engine is there already."""
    home = paths.home()
    with render.progress() as progress:
        done = build.build(
            home,
            variant=variant,
            source_dir=source,
            cuda_arch=cuda_arch,
            toolkit_choice=cast(Choice, toolkit),
            jobs=jobs,
            smoke_model=lambda: smoke_model or _built_in(home, progress),
            progress=progress,
            say=render.say,
        )
    if as_json:
        render.as_json(
            engine.manifest(done.engine)
            | {"folder": str(done.engine.folder), "built": done.built, "seconds": round(done.seconds, 1)}
        )
        return
    if done.smoke:
        render.say(done.smoke)
    what = f"built in {duration(done.seconds)}" if done.built else "was there already"
    render.out(f"engine {done.engine.key} {done.engine.title}: {what}, picked")


def _built_in(home: Home, progress: Progress) -> Path | None:
    """The model of ``tiny``, fetched if need be; without a registry the engine is built all the same."""
    try:
        return store.pull(home, preset.load("tiny", home).model, progress)
    except Error as error:
        render.say(f"the new engine will only be started, since there is no model to try it with: {error.message}")
        return None
