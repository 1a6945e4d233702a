"""``llmctl bench``: ask a server on purpose and say how it did; keep real traffic's shape, and play it again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from supervisor import paths, render, rundir
from supervisor.errors import Error, Exit
from supervisor.order import Order
from supervisor.running import Running

if TYPE_CHECKING:
    from bench.ask import Level
    from bench.result import Result
    from bench.run import Order as Measurement
    from bench.target import Target
    from bench.workload import Workload

DEFAULT: Final = "run"
CTRL_C: Final = 130


class _Bench(click.Group):
    """Whose first word is a preset unless it names one of its commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """``llmctl bench tiny`` is ``llmctl bench run tiny``."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.group("bench", cls=_Bench, short_help="Measure a preset, or any OpenAI server.")
def command() -> None:
    """Measure a preset, or any server that speaks OpenAI's API. `llmctl bench run --help` lists the options.

    \b
    llmctl bench tiny                                the preset, by the workload `chat`
    llmctl bench tiny --workload rag --repetitions 9
    llmctl bench --url http://127.0.0.1:11434        any server, alone
    llmctl bench tiny --url http://127.0.0.1:8000/v1 both, in turns in one run
    llmctl compare last                              what came of that
    llmctl bench record --since 1h --out hour.jsonl  the shape of the last hour's traffic
    llmctl bench replay hour.jsonl tiny              the same once more
    """


def _numbers(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(text.replace(" ", "").split(","))


def _limits(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for word in words:
        parts = re.fullmatch(r"(ttft|tpot|e2e)=(\d+(?:\.\d+)?)", word)
        if parts is None:
            hint = "--limit ttft=500 --limit tpot=50 --limit e2e=10000"
            raise Error(f"--limit is {word!r}, but should be ttft, tpot or e2e, =, and milliseconds", exit=Exit.USAGE, hint=hint)
        found[f"{parts[1]}_ms"] = float(parts[2])
    return found


@command.command(DEFAULT)
@click.argument("name", metavar="[PRESET]", required=False)
@click.option("--url", "urls", multiple=True, metavar="URL", help="Any OpenAI server, http://HOST:PORT#MODEL; may be repeated.")
@click.option("--key-env", metavar="NAME", help="The environment variable that holds the API key of those servers.")
@click.option(
    "--workload",
    "workload_name",
    default="chat",
    show_default=True,
    metavar="NAME",
    help="`llmctl bench workloads` lists them; or a file.",
)
@click.option("--concurrency", callback=_numbers, metavar="N,N,…", help="Users at once, one level each.")
@click.option(
    "--rate", "rates", callback=_numbers, metavar="R,R,…", help="Requests a second, one level each, whatever is still in work."
)
@click.option("--arrivals", type=click.Choice(("poisson", "constant")), default="poisson", show_default=True, help="With --rate.")
@click.option("--repetitions", type=int, help="Of each level, with new texts.")
@click.option("--requests", type=int, help="Of each user in a repetition; eight times as many with --rate.")
@click.option("--prompt", metavar="N|N-N", help="Tokens of a prompt.")
@click.option("--answer", metavar="N|N-N", help="Tokens of an answer.")
@click.option("--shared", type=int, help="Tokens that all prompts of a repetition begin with.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    callback=_limits,
    metavar="ttft=MS",
    help="For goodput: ttft, tpot or e2e; may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of lengths and arrival times; texts are new in every run.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds for one request."
)
@click.option("--context", metavar="short|medium|long|N", help="As in `llmctl up`, whose options these four are.")
@click.option("--mode", metavar="NAME")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
@click.option("--model", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The result's file; requests and page lie beside it.  [default: in the data folder]",
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def run(
    name: str | None,
    urls: tuple[str, ...],
    key_env: str | None,
    workload_name: str,
    concurrency: tuple[str, ...] | None,
    rates: tuple[str, ...] | None,
    arrivals: str,
    limits: dict[str, float],
    seed: int,
    timeout_s: float,
    out: Path | None,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Measure PRESET, or the servers at --url, or all of them in turns.

    Without llmctl running, PRESET is served for as long as it takes. Each level (so many users at once, or so many requests a second) gets a
    warm-up that counts nowhere and some repetitions with fresh prompts, so that no cache answers for the engine.
    """
    from bench import workload
    from bench.run import Order as Measurement

    chosen = workload.changed(
        workload.load(workload_name),
        concurrency=concurrency,
        **{name: options[name] for name in ("repetitions", "requests", "prompt", "answer", "shared")},
        **limits,
    )
    if rates and concurrency:
        raise click.UsageError("--rate and --concurrency are two ways to ask: one of them")
    levels = _levels(chosen, rates, arrivals)
    order = None
    if name is not None:
        order = Order(name, options["context"], options["mode"], options["overrides"], options["model"])
    elif any(options[each] for each in ("context", "mode", "overrides", "model")):
        raise click.UsageError("--context, --mode, --set and --model are for a PRESET")
    with _subjects(order, urls, _key(key_env)) as targets:
        measured = Measurement(chosen, targets, levels, seed, secrets.token_hex(4), timeout_s)
        _measure(measured, out, as_json=as_json)


