"""What the engine allocated at past starts: one small JSON file a model file and engine, which corrects the next plan.

Only the newest starts are kept. A file that can't be read or written costs a correction and nothing else: the plan is then a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from supervisor import kept
from supervisor.paths import Home
from supervisor.plan import Allocated

KEEP: Final = 64
"""Starts a file; each is some 400 bytes."""
MOST_BYTES: Final = 1 << 50
"""Of a term: more isn't a measurement."""


def load(home: Home, file: Path, engine: str) -> Sequence[Allocated]:
    """What ``engine`` (its key) allocated for this model file, newest first."""
    try:
        return tuple(_read(each) for each in json.loads(_path(home, file, engine).read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # damaged, or another version's
        return ()


def keep(home: Home, file: Path, engine: str, seen: Allocated) -> None:
    """Add a start, in the place of an earlier one with the same settings."""
    starts = [seen, *(each for each in load(home, file, engine) if each.settings != seen.settings)][:KEEP]
    kept.write(_path(home, file, engine), json.dumps([asdict(each) for each in starts], indent=1))


def _read(each: dict[str, Any]) -> Allocated:
    """One start. Raises ValueError for what can't be true."""
    found = Allocated(str(each["settings"]), str(each["weights"]), each["device"], each["host"])
    for term, count in (*found.device.items(), *found.host.items()):
        if type(count) is not int or not 0 <= count < MOST_BYTES:
            raise ValueError(f"{term} is {count!r}")
    return found


def _path(home: Home, file: Path, engine: str) -> Path:
    return home.data / "measured" / f"{kept.name(f'{kept.identity(file)} {engine}')}.json"
