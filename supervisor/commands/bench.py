"""``llmctl bench``: ask a server on purpose and say how it did; keep real traffic's shape, and play it again."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from supervisor import measuring, paths, render, rundir
from supervisor.errors import Error, Exit
from supervisor.order import Order
from supervisor.running import Running
from supervisor.value import Duration

if TYPE_CHECKING:
    from bench.ask import Level
    from bench.workload import Workload

DEFAULT: Final = "run"
LONGEST_S: Final = 366 * 86_400


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


def _seconds(ctx: click.Context, param: click.Parameter, text: str) -> int:
    try:
        return _span_s(text)
    except ValueError as exc:
        raise Error(f"--for is {text!r}, but {exc}", exit=Exit.USAGE, hint="--for 10m") from exc


def _span_s(text: str) -> int:
    found = Duration(1, LONGEST_S).read(text)
    assert isinstance(found, int)
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

    Without llmctl running, PRESET is served for as long as it takes. Each level (so many users at once, or so many requests a second)
    gets a warm-up that counts nowhere and some repetitions with fresh prompts, so that no cache answers for the engine.
    """
    from bench import workload
    from bench.run import Order as Measurement

    chosen = workload.changed(
        workload.load(workload_name),
        concurrency=concurrency,
        **{name: options[name] for name in ("repetitions", "requests", "prompt", "answer", "shared")},
        **limits,
    )
    measuring.check_place(out, ".json")
    if rates and concurrency:
        raise click.UsageError("--rate and --concurrency are two ways to ask: one of them")
    levels = _levels(chosen, rates, arrivals)
    with measuring.subjects(_order(name, options), urls, _key(key_env)) as targets:
        measured = Measurement(chosen, targets, levels, seed, secrets.token_hex(4), timeout_s)
        measuring.measure(measured, out, as_json=as_json)


def _order(name: str | None, options: Mapping[str, Any]) -> Order | None:
    """The preset that is to be measured, if one is."""
    if name is not None:
        return Order(name, options["context"], options["mode"], options["overrides"], options["model"])
    if any(options[each] for each in ("context", "mode", "overrides", "model")):
        raise click.UsageError("--context, --mode, --set and --model are for a PRESET")
    return None


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


@command.command("record")
@click.option("--since", default="1h", show_default=True, metavar="1h|TIME", help="So long ago, or a time like 2026-01-31T20:00.")
@click.option("--until", metavar="TIME", help="Until then.  [default: now]")
@click.option("--preset", default="", metavar="NAME", help="Of one preset only.")
@click.option("--texts", is_flag=True, help="From now on, and what was asked, too: prompts will be in the file.")
@click.option(
    "--for", "for_s", default="10m", show_default=True, callback=_seconds, metavar="10m", help="How long, with --texts."
)
@click.option("--out", type=click.Path(path_type=Path), help="The trace's file.  [default: in the data folder]")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def record(since: str, until: str | None, preset: str, texts: bool, for_s: int, out: Path | None, as_json: bool) -> None:
    """Keep the shape of real traffic: when requests came, how long they and their answers were, and what they had in common.

    It comes out of the ledger and has nobody's words, unless --texts asks for them: then llmctl is listened to for a while, and the file
    is its owner's alone.
    """
    import asyncio

    from bench import tap, trace

    home = paths.home()
    measuring.check_place(out, ".jsonl")
    if texts:
        if until is not None or click.get_current_context().get_parameter_source("since") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--since and --until are of the past, and --texts is kept from now on")
        running = Running.of(home)
        with render.progress() as progress:
            heard = asyncio.run(tap.listen(running.instance, for_s, progress))
            found = tap.trace(home.ledger, heard, preset=preset, wait_s=60.0, progress=progress)
        if heard.dropped:
            render.say(f"{heard.dropped} requests came faster than they could be kept, and are missing")
    else:
        ends_at = _time("until", until) if until is not None else datetime.now().timestamp()
        begins_at = _time("since", since)
        if begins_at >= ends_at:
            raise Error(
                f"--since {since} is later than --until {until}",
                exit=Exit.USAGE,
                hint="llmctl bench record --since 2h --until 1h",
            )
        found = tap.recorded(home.ledger, begins_at, ends_at, preset)
    if left_out := found.told_left_out():
        render.say(left_out)
    if not found.requests:
        raise Error("nothing was answered in that time", exit=Exit.USAGE, hint="llmctl bench record --since 1d")
    path = out or home.bench / f"{datetime.now():%Y-%m-%dT%H-%M-%S}.trace.jsonl"
    trace.write(found, path)
    if as_json:
        told = {"requests": len(found.requests), "window_s": found.window_s, "texts": found.texts, "presets": list(found.presets)}
        render.as_json({"file": str(path), **told, "left_out": dict(found.left_out)})
        return
    render.out(f"{path}: {found.told()}" + (", with what was asked" if found.texts else ""))
    render.say(f"next: llmctl bench replay {path}")


def _time(option: str, text: str) -> float:
    """Seconds since 1970, of a time or of so long ago."""
    ago = re.fullmatch(r"[1-9][0-9]{0,5}[smhd]", text)
    try:
        return datetime.now().timestamp() - _span_s(text) if ago else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as exc:
        what = f"--{option} is {text!r}, but should be a time, or so long ago"
        raise Error(what, exit=Exit.USAGE, hint=f"--{option} 1h, or --{option} {datetime.now():%Y-%m-%dT%H:%M}") from exc


@command.command("replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("name", metavar="[PRESET]", required=False)
@click.option("--url", "urls", multiple=True, metavar="URL", help="Any OpenAI server, http://HOST:PORT#MODEL; may be repeated.")
@click.option("--key-env", metavar="NAME", help="The environment variable that holds the API key of those servers.")
@click.option("--speed", type=click.FloatRange(0.01, 1000), default=1.0, show_default=True, help="So many times as fast.")
@click.option("--repetitions", type=click.IntRange(1, 1000), default=1, show_default=True, help="With other words each time.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds for one request."
)
@click.option("--context", metavar="short|medium|long|N", help="As in `llmctl up`, whose options these four are.")
@click.option("--mode", metavar="NAME")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE")
@click.option("--model", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The result's file.  [default: in the data folder]")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def replay(
    file: Path,
    name: str | None,
    urls: tuple[str, ...],
    key_env: str | None,
    speed: float,
    repetitions: int,
    timeout_s: float,
    out: Path | None,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Ask again what FILE recorded, when it was asked, with prompts as long that have as much in common.

    Each request goes to the preset that it was for, or all of them to PRESET or to --url. Mooncake's traces are read, too.
    """
    from bench import trace
    from bench.ask import Level
    from bench.run import Order as Measurement

    measuring.check_place(out, ".json")
    found = trace.read(file)
    if name is None and not urls and rundir.read(paths.home().run) is None and len(found.presets) == 1:
        (name,) = found.presets
    if name is not None or urls:
        found = found.all_for("")
    with measuring.subjects(_order(name, options), urls, _key(key_env)) as targets:
        order = Measurement(
            *(found.workload(file.stem, repetitions), targets, (Level(name="replay"),), 0, secrets.token_hex(4), timeout_s),
            replayed=found,
            speed=speed,
        )
        measuring.measure(order, out, as_json=as_json)


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
