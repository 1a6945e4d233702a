"""A result as one HTML file: pictures, the table, why a number may not be trusted, and all that decides about the numbers.

It needs nothing but itself: no script, no font, no address; its own Content-Security-Policy forbids them. Light or dark as the reader's
machine is. Each text of a result is escaped, and each number is one (``columns``): a server that was measured may say what it likes.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from bench import columns, figures, gauges, plots
from bench.chart import PALETTE, definitions, escaped, series, symbol
from bench.columns import known, plain
from bench.result import Point, Result
from bench.sample import Sample

SPREAD: Final = ("avg", *(f"p{share}" for share in figures.PERCENTILES), "min", "max", "std", "count")
LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""What can be written as a date."""
ARGV: Final = "argv"

STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1a1c1e;--dim:#5c6268;--rule:#d5d9dd;--grid:#e8ebee;--card:#f6f7f9;--bad:#b3261e;LIGHT}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e8ea;--dim:#a0a7ae;--rule:#3a4046;--grid:#262b30;--card:#1c2024;--bad:#ff8a80;DARK}}
@media print{:root{color-scheme:light;--bg:#fff;--fg:#000;--dim:#444;--rule:#bbb;--grid:#ddd;--card:#fff;--bad:#b3261e;LIGHT}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:20px 16px 48px;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 .4rem}h2{font-size:1.15rem;margin:2rem 0 .6rem}
p{margin:.3rem 0}.dim,figcaption span{color:var(--dim)}h1,p,li,td,dd,summary{overflow-wrap:anywhere}
.defs{position:absolute}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.5rem 0;padding:0;list-style:none}
.legend svg{width:14px;height:14px;vertical-align:-2px;margin-right:.4rem;overflow:visible}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px;align-items:start}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--rule);border-radius:8px;break-inside:avoid;min-width:0}
figcaption b,figcaption span{display:block}figcaption span{font-size:.87rem;line-height:1.4;margin-bottom:.4rem}
figure svg{display:block;width:100%;height:auto}
svg text{font-size:11px;fill:var(--dim)}svg .unit{font-size:11.5px}svg .name{fill:var(--c)}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--rule);fill:none}
.curve{stroke:var(--c);stroke-width:1.8;fill:none}.whisker{stroke:var(--c);stroke-width:1.8;fill:none}
.mark{fill:var(--c);stroke:var(--card);stroke-width:1}.dot{fill:var(--c);fill-opacity:.7}.small{stroke-width:.6}
.mark:hover,.dot:hover{stroke:var(--fg);stroke-width:1.5;fill-opacity:1}
.wait{fill:var(--c);fill-opacity:.3}.answer{fill:var(--c)}g:hover>.wait,g:hover>.answer{stroke:var(--fg)}
.fault{stroke:var(--bad);stroke-width:2;fill:none}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap;vertical-align:bottom}
th{font-weight:600;line-height:1.3}
.l{text-align:left}.wide td:last-child{white-space:normal;text-align:left;min-width:16rem}
.flags li{margin:.2rem 0}.flags b{color:var(--bad)}
details{border-bottom:1px solid var(--rule)}summary{cursor:pointer;padding:.35rem 0}
dl{display:grid;grid-template-columns:minmax(6rem,max-content) 1fr;gap:.15rem 1rem;margin:.3rem 0 1rem;font-size:.9rem}
dt{color:var(--dim)}dd{margin:0}code{font:.85rem/1.5 ui-monospace,monospace}
@media(max-width:480px){figure{padding:8px}body{padding:14px 10px 40px}svg text{font-size:12.5px}}
@media print{html{font-size:11px}body{max-width:none;padding:0;font-size:11px}.scroll{overflow:visible}th,td{padding:.15rem .35rem}
table{font-size:8.5px}details::details-content{content-visibility:visible;block-size:auto}.plots{grid-template-columns:1fr 1fr}}
"""


def render(result: Result, samples: Sequence[Sample]) -> str:
    """The page, a whole document. ``samples`` may be none: then what shows single requests is left out."""
    name = _title(result)
    body = (
        f"<h1>{escaped(name)}</h1>",
        _lead(result),
        _flags(result),
        _pictures(result, samples),
        _table(result),
        _percentiles(result),
        _manifest(result),
        _formulas(result),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(name)}</title><style>{_style()}</style></head><body>\n{definitions()}"
        + "\n".join(each for each in body if each)
        + "\n</body></html>\n"
    )


def _style() -> str:
    light, dark = ("".join(f"--{series(number)}:{colours[which]};" for number, colours in enumerate(PALETTE)) for which in (0, 1))
    own = "".join(f".{series(number)}{{--c:var(--{series(number)})}}" for number in range(len(PALETTE)))
    return STYLE.replace("LIGHT", light).replace("DARK", dark) + own


def _title(result: Result) -> str:
    names = ", ".join(each.name for each in result.manifest.subjects)
    return plain(f"{names} by {result.manifest.workload.name}", 200)


def _lead(result: Result) -> str:
    """What was asked of whom, where, and the outcome in a sentence each."""
    manifest = result.manifest
    created_at = min(known(manifest.created_at) or 0.0, LATEST)
    when = f"{datetime.fromtimestamp(created_at, UTC):%Y-%m-%d %H:%M} UTC"
    about = f"{columns.measured(manifest.workload)}. Measured {when} by llmctl {manifest.llmctl} on {columns.machine(result)}."
    lines = [f'<p class="dim">{escaped(plain(about))}</p>']
    if result.cut_short:
        lines.append("<p><b>Ended before its end:</b> what is here was measured whole.</p>")
    if result.interleaved:
        lines.append('<p class="dim">Measured in turns, so that they can be compared.</p>')
    items = "".join(f"<li>{escaped(each)}</li>" for each in _outcomes(result))
    return "\n".join(lines) + (f"<ul>{items}</ul>" if items else "")


def _outcomes(result: Result) -> Iterable[str]:
    for subject in result.manifest.subjects:
        rates = [
            (rate, each)
            for each in result.points
            if each.target == subject.name and (rate := columns.metric(each, "output_token_throughput", "avg")) is not None
        ]
        if not rates:
            continue
        first = rates[0][1]
        ttft, itl = (columns.metric(first, tag, "p50") for tag in ("time_to_first_token", "inter_token_latency"))
        parts = [f"{columns.short(rates[0][0])} tokens/s at {first.level}"]
        parts += [] if ttft is None else [f"first token after {columns.short(ttft)} ms"]
        parts += [] if itl is None else [f"then one each {columns.short(itl)} ms"]
        most, where = max(rates, key=lambda each: each[0])
        parts += [f"at most {columns.short(most)} in all, at {where.level}"] * (len(rates) > 1)
        yield plain(f"{subject.name}: {', '.join(parts)}")


def _flags(result: Result) -> str:
    items = []
    for point in result.points:
        for flag in point.flags:
            word, _, sentence = plain(flag).partition(": ")
            items.append(
                f"<li><b>{escaped(word)}</b> {escaped(plain(f'{point.target}, {point.level}'))}: {escaped(sentence)}</li>"
            )
    items += [f"<li>{escaped(each)}</li>" for each in columns.failures(result)]
    if not items:
        return "<h2>Can it be trusted?</h2><p>Nothing speaks against it: no flag, no failed request.</p>"
    return f'<h2>Can it be trusted?</h2><ul class="flags">{"".join(items)}</ul>'


def _pictures(result: Result, samples: Sequence[Sample]) -> str:
    found = plots.plots(result, samples)
    if not found:
        return ""
    figures_ = "".join(
        f"<figure><figcaption><b>{escaped(each.title)}</b><span>{escaped(each.about)}</span></figcaption>{each.svg}</figure>"
        for each in found
    )
    return f'<h2>Pictures</h2>{_legend(result)}<div class="plots">{figures_}</div>'


def _legend(result: Result) -> str:
    """Which mark is whose."""
    marks = "".join(
        f'<li><svg viewBox="-7 -7 14 14" aria-hidden="true"><use href="#m{symbol(number)}" class="mark {series(number)}"/></svg>'
        f"{escaped(plain(each.name, 60))}</li>"
        for number, each in enumerate(result.manifest.subjects)
    )
    return f'<ul class="legend">{marks}</ul>'


def _table(result: Result) -> str:
    """The terminal's table."""
    if not result.points:
        return ""
    found = columns.columns(result)
    decimals = [columns.digits([each.of(point) for point in result.points]) for each in found]
    head = "".join(f"<th>{escaped(each.name).replace(' ', '<br>')}</th>" for each in found)
    rows = "".join(
        f'<tr><td class="l">{escaped(plain(point.target, 60))}</td><td class="l">{escaped(plain(point.level, 60))}</td>'
        + "".join(f"<td>{columns.written(each.of(point), places)}</td>" for each, places in zip(found, decimals, strict=True))
        + "</tr>"
        for point in result.points
    )
    return (
        '<h2>Table</h2><div class="scroll"><table><thead><tr><th class="l">subject</th><th class="l">level</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _percentiles(result: Result) -> str:
    """Every figure of every point, and every repetition."""
    parts = [
        f"<details><summary>{escaped(plain(f'{each.target}, {each.level}'))}</summary>{_spreads(each)}{_repetitions(each)}</details>"
        for each in result.points
    ]
    return f"<h2>All percentiles and repetitions</h2>{''.join(parts)}" if parts else ""


def _spreads(point: Point) -> str:
    head = "".join(f"<th>{name}</th>" for name in SPREAD)
    rows = []
    for figure in figures.FIGURES:
        numbers = [columns.metric(point, figure.tag, name) for name in SPREAD]
        if any(number is not None for number in numbers):
            places = columns.digits(numbers[:-1])
            cells = [columns.written(number, places) for number in numbers[:-1]] + [columns.written(numbers[-1], 0)]
            over = "requests" if figure.of else "repetitions"
            name = f'<td class="l">{escaped(figure.name)}</td><td class="l">{escaped(figure.unit)}</td><td class="l">{over}</td>'
            rows.append(f"<tr>{name}{''.join(f'<td>{each}</td>' for each in cells)}</tr>")
    first = '<th class="l">figure</th><th class="l">unit</th><th class="l">over</th>'
    return f'<div class="scroll"><table><thead><tr>{first}{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _repetitions(point: Point) -> str:
    """A column a repetition: its figures, and what the machine showed."""
    rows = [("began", "s", [known(each.began_s) for each in point.repetitions])]
    rows.append(("duration", "s", [known(each.duration_s) for each in point.repetitions]))
    rows += [(each.name, each.unit, [known(one.values.get(each.tag)) for one in point.repetitions]) for each in figures.FIGURES]
    rows += [(each.name, each.unit, [known(one.gauges.get(each.name)) for one in point.repetitions]) for each in gauges.GAUGES]
    head = "".join(f"<th>{at + 1}</th>" for at in range(len(point.repetitions)))
    body = "".join(
        f'<tr><td class="l">{escaped(name)}</td><td class="l">{escaped(unit)}</td>'
        + "".join(f"<td>{columns.written(number, columns.digits(numbers))}</td>" for number in numbers)
        + "</tr>"
        for name, unit, numbers in rows
        if any(number is not None for number in numbers)
    )
    first = '<th class="l">repetition</th><th class="l">unit</th>'
    return f'<div class="scroll"><table><thead><tr>{first}{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _manifest(result: Result) -> str:
    """Every field that there is something in."""
    manifest = result.manifest
    own = {
        each.name: getattr(manifest, each.name)
        for each in dataclasses.fields(manifest)
        if each.name not in ("workload", "subjects", "machine", "generator")
    }
    own["created_at"] = f"{manifest.created_at} s since 1970"
    parts = [_fields("run", own), _fields("workload", manifest.workload.as_dict())]
    parts += [_fields(f"subject {each.name}", dataclasses.asdict(each)) for each in manifest.subjects]
    parts += [_fields("machine", dataclasses.asdict(manifest.machine)), _fields("load generator", manifest.generator)]
    return f"<h2>What decides about these numbers</h2>{''.join(parts)}"


def _fields(title: str, told: Mapping[str, object]) -> str:
    rows = "".join(
        f"<dt>{escaped(plain(name))}</dt><dd>{_value(name, value)}</dd>" for name, value in told.items() if _there(value)
    )
    return f"<h3>{escaped(plain(title, 200))}</h3><dl>{rows}</dl>" if rows else ""


def _there(value: object) -> bool:
    return value is not None and value != "" and value != () and value != []


def _value(name: str, value: object) -> str:
    if name == ARGV and isinstance(value, list | tuple):
        return f"<code>{escaped(plain(shlex.join(map(str, value)), 20_000))}</code>"
    return escaped(plain(", ".join(map(str, value)) if isinstance(value, list | tuple) else value))


def _formulas(result: Result) -> str:
    """What each figure and each gauge is, of those that are here."""
    seen = {tag for point in result.points for tag in point.metrics}
    shown = {name for point in result.points for each in point.repetitions for name in each.gauges}
    rows = [(each.name, each.unit, each.formula) for each in figures.FIGURES if each.tag in seen]
    rows += [(each.name, each.unit, each.help) for each in gauges.GAUGES if each.name in shown]
    if not rows:
        return ""
    body = "".join(
        f'<tr><td class="l">{escaped(name)}</td><td class="l">{escaped(unit)}</td><td>{escaped(told)}</td></tr>'
        for name, unit, told in rows
    )
    return (
        '<h2>What each figure is</h2><div class="scroll"><table class="wide"><thead><tr><th class="l">figure</th><th class="l">unit</th>'
        f'<th class="l">formula</th></tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="dim">{escaped(columns.generator(result))}</p>'
    )
