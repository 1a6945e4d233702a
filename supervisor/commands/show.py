"""``llmctl show``: a preset as it stands with these words: every option, its value, and where that comes from."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import click

from supervisor import argv, headers, planning, render, sampling
from supervisor.errors import Error, Exit
from supervisor.option import options
from supervisor.order import Order
from supervisor.paths import Home
from supervisor.preset import Preset
from supervisor.value import nearest
from supervisor.words import quoted


@click.command("show")
@planning.ordered
@click.argument("names", metavar="[OPTION]…", nargs=-1)
@click.option("--gpu", metavar="NAME", help="With --command: for this card in the place of the one here, rtx3070.")
@click.option("--command", "line", is_flag=True, help="Print the exact llama-server line.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(
    order: Order,
    names: tuple[str, ...],
    gpu: str | None,
    line: bool,
    as_json: bool,
) -> None:
    """Show what PRESET asks for: every option with its value and where it comes from; of each OPTION also what it takes and does.

    \b
    llmctl show turbo_4b --context long
    llmctl show turbo_4b draft_length cache_ram
    llmctl show turbo_4b --command
    """
    if gpu and not line:
        raise click.UsageError("--gpu goes with --command")
    if names and line:
        raise click.UsageError("--command prints the whole line; leave out the options")
    order = dataclasses.replace(order, gpu=gpu)
    for each in names:
        if each not in options():
            near = nearest(each, options())
            hint = f"llmctl show {order.preset.name} {near}".strip()
            raise Error(f"there is no option {quoted(each)}", exit=Exit.CONFIG, hint=hint)
    if line:
        render.as_json({"argv": list(order.argv)}) if as_json else render.out(shlex.join(order.argv))
        return
    found, source = sampled(order.preset, order.home)
    if as_json:
        render.as_json(as_dict(found, source, names or tuple(options())))
    elif names:
        for each in names:
            _one(found, each, source)
    else:
        _all(found, source)


def sampled(found: Preset, home: Home) -> tuple[Preset, str]:
    """The preset with its chain's values, and where those come from; as it is where its model's header isn't known here."""
    if found.kind != "chat":
        return found, ""
    try:
        architecture = headers.find(home, found.model).architecture
    except Error:
        return found, ""
    chain = sampling.chain(found.sampling, architecture=architecture, thinking=found.reasoning)
    return found.change(sampling.resolve(found, architecture), _origin(found)), chain.source


def as_dict(found: Preset, source: str, names: tuple[str, ...]) -> dict[str, Any]:
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
            name: {
                "value": words[name],
                "unit": options()[name].unit,
                "from": found.origins[name],
                "argv": list(argv.words(found, name)),
                "takes": options()[name].kind.told,
                "help": options()[name].help,
            }
            for name in names
        },
        "sampling_source": source or None,
        "fallback": words["fallback"],
        "notes": list(found.notes),
    }


def _all(found: Preset, source: str) -> None:
    """Every option in a table."""
    chosen = [f"{what} {word}" for what, word in (("context", found.context_name), ("mode", found.mode_name)) if word]
    render.out(f"{found.name}{''.join(f', {each}' for each in chosen)}: {found.model.file} from {found.model.source}")
    render.out(found.about + (f"\nfor {found.machine}" if found.machine else "") + "\n")
    rows = [
        (name, _cell(found, name), option.unit, found.origins[name], shlex.join(argv.words(found, name)))
        for name, option in options().items()
        if name not in ("about", "machine")
    ]
    render.table(("option", "value", "unit", "from", "llama-server"), rows)
    render.out("")
    if source:
        render.out(f"{_origin(found)}: {source}")
    if found.fallback:
        render.out(f"may be given up, in this order: {'; '.join(map(str, found.fallback))}")
    for sentence in found.notes:
        render.out(sentence)


def _one(found: Preset, name: str, source: str) -> None:
    """What there is to know of an option."""
    option, origin = options()[name], found.origins[name]
    why = f" ({source})" if source and origin == _origin(found) else ""
    value = f"{_cell(found, name)} {option.unit}".strip()
    told = {
        "takes": f"{option.kind.told} {option.unit}".strip(),
        "default": option.kind.write(option.default),
        "only": option.only and f"where {option.only}",
        "flag": option.flag,
        "passed": shlex.join(argv.words(found, name)),
    }
    render.out(f"{name}: {value or 'nothing'}, from {origin}{why}")
    render.out(f"  {option.help}")
    for what, said in told.items():
        if said:
            render.out(f"  {what:8}{said}")


def _origin(found: Preset) -> str:
    return f"chain {found.sampling}"


def _cell(found: Preset, name: str) -> str:
    value = found.values()[name]
    return shlex.join(value) if isinstance(value, list) else str(value)
