"""The header of a preset's model, from the surest place that is at hand.

(1) The file itself, if it is here. (2) The copy kept from the last time that the true header was read. (3) The hub, by range requests, if
asked to go online: 11 MB of a file of gigabytes. (4) The condensed header that ships with the preset, whose ``assumed`` says whether it was
ever read from the very file.

A true header is kept in its condensed form, since a vocabulary of 248,320 words takes longer to skip than everything else a plan does.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Final

from supervisor import gguf, kept, store
from supervisor.errors import Error, Exit
from supervisor.gguf import Header
from supervisor.model import Model
from supervisor.paths import Home

FOLDER: Final = "headers"


def find(home: Home, model: Model, *, online: bool = False) -> Header:
    """The header of a model that may not be here yet. Raises :class:`Error` (exit code 6)."""
    path = store.path(home, model)
    if store.have(home, model):  # (1)
        return local(home, path)
    place = _place(home, f"{model.file} {model.sha256}")
    if place.is_file():  # (2)
        with contextlib.suppress(Error):
            return _load(place)
    if online and model.hub is not None:  # (3)
        from supervisor import hub  # an HTTP client, which no other way needs

        with hub.Remote(model.hub.repository, model.hub.revision, model.file) as remote:
            return _keep(place, gguf.read(remote))
    if model.header_file:  # (4)
        return _load(model.header_file)
    if model.path:
        return gguf.read(path)  # which says what is wrong with it
    raise Error(
        f"the header of {model.file} isn't known here", exit=Exit.MODEL, hint="the same with --online reads it from the hub"
    )


def local(home: Home, path: Path) -> Header:
    """The header of a file that is here."""
    place = _place(home, kept.identity(path))
    if place.is_file():
        with contextlib.suppress(Error):
            return _load(place)
    return _keep(place, gguf.read(path))


def _place(home: Home, about: str) -> Path:
    return home.cache / FOLDER / f"{kept.name(about)}.json"


def _load(path: Path) -> Header:
    try:
        return gguf.expand(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise Error(f"{path} is no condensed header: {exc}", exit=Exit.MODEL, hint=f"rm {path}") from exc


def _keep(place: Path, header: Header) -> Header:
    kept.write(place, json.dumps(gguf.condense(header)))
    return header