def _levels(chosen: Workload, rates: tuple[str, ...] | None, arrivals: Any) -> tuple[Level, ...]:  # noqa: ANN401
    from bench.ask import Level

    if rates is None:
        return tuple(Level(users=users) for users in chosen.users)
    for rate in rates:
        if not re.fullmatch(r"\d{1,4}(\.\d{1,4})?", rate) or not float(rate):
            raise Error(f"--rate is {rate!r}, but should be requests a second", exit=Exit.USAGE, hint="--rate 0.5,1,2")
    return tuple(Level(rate=float(rate), arrivals=arrivals) for rate in dict.fromkeys(rates))


def _key(key_env: str | None) -> str:
    if key_env is None:
        return ""
    if not (key := os.environ.get(key_env, "")):
        raise Error(f"--key-env names {key_env}, which is not set", exit=Exit.USAGE, hint=f"export {key_env}=…")
    return key


@contextlib.contextmanager
def _subjects(order: Order | None, urls: tuple[str, ...], key: str) -> Iterator[tuple[Target, ...]]:
    """Those that are to be measured, served for as long as the block runs where nobody serves them yet."""
    import asyncio

    from bench import target

    home = paths.home()
    with contextlib.ExitStack() as stack:
        wanted = [(*_place(url), key, False) for url in urls]
        if order is not None:
            wanted.insert(0, (stack.enter_context(_served(home, order)), order.name, "", True))
        elif not wanted:
            running = Running.of(home)  # says what to try where nothing runs
            wanted.insert(0, (running.instance.address, "", "", True))
        with render.progress() as progress:

            async def find() -> list[Target]:
                return [
                    await target.find(url, model=model, key=of, home=home if ours else None, progress=progress)
                    for url, model, of, ours in wanted
                ]

            found = asyncio.run(find())
        yield _named(found)


def _place(url: str) -> tuple[str, str]:
    """``http://host:port#model``."""
    place, _, model = url.partition("#")
    return place, model


def _named(found: list[Target]) -> tuple[Target, ...]:
    """Each with a name of its own."""
    import dataclasses

    names: list[str] = []
    for each in found:
        count = sum(name.partition(" (")[0] == each.name for name in names)
        names.append(f"{each.name} ({count + 1})" if count else each.name)
    return tuple(dataclasses.replace(each, name=name) for each, name in zip(found, names, strict=True))


@contextlib.contextmanager
def _served(home: paths.Home, order: Order) -> Iterator[str]:
    """The address at which a preset is served while the block runs: that of the llmctl that runs, or of one that is started for it."""
    running = rundir.read(home.run)
    if running is not None:
        if order.words() != [order.name]:
            raise Error(
                f"llmctl runs already (pid {running.process.pid}), and {order.name} is to be measured in another way than it serves",
                exit=Exit.BUSY,
                hint="llmctl down",
            )
        _ = order.preset  # says which there are
        yield running.address
        return
    llmctl = [sys.executable, "-m", "supervisor"]
    started = subprocess.run(
        [*llmctl, "up", *order.words(), "--port", "0", "--detach", "--json"], stdout=subprocess.PIPE, check=False
    )
    if started.returncode:
        raise click.exceptions.Exit(started.returncode)  # it has said why
    try:
        yield json.loads(started.stdout)["address"]
    finally:
        subprocess.run([*llmctl, "down", "--now"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _measure(order: Measurement, out: Path | None, *, as_json: bool) -> Result:
    """Measure, keep, show. Ctrl-C keeps what was measured whole."""
    import uvloop

    from bench import page, result, show, workload
    from bench.run import Run

    names = " and ".join(target.name for target in order.targets)
    render.say(f"{names} by {workload.told(order.workload)}; {order.requests()} requests")
    stopped = False
    with render.progress() as progress:
        measuring = Run(order, progress=progress, say=render.say)
        try:
            uvloop.run(measuring.measure())
        except KeyboardInterrupt:
            stopped = True
    found, samples = measuring.result(), measuring.samples
    if not samples:
        raise click.exceptions.Exit(CTRL_C)
    path = out or _path(order, found)
    result.write(found, samples, path)
    html = path.with_suffix(".html")
    html.write_text(page.render(found, samples), encoding="utf-8")
    if as_json:
        render.as_json({"file": str(path), **found.as_dict()})
    else:
        show.result(found, path)
    if stopped:
        render.say("it was ended before its end: what is here was measured whole")
        raise click.exceptions.Exit(CTRL_C)
    return found


def _path(order: Measurement, found: Result) -> Path:
    stamp = f"{datetime.fromtimestamp(found.manifest.created_at):%Y-%m-%dT%H-%M-%S}"
    plain = re.sub(r"[^\w.-]+", "-", f"{stamp}-{order.targets[0].name}-{order.workload.name}")
    return paths.home().bench / f"{plain}.json"


@command.command("workloads")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def workloads(as_json: bool) -> None:
    """What llmctl brings: lengths, users, limits. A file of your own may say the same (llmctl bench --workload FILE)."""
    from bench import workload

    found = [workload.load(name) for name in workload.names()]
    if as_json:
        render.as_json({"workloads": [each.as_dict() for each in found]})
        return
    columns = ("workload", "for", "prompt", "shared", "answer", "users", "limits")
    render.table(columns, [_row(each) for each in found])


def _row(each: Workload) -> tuple[object, ...]:
    limits: Mapping[str, float] = each.limits
    told = ", ".join(f"{name.removesuffix('_ms')} {value:g} ms" for name, value in limits.items())
    return each.name, each.about, each.prompt, each.shared or None, each.answer, ", ".join(each.concurrency), told
