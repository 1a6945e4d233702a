"""``llmctl check``: everything that is wrong with a preset's file, before it is ever started."""

from __future__ import annotations

from pathlib import Path

import click

from supervisor import paths, preset, render
from supervisor.errors import Error, Exit
from supervisor.order import never_fits


@click.command("check", short_help="Find all faults of a preset's file.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def command(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Check a preset's FILE: its words and values, and every pair of a context and a mode that it offers.

    \b
    llmctl check ~/.config/llmctl/presets/mine.yaml
    """
    found, faults = preset.check(file)
    pairs = preset.pairs(found) if found and not faults else ()
    unfit, unknown = never_fits(file, paths.home()) if pairs else ((), "")
    if as_json:
        told = [{"line": fault.line, "message": fault.message, "hint": fault.hint} for fault in faults]
        known = {"never_fits": list(unfit), "not_planned": unknown or None}
        render.as_json(
            {"file": str(file), "ok": not (faults or unfit), "faults": told, "pairs": [list(pair) for pair in pairs], **known}
        )
    elif faults or unfit:
        for fault in faults:
            render.error(Error(fault.where(file), exit=Exit.CONFIG, hint=fault.hint))
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
