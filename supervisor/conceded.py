"""What was given up after running out of memory: one small JSON file a model file, engine, card and preset, until the user asks anew.

The next start then doesn't run out at the same place. A file that can't be read or written costs this memory and nothing else. What it
says is judged by the next plan (:func:`supervisor.plan.make`), which leaves out what no longer goes with the preset; a model among it is
taken only if the preset's fallback names the very same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from supervisor import kept
from supervisor.hardware import Card
from supervisor.model import Hub, Model, Wheel
from supervisor.paths import Home
from supervisor.plan import Step
from supervisor.value import Value

log = logging.getLogger("llmctl.conceded")

MOST: Final = 64
"""Steps: a fallback has at most 32 rungs (``profile.MOST_RUNGS``), and layers leave the card a tenth at a time."""
MOST_WORDS: Final = 200
"""Characters of a reason, which is shown."""


def load(home: Home, file: Path, engine: str, card: Card | None, preset: str) -> tuple[Step, ...]:
    """The steps that ``preset`` (a name) begins with; ``file`` is of the model that it asks for with nothing given up.

    ``engine`` is the engine's identity; ``card`` is None on the CPU.
    """
    try:
        found = json.loads(_path(home, file, engine, card, preset).read_text())
        return tuple(_read(each) for each in found) if len(found) <= MOST else ()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # damaged, or another version's
        return ()


def keep(home: Home, file: Path, engine: str, card: Card | None, preset: str, steps: Sequence[Step]) -> None:
    """Remember these in the place of those before. Arguments as :func:`load`'s."""
    path = _path(home, file, engine, card, preset)
    kept.write(path, json.dumps([_written(step) for step in steps], indent=1))
    if load(home, file, engine, card, preset) != tuple(steps):
        log.warning("what %s gave up can't be kept in %s: a later start runs out of memory once more", preset, path)


def forget(home: Home, file: Path, engine: str, card: Card | None, preset: str) -> None:
    """Begin with what is asked again. Arguments as :func:`load`'s."""
    path = _path(home, file, engine, card, preset)
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("what %s gave up can't be forgotten: %s", preset, exc)


def any_kept(home: Home) -> bool:
    """Whether anything is remembered of any preset."""
    return next((home.data / "conceded").glob("*.json"), None) is not None


def _written(step: Step) -> dict[str, Any]:
    changes = {name: asdict(value) if isinstance(value, Model) else value for name, value in step.changes.items()}
    return {"changes": changes, "why": step.why}


def _read(each: Mapping[str, Any]) -> Step:
    """One step. Raises ValueError for what is none."""
    why = str(each["why"])
    changes = {str(name): _value(value) for name, value in each["changes"].items()}
    if not changes or len(why) > MOST_WORDS or not why.isprintable():
        raise ValueError(f"{each!r} is no step")
    return Step(changes, why)


def _value(written: object) -> Value | Model | None:
    if isinstance(written, dict):
        hub, wheel = written.pop("hub"), written.pop("wheel")
        return Model(**written, hub=Hub(**hub) if hub else None, wheel=Wheel(**wheel) if wheel else None)
    if written is not None and not isinstance(written, bool | int | float | str):
        raise ValueError(f"{written!r} is no option's value")
    return written


def _path(home: Home, file: Path, engine: str, card: Card | None, preset: str) -> Path:
    about = f"{kept.identity(file)} {engine} {card.uuid if card else 'CPU'} {preset}"
    return home.data / "conceded" / f"{kept.name(about)}.json"
