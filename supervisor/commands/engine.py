"""``llmctl engine list|use|remove|test``: the engines in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from supervisor import build, engine, hardware, paths, preset, render, store
from supervisor.engine import Engine
from supervisor.errors import Error, Exit
from supervisor.units import size

JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group("engine")
def command() -> None:
    """List, pick, remove and test engines."""


@command.command("list")
@JSON
def list_engines(as_json: bool) -> None:
    """Every engine that was built, newest first."""
    home = paths.home()
    found, picked = engine.installed(home), engine.current(home)
    if as_json:
        render.as_json({"engines": [_row(one) | {"current": one.key == picked} for one in found]})
        return
    if not found:
        render.say("no engine yet: llmctl build")
        return
    columns = ("", "engine", "llama.cpp", "variant", "CUDA", "source", "size", "built")
    rows = [
        (
            "*" if one.key == picked else "",
            one.key,
            f"b{one.build}",
            one.variant,
            f"{one.cuda} sm_{one.arch}" if one.cuda else "",
            one.source,
            size(_bytes(one)),
            one.built_at,
        )
        for one in found
    ]
    render.table(columns, rows)


@command.command("use")
@click.argument("key")
@JSON
def use(key: str, as_json: bool) -> None:
    """Pick the engine whose key begins with KEY; it runs from the next start on."""
    chosen = engine.use(paths.home(), key)
    if as_json:
        render.as_json(_row(chosen) | {"current": True})
    else:
        render.out(f"engine {chosen.key} {chosen.title}: picked")


@command.command("remove")
@click.argument("key")
@JSON
def remove(key: str, as_json: bool) -> None:
    """Delete the engine whose key begins with KEY."""
    home = paths.home()
    was_picked = engine.current(home)
    gone = engine.remove(home, key)
    if as_json:
        render.as_json({"removed": gone.key})
    else:
        note = "; no engine is picked now (llmctl engine use KEY, or llmctl build)" if was_picked == gone.key else ""
        render.out(f"engine {gone.key} {gone.title}: removed{note}")


@command.command("test")
@click.argument("key", required=False)
@click.option("--model", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE", help="A GGUF file.")
@JSON
def test(key: str | None, model: Path | None, as_json: bool) -> None:
    """Compare an engine's files with its manifest, start it, and generate a token [default model: tiny's, if it is here]."""
    home = paths.home()
    tiny = preset.load("tiny", home).model
    model = model or (store.path(home, tiny) if store.have(home, tiny) else None)
    chosen = engine.find(home, key) if key else engine.locate(home)
    if broken := engine.damaged(chosen):
        what = f"engine {chosen.key} is damaged: {', '.join(broken)} differ from what was built"
        raise Error(what, exit=Exit.ENGINE, hint=f"llmctl engine remove {chosen.key}, then llmctl build")
    flags = len(engine.capabilities(chosen))
    devices = [line.strip() for line in engine.ask(chosen.server, "--list-devices").splitlines()[1:] if line.strip()]
    said = build.smoke(chosen, model) if model else "no --model FILE, so no token was generated"
    note = ""
    if chosen.cuda and devices == ["(none)"]:
        note = f"no card found ({hardware.nvidia_cards().no_card or 'the engine can not use it'}): this CUDA engine runs on the CPU here"
    if as_json:
        render.as_json(_row(chosen) | {"flags": flags, "devices": devices, "smoke": said, "note": note})
        return
    render.out(f"engine {chosen.key} {chosen.title}: starts, {flags} flags, devices: {', '.join(devices)}")
    render.out(said)
    if note:
        render.say(note)


def _row(one: Engine) -> dict[str, Any]:
    return engine.manifest(one) | {"folder": str(one.folder), "bytes": _bytes(one)}


def _bytes(one: Engine) -> int:
    return sum(path.stat().st_size for path in one.folder.iterdir() if path.is_file() and not path.is_symlink())
