"""``llmctl plan``: what will run and whether it fits, before anything is downloaded or started."""

from __future__ import annotations

import dataclasses

import click

from supervisor import budget, planning, render
from supervisor.errors import Exit
from supervisor.order import Order


@click.command("plan", short_help="Show what fits, and what is given up.")
@planning.ordered
@click.option(
    "--gpu",
    metavar="NAME",
    help="For this card in the place of the one here: rtx3070, rtx4060 … Idle and headless; a desktop takes more: --vram 7100M.",
)
@click.option("--vram", metavar="SIZE", help="So much of the card is free: 7400M, 7.2G.")
@click.option("--ram", metavar="SIZE", help="So much of the host's memory is free.")
@click.option("--online", is_flag=True, help="Read the file's true header from the hub (11 MB) where it isn't known yet.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    order: Order,
    gpu: str | None,
    vram: str | None,
    ram: str | None,
    online: bool,
    as_json: bool,
) -> None:
    """Show what PRESET would take of this machine's memory, or of a card's that isn't here, and what was given up to make it fit.

    \b
    llmctl plan turbo_4b --gpu rtx3070
    llmctl plan turbo_4b --context long --vram 6300M
    """
    card, host = (None if said is None else budget.parse_size(said) for said in (vram, ram))
    order = dataclasses.replace(order, gpu=gpu, vram=card, ram=host, online=online)
    found = order.plan
    if as_json:
        render.as_json(planning.as_dict(found, order.argv))
    else:
        planning.show(found)
    ctx.exit(Exit.OK if found.fits else Exit.NO_FIT)
