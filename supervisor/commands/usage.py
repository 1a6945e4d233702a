"""``llmctl usage``: what was asked and answered, from the ledger."""

from __future__ import annotations

import json

import click

from supervisor import ledger, paths, render


@click.command("usage", short_help="Sum requests and tokens.")
@click.option("--records", is_flag=True, help="One line a request, newest last, instead of sums.")
@click.option("-n", "--limit", default=100, show_default=True, type=click.IntRange(min=0), help="With --records: how many.")
@click.option("--json", "as_json", is_flag=True, help="As JSON; with --records one object a line.")
def command(records: bool, limit: int, as_json: bool) -> None:
    """Sum requests and tokens by preset, or list the requests."""
    path = paths.home().ledger
    if records:
        rows = list(ledger.records(path, limit))
        if as_json:
            for row in rows:
                render.out(json.dumps(row))
            return
        columns = ("id", "preset", "status", "prompt_tokens", "cached_tokens", "completion_tokens", "decode_tps")
        render.table(columns, [[_short(row[column]) for column in columns] for row in rows])
        return
    sums = ledger.sums(path)
    if as_json:
        render.as_json({"rows": sums})
    else:
        heads = ("preset", "requests", "ok", "cancelled", "other", "prompt_tokens", "cached_tokens", "completion_tokens")
        render.table(heads, [[row[column] for column in heads] for row in sums])


def _short(value: object) -> object:
    return round(value, 1) if isinstance(value, float) else value
