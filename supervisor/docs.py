"""The parts of README.md that the code knows better: ``python -m supervisor.docs`` writes them, ``--check`` fails when they are stale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from supervisor import lifecycle, preset

README = Path(__file__).parent.parent / "README.md"


def options() -> str:
    """The table of a preset's options."""
    rows = ["| option | default | llama-server | |", "|---|---|---|---|"]
    for name, field in preset.options().items():
        extra = field.json_schema_extra
        words = " ".join(get_args(field.annotation))
        about = field.description + (f" ({extra['unit']})" if extra["unit"] else "") + (f": {words}" if words else "")
        rows.append(f"| `{name}` | {field.default} | `{extra['flag']}` | {about} |")
    return "\n".join(rows)


def states() -> str:
    """The diagram of a child's life, from the table that decides it."""
    edges = [
        f"    {state.name} --> {after.name}: {event.value.replace('_', ' ')}"
        for state, moves in lifecycle.TRANSITIONS.items()
        for event, after in moves.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> STOPPED", *edges, "```"])


def render(text: str) -> str:
    """The page with its generated parts made anew."""
    for name, part in (("options", options()), ("states", states())):
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n\n{part}\n\n{end}{after}"
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
