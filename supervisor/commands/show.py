"""``llmctl show``: a preset as it stands with these words: every option, its value, and where that comes from."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import click

from supervisor import planning, render
from supervisor.option import AUTO, CHAIN, applies, options
from supervisor.order import Order
from supervisor.preset import Preset


@click.command("show")
@click.argument("name", metavar="PRESET")
@planning.choices
@click.option("--gpu", metavar="NAME", help="With --command: for this card in the place of the one here, rtx3070.")
@click.option("--command", "line", is_flag=True, help="Print the exact llama-server line.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(
    name: str,
    context: str | None,
    mode: str | None,
    overrides: tuple[str, ...],
    model: Path | None,
    gpu: str | None,
    line: bool,
    as_json: bool,
) -> None:
    """Show what PRESET asks for: every option with its value and where it comes from.

    \b
    llmctl show turbo_4b --context long
    llmctl show turbo_4b --command
    """
    if gpu and not line:
        raise click.UsageError("--gpu goes with --command")
    order = Order(name, context=context, mode=mode, overrides=overrides, model=model, gpu=gpu)
    if line:
        render.as_json({"argv": list(order.argv)}) if as_json else render.out(shlex.join(order.argv))
        return
    found = order.preset
    if as_json:
        render.as_json(as_dict(found))
        return
    chosen = [f"{what} {word}" for what, word in (("context", found.context_name), ("mode", found.mode_name)) if word]
    render.out(f"{found.name}{''.join(f', {each}' for each in chosen)}: {found.model.file} from {found.model.source}")
    render.out(f"{found.about}\n")
    words = found.values()
    rows = [
        (each, _cell(words[each]), option.unit, found.origins[each], shlex.join(_passed(found, each)))
        for each, option in options().items()
        if each != "about"
    ]
    render.table(("option", "value", "unit", "from", "llama-server"), rows)
    if found.fallback:
        render.out(f"\nmay be given up, in this order: {'; '.join(map(str, found.fallback))}")
    for sentence in found.disagreements:
        render.out(sentence)


def as_dict(found: Preset) -> dict[str, Any]:
    """``show --json``."""
    words = found.values()
    return {
        "preset": found.name,
        "context": found.context_name,
        "mode": found.mode_name,
        "contexts": list(found.contexts),
        "modes": list(found.modes),
        "model": dataclasses.asdict(found.model),
        "draft_model": dataclasses.asdict(found.draft_model) if found.draft_model else None,
        "options": {
            name: {"value": words[name], "unit": option.unit, "from": found.origins[name], "argv": list(_passed(found, name))}
            for name, option in options().items()
        },
        "fallback": words["fallback"],
        "disagreements": list(found.disagreements),
    }


def _passed(found: Preset, name: str) -> tuple[str, ...]:
    """The option's words of the command line; none for what is ours, not used here, or still to be worked out."""
    option, value = options()[name], getattr(found, name)
    if name == "extra_args":
        return found.extra_args
    if not applies(option, found) or (value in (AUTO, CHAIN) and name != "flash_attention"):
        return ()
    return option.arguments(value)


def _cell(value: object) -> object:
    return shlex.join(value) if isinstance(value, list) else str(value)
