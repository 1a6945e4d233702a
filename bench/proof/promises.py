"""What is promised beside what was seen: the table that a bench ends with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from supervisor import render


@dataclass(frozen=True, slots=True)
class Line:
    """One promise and what came of it."""

    part: str
    what: str
    promised: str
    seen: str
    kept: bool


@dataclass(slots=True)
class Result:
    """All that was seen."""

    lines: list[Line] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    """The single measurements, by part."""
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = field(default_factory=list)
    """Titles, columns and rows."""

    def add(self, part: str, what: str, promised: str, seen: str, kept: bool) -> None:
        """One more line."""
        self.lines.append(Line(part, what, promised, seen, kept))

    def show(self, *, as_json: bool, load_average: float, **more: Any) -> int:  # noqa: ANN401
        """Print it, with ``more`` for JSON. Returns the exit code: 1 where a promise wasn't kept."""
        if as_json:
            render.as_json({"load_average": load_average, **more, **asdict(self)})
        else:
            render.out(f"{os.cpu_count()} CPUs; {load_average:.1f} processes were running when it began.\n")
            for title, columns, counts in self.tables:
                render.table(columns, counts, title=title)
                render.out("")
            rows = [[line.part, line.what, line.promised, line.seen, "yes" if line.kept else "NO"] for line in self.lines]
            render.table(["part", "what", "promised", "seen", "kept"], rows)
        return int(not all(line.kept for line in self.lines))
