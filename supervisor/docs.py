"""The parts of README.md that the code knows better: ``python -m supervisor.docs`` writes them, ``--check`` fails when they are stale."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from supervisor import config, lifecycle, metrics, paths, preset, profile, record
from supervisor import option as declared
from supervisor.units import size

README = Path(__file__).parent.parent / "README.md"


def options() -> str:
    """The table of a preset's options, and of its blocks."""
    rows = ["| option | default | takes | llama-server | |", "|---|---|---|---|---|"]
    for option in declared.options().values():
        default = option.kind.write(option.default)
        flag = f"`{option.flag}`" if option.flag else ""
        takes = f"{option.kind.told} {option.unit}".strip()
        rows.append(f"| `{option.name}` | {default} | {takes} | {flag} | {option.help} |")
    rows += [f"| `{name}` | | | | {told} |" for name, told in (profile.MODELS | profile.BLOCKS).items()]
    return "\n".join(rows)


def presets() -> str:
    """The table of the shipped presets."""
    rows = ["| preset | for | model | context | modes |", "|---|---|---|---|---|"]
    for path in sorted(paths.data_folder("presets").glob("*.yaml")):
        made = preset.read(path)
        model = made.model.file.removesuffix(".gguf") + (f", {size(made.model.bytes)}" if made.model.bytes else "")
        sizes = ((name, preset.read(path, context=name)) for name in made.contexts)
        others = [f"{name} {each.context:,}" for name, each in sizes if each.context != made.context]
        context = f"{made.context:,}" + (f" ({', '.join(others)})" if others else "")
        rows.append(f"| `{made.name}` | {made.machine} | {model} | {context} | {', '.join(made.modes)} |")
    return "\n".join(rows)


def memory() -> str:
    """How far the estimate is from what the engine allocated, in the runs that were recorded."""
    from bench.proof import memory as bench  # the one way round: what is measured is bench's, and the page is made of it

    kept = bench.recorded()
    drawn = sum(len(each.rows) for each in kept if each.drawn)
    rows = ["| of the memory | runs | most over, MiB | most under, MiB | in percent |", "|---|---|---|---|---|"]
    rows += [f"| {' | '.join(map(str, line))} |" for line in bench.summary(kept)]
    count = sum(len(each.rows) for each in kept)
    return f"{count} runs of {kept[0].engine}, {drawn} of them drawn by chance:\n\n" + "\n".join(rows)


def records() -> str:
    """The fields of a record, and of what answered."""
    rows = ["| field | unit | |", "|---|---|---|"]
    for of in (record.Record, record.Run):
        rows += [f"| `{name}` | {each['unit']} | {each['help']} |" for name, each in record.columns(of).items()]
    return "\n".join(rows)


def metric_names() -> str:
    """What ``/metrics`` tells."""
    rows = ["| metric | kind | labels | |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {kind} | {labels} | {told} |" for name, kind, labels, told in metrics.rows()]
    return "\n".join(rows)


def settings() -> str:
    """The settings of ``config.yaml``."""
    rows = ["| setting | default | |", "|---|---|---|"]
    default = config.worded(config.Config())
    for name, each in config.settings().items():
        rows.append(f"| `{name}` | {f'{default[name]} {each.unit}' if default[name] else ''} | {each.help} |")
    return "\n".join(rows)


def states() -> str:
    """The diagram of a child's life, from the table that decides it."""
    edges = [
        f"    {state.name} --> {after.name}: {event.value.replace('_', ' ')}"
        for state, moves in lifecycle.TRANSITIONS.items()
        for event, after in moves.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> STOPPED", *edges, "```"])


def figures() -> str:
    """What ``llmctl bench`` reckons."""
    from bench import figures

    rows = ["| figure | in the files | unit | |", "|---|---|---|---|"]
    rows += [f"| {each.name} | `{each.tag}` | {each.unit} | {each.formula} |" for each in figures.FIGURES]
    return "\n".join(rows)


def workloads() -> str:
    """What it asks for, and what a file of one's own may say."""
    from bench import workload

    rows = ["| workload | for | prompt | shared | answer | users |", "|---|---|---|---|---|---|"]
    for each in map(workload.load, workload.names()):
        cells = (f"`{each.name}`", each.about, each.prompt, each.shared or "", each.answer, ", ".join(each.concurrency))
        rows.append(f"| {' | '.join(map(str, cells))} |")
    rows += ["", "| in a workload's file | takes | |", "|---|---|---|"]
    for name, option in workload.options().items():
        about = option.metadata
        takes = f"{about['kind'].told} {about['unit']}".strip()
        rows.append(f"| `{name}` | {takes} | {about['help']} |")
    return "\n".join(rows)


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "figures": figures,
    "memory": memory,
    "metrics": metric_names,
    "options": options,
    "presets": presets,
    "records": records,
    "settings": settings,
    "states": states,
    "workloads": workloads,
}
"""Each stands between ``<!-- name -->`` and ``<!-- /name -->``."""


def render(text: str) -> str:
    """The page with its generated parts made anew."""
    for name, part in PARTS.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        assert found, f"README.md has no {start}"
        assert closed, f"README.md has no {end}"
        text = f"{before}{start}\n\n{part()}\n\n{end}{after}"
    return text


def main() -> None:
    """Write the page, or with ``--check`` exit with 1 when it would change."""
    old = README.read_text()
    new = render(old)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == old else "error: README.md is stale\ntry: make fix")
    README.write_text(new)


if __name__ == "__main__":
    main()
