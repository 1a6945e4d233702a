"""``llmctl check``: everything that is wrong with a preset's file, before it is ever started, or with the user's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from supervisor import config, paths, preset, render
from supervisor.errors import Error, Exit
from supervisor.order import never_fits
from supervisor.words import Fault


@click.command("check", short_help="Find all faults of a preset's file, or of config.yaml.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def command(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Check a preset's FILE: its words and values, and every pair of a context and a mode that it offers. Or a config.yaml.

    \b
    llmctl check ~/.config/llmctl/presets/mine.yaml
    llmctl check ~/.config/llmctl/config.yaml
    """
    home = paths.home()
    if file.name == home.config_file.name and file.absolute().parent.name != home.presets.name:
        _settings(ctx, file, as_json=as_json)
        return
    found, faults = preset.check(file)
    pairs = preset.pairs(found) if found and not faults else ()
    unfit, unknown = never_fits(file, home) if pairs else ((), "")
    if as_json:
        known = {"never_fits": list(unfit), "not_planned": unknown or None}
        render.as_json(
            {
                "file": str(file),
                "ok": not (faults or unfit),
                "faults": _told(faults),
                "pairs": [list(pair) for pair in pairs],
                **known,
            }
        )
    elif faults or unfit:
        _say(file, faults)
        for sentence in unfit:
            render.error(
                Error(f"{file}: {sentence}", exit=Exit.NO_FIT, hint="a smaller context, or more that its fallback may give up")
            )
    else:
        made = preset.read(file)
        ways = f"{len(pairs)} pairs of context and mode" if len(pairs) > 1 else "one way to run it"
        render.out(
            f"ok: {made.name}, {made.model.file}, {made.context} tokens, {made.slots} slot{'s' if made.slots > 1 else ''}, {ways}"
        )
        if unknown:
            render.say(f"whether it fits is not known: {unknown}")
    if faults or unfit:
        ctx.exit(Exit.CONFIG if faults else Exit.NO_FIT)


def _settings(ctx: click.Context, file: Path, *, as_json: bool) -> None:
    """The user's settings, which are in no preset."""
    found, faults = config.check(file)
    if as_json:
        render.as_json({"file": str(file), "ok": not faults, "faults": _told(faults), "settings": dataclasses.asdict(found)})
    elif faults:
        _say(file, faults)
    else:
        render.out("ok: " + ", ".join(f"{name} {word}" for name, word in config.worded(found).items() if word))
    if faults:
        ctx.exit(Exit.CONFIG)


def _told(faults: Sequence[Fault]) -> list[dict[str, object]]:
    return [{"line": fault.line, "message": fault.message, "hint": fault.hint} for fault in faults]


def _say(file: Path, faults: Sequence[Fault]) -> None:
    for fault in faults:
        render.error(Error(fault.where(file), exit=Exit.CONFIG, hint=fault.hint))
