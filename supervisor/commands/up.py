"""``llmctl up``: preset → engine → model → command line → serve. ``--dry-run`` stops before anything is fetched or started."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from supervisor import argv, engine, gguf, hardware, paths, preset, render, rundir, serve, store
from supervisor.arbiter import Launch
from supervisor.errors import Error, Exit
from supervisor.preset import Preset
from supervisor.rundir import RunDir


@click.command("up")
@click.argument("name", metavar="PRESET")
@click.option("--port", default=serve.DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--host", default="localhost", show_default=True, help="Loopback only, until llmctl has keys.")
@click.option("--model", type=click.Path(path_type=Path), help="Another GGUF file in the place of the preset's.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override an option of the preset; may be repeated.")
@click.option("--detach", is_flag=True, help="Return when it is ready; it goes on in the background.")
@click.option("--dry-run", is_flag=True, help="Print the llama-server command line and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --detach or --dry-run: the result as JSON.")
@click.option("--ready-fd", type=int, hidden=True, help="Where --detach's other half says how it went.")
def command(
    name: str,
    port: int,
    host: str,
    model: Path | None,
    overrides: Sequence[str],
    detach: bool,
    dry_run: bool,
    as_json: bool,
    ready_fd: int | None,
) -> None:
    """Serve PRESET as an OpenAI endpoint, in the foreground. Ctrl-C drains, twice forces.

    \b
    llmctl up tiny
    llmctl up tiny --port 9000 --set slots=2
    """
    if ready_fd is not None:
        _report(ready_fd, lambda ready: _serve(name, port, host, model, overrides, foreground=False, ready=ready))
        return
    home = paths.home()
    chosen = preset.load(name, home, overrides)
    serve.check_host(host)
    built = engine.locate(home)
    file = model.absolute() if model else store.path(home, chosen.model)
    words = _command(chosen, built, file)
    if dry_run:
        _show(words, as_json=as_json)
        return
    if running := rundir.read(home.run):
        raise rundir.busy(home.run, running)
    if model is None:
        with render.progress() as progress:
            store.pull(home, chosen.model, progress)
    gguf.read(file)
    if detach:
        address = _detach(home, [name, "--port", str(port), "--host", host, *_flags(model, overrides)])
        render.as_json({"address": address, "model": name}) if as_json else _welcome(name, address, detached=True)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    _quiet()
    _serve(name, port, host, model, overrides, foreground=True, ready=lambda address: _welcome(name, address, detached=False))


def _command(chosen: Preset, built: engine.Engine, file: Path) -> tuple[str, ...]:
    return argv.render(chosen, built.server, file, threads=hardware.physical_cores(), flags=engine.capabilities(built))


def _serve(
    name: str,
    port: int,
    host: str,
    model: Path | None,
    overrides: Sequence[str],
    *,
    foreground: bool,
    ready: serve.Ready,
) -> None:
    home = paths.home()
    chosen = preset.load(name, home, overrides)
    built = engine.locate(home)
    file = model.absolute() if model else store.path(home, chosen.model)
    words = _command(chosen, built, file)

    def launches(owned: RunDir) -> Sequence[Launch]:
        folder = owned.child_folder(name)
        return [Launch(chosen, words, argv.environment(os.environ, folder), folder, home.logs / f"{name}.log")]

    serve.run(serve.Service(home, launches, (name,), built.title, host, port, foreground), ready=ready)


def _show(words: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        render.as_json({"argv": list(words)})
    else:
        render.out(shlex.join(words))


def _welcome(name: str, address: str, *, detached: bool) -> None:
    render.say(f"{name} is ready at {address}/v1")
    render.say(
        f"""
  curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'
"""
    )
    render.say("llmctl down stops it." if detached else "Ctrl-C stops it.")


def _flags(model: Path | None, overrides: Sequence[str]) -> list[str]:
    given = [word for override in overrides for word in ("--set", override)]
    return given + (["--model", str(model.absolute())] if model else [])


def _quiet() -> None:
    for name in ("httpx2", "httpcore2", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _detach(home: paths.Home, arguments: Sequence[str]) -> str:
    """Start the serving half in a session of its own and wait for its word; returns the address. Its error becomes ours."""
    home.logs.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    with (home.logs / "llmctl.log").open("ab") as log, os.fdopen(read_fd) as reader:
        other = subprocess.Popen(
            [sys.executable, "-m", "supervisor", "up", *arguments, "--ready-fd", str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            said = reader.readline()
        except KeyboardInterrupt:
            other.terminate()
            other.wait()
            raise
    if not said:
        raise Error("llmctl ended before it was ready", exit=Exit.CHILD, hint="llmctl logs llmctl")
    word = json.loads(said)
    if "address" in word:
        return str(word["address"])
    other.wait()
    raise Error(word["message"], exit=Exit(word["exit"]), hint=word["hint"])


def _report(fd: int, work: serve.Work) -> None:
    """Run the serving half; its address or its error goes to ``fd`` as one line of JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    _quiet()
    with os.fdopen(fd, "w") as pipe:

        def tell(word: dict[str, object]) -> None:
            if not pipe.closed:
                pipe.write(json.dumps(word) + "\n")
                pipe.close()

        try:
            work(lambda address: tell({"address": address}))
        except Error as error:
            tell({"message": error.message, "hint": error.hint, "exit": int(error.exit)})
            raise
