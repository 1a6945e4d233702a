"""Engines: which llama-server we run, what it is and what it can do.

An engine is a folder of llama.cpp's binaries under ``home.engines``, named by its key (``supervisor.build`` says what a key is made of),
with a ``manifest.json`` that says how it came to be; the link ``current`` names the picked one. ``LLMCTL_ENGINE=/path/llama-server`` wins
over it and has no manifest: its ``--version`` is read instead.

A folder without a readable manifest is no engine: an install is one rename, so half of one can't be met here. Which builds are broken,
and which one is ours, is data: ``build/pin.yaml``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from supervisor import paths
from supervisor.errors import Error, Exit

SERVER: Final = "llama-server"
CURRENT: Final = "current"
MANIFEST: Final = "manifest.json"
EXTERNAL: Final = "external"
"""Key and variant of an engine named by LLMCTL_ENGINE."""
ASK_TIMEOUT_S: Final = 20.0
"""For ``--version`` and ``--help``: 0.03 s on a quiet box; a CUDA engine first maps 500 MB of cuBLAS from a cold disk."""
_VERSION: Final = re.compile(r"^version: (?P<version>\S+) \(build (?P<build>\d+), commit (?P<commit>\w+)\)", re.MULTILINE)
_OLD_VERSION: Final = re.compile(r"^version: (?P<build>\d+) \((?P<commit>\w+)\)", re.MULTILINE)
_FLAG_LINE: Final = re.compile(r"^(-{1,2}[A-Za-z0-9][\w.-]*(?:,\s+-{1,2}[A-Za-z0-9][\w.-]*)*)")


@dataclass(frozen=True, slots=True)
class Denial:
    """A range of builds that must not run, both ends included."""

    first: int
    last: int
    why: str


@dataclass(frozen=True, slots=True)
class Pin:
    """The llama.cpp this llmctl is made for: where it comes from, and the builds it refuses."""

    build: int
    commit: str
    git: str
    sdist_name: str
    sdist_version: str
    sdist_sha256: str
    sdist_folder: str
    denied: tuple[Denial, ...]

    def refusal(self, build: int) -> str | None:
        """Why a build must not run, or None."""
        return next((d.why for d in self.denied if d.first <= build <= d.last), None)


@functools.cache
def pin() -> Pin:
    """``build/pin.yaml``."""
    raw = yaml.safe_load((paths.data_folder("build") / "pin.yaml").read_text())
    sdist = raw["sdist"]
    return Pin(
        build=raw["build"],
        commit=raw["commit"],
        git=raw["git"],
        sdist_name=sdist["name"],
        sdist_version=str(sdist["version"]),
        sdist_sha256=sdist["sha256"],
        sdist_folder=sdist["folder"],
        denied=tuple(Denial(d["first"], d["last"], d["why"]) for d in raw["denied"]),
    )


@dataclass(frozen=True, slots=True)
class Version:
    """What ``llama-server --version`` says."""

    version: str
    build: int
    commit: str


@dataclass(frozen=True, slots=True)
class Engine:
    """One llama-server and the tools beside it."""

    server: Path
    key: str
    variant: str
    build: int
    """0 where the binary does not know (built outside git without the numbers set)."""
    commit: str
    compiler: str = ""
    cuda: str = ""
    """CUDA toolkit version, ``13.0``; empty for an engine without CUDA."""
    arch: str = ""
    """GPU architecture compiled for, ``86``; empty without CUDA."""
    fa_pairs: tuple[str, ...] = ()
    """K/V cache types with a compiled CUDA flash-attention kernel, ``q8_0-q8_0``."""
    source: str = ""
    """Where the tree came from: ``submodule``, ``git``, ``sdist`` or a folder."""
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    sha256: Mapping[str, str] = field(default_factory=dict, hash=False)
    """File name → checksum, of every file that was compiled."""
    built_at: str = ""
    """UTC, ISO 8601."""

    @property
    def folder(self) -> Path:
        """Where the binaries lie."""
        return self.server.parent

    @property
    def identity(self) -> str:
        """What distinguishes it from every other: its key, or the path, build, size and time of one that we did not build."""
        if self.key != EXTERNAL:
            return self.key
        stat = self.server.stat()
        return f"{self.server} b{self.build} {stat.st_size} {stat.st_mtime_ns}"

    @property
    def known(self) -> bool:
        """Whether this is the pinned build that llmctl was tried with."""
        return self.build == pin().build and pin().commit.startswith(self.commit[:9])

    @property
    def title(self) -> str:
        """``b11312 (0c1e57098), native, CUDA 13.0 sm_86``."""
        name = f"b{self.build} ({self.commit[:9]}), {self.variant}"
        return name + (f", CUDA {self.cuda} sm_{self.arch.replace(';', ', sm_')}" if self.cuda else "")

    def tool(self, name: str) -> Path:
        """The path of a tool beside the server, ``llama-bench``; Error if this engine lacks it."""
        path = self.folder / name
        if not os.access(path, os.X_OK):
            raise Error(f"the engine in {self.folder} has no {name}", exit=Exit.ENGINE, hint="llmctl build")
        return path

    def __repr__(self) -> str:
        return f"<Engine {self.key} {self.title}>"


def parse_version(text: str) -> Version | None:
    """The version in the output of ``--version``; None if there is none in it."""
    if found := _VERSION.search(text):
        return Version(found["version"], int(found["build"]), found["commit"])
    if found := _OLD_VERSION.search(text):
        return Version("", int(found["build"]), found["commit"])
    return None


class Flags(Set[str]):
    """The flags that a server takes, short and long, in the groups that ``--help`` lists them in: ``-c`` and ``--ctx-size`` are one."""

    __slots__ = ("_groups",)

    def __init__(self, groups: Iterable[tuple[str, ...]]) -> None:
        self._groups = {flag: group for group in groups for flag in group}

    def group(self, flag: str) -> tuple[str, ...]:
        """All spellings of a flag, itself too; nothing for one that the server doesn't take."""
        return self._groups.get(flag, ())

    def __contains__(self, flag: object) -> bool:
        return flag in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        return f"<Flags {len(self)} in {len(set(self._groups.values()))} groups>"


def parse_help(text: str) -> Flags:
    """Every flag that the output of ``--help`` lists."""
    lines = (_FLAG_LINE.match(line) for line in text.splitlines())
    return Flags(tuple(flag.strip() for flag in line[1].split(",")) for line in lines if line)


def locate(home: paths.Home, env: Mapping[str, str] = os.environ) -> Engine:
    """The engine to run: (1) the one ``LLMCTL_ENGINE`` names, (2) the picked one; Error if there is none or its build is broken."""
    if path := env.get("LLMCTL_ENGINE"):  # (1)
        return external(Path(path).expanduser().absolute())
    link = home.engines / CURRENT  # (2)
    if not link.is_symlink():
        raise Error("there is no engine yet: llama.cpp has not been built", exit=Exit.ENGINE, hint="llmctl build")
    return _checked(read(link.resolve()))


def chosen(home: paths.Home, env: Mapping[str, str] = os.environ) -> bool:
    """Whether :func:`locate` has one to look at."""
    return bool(env.get("LLMCTL_ENGINE")) or (home.engines / CURRENT).is_symlink()


def external(server: Path) -> Engine:
    """An engine that we did not build, read from its ``--version``, which is asked once per file and process: each start plans anew."""
    if not os.access(server, os.X_OK) or server.is_dir():
        what = "is not executable" if server.exists() else "does not exist"
        raise Error(f"the engine {server} {what}", exit=Exit.ENGINE, hint="LLMCTL_ENGINE=/path/to/llama-server, or unset it")
    version = _version(server, _identity(server))
    return _checked(Engine(server, EXTERNAL, EXTERNAL, version.build, version.commit))


@functools.cache
def _version(server: Path, identity: tuple[int, ...]) -> Version:
    said = ask(server, "--version")
    version = parse_version(said)
    if version is None:
        first = said.strip().splitlines()[0] if said.strip() else "nothing"
        raise Error(f"{server} is not a llama-server: --version says {first!r}", exit=Exit.ENGINE, hint="unset LLMCTL_ENGINE")
    return version


def _identity(server: Path) -> tuple[int, ...]:
    """What changes when the file does."""
    stat = server.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read(folder: Path) -> Engine:
    """The engine in a folder of the store, from its manifest."""
    try:
        raw: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return Engine(
            server=folder / SERVER,
            key=raw["key"],
            variant=raw["variant"],
            build=raw["build"],
            commit=raw["commit"],
            compiler=raw["compiler"],
            cuda=raw["cuda"],
            arch=raw["arch"],
            fa_pairs=tuple(raw["fa_pairs"]),
            source=raw["source"],
            options=raw["options"],
            sha256=raw["sha256"],
            built_at=raw["built_at"],
        )
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise Error(f"{folder} holds no engine: {exc}", exit=Exit.ENGINE, hint="llmctl build") from exc


def manifest(engine: Engine) -> dict[str, Any]:
    """What :func:`read` reads back, and what ``engine list --json`` shows."""
    return {
        "key": engine.key,
        "variant": engine.variant,
        "build": engine.build,
        "commit": engine.commit,
        "compiler": engine.compiler,
        "cuda": engine.cuda,
        "arch": engine.arch,
        "fa_pairs": list(engine.fa_pairs),
        "source": engine.source,
        "options": dict(engine.options),
        "sha256": dict(engine.sha256),
        "built_at": engine.built_at,
    }


def installed(home: paths.Home) -> list[Engine]:
    """Every engine in the store, newest first."""
    folders = home.engines.glob(f"[!.]*/{MANIFEST}") if home.engines.is_dir() else ()
    engines = []
    for path in folders:
        with contextlib.suppress(Error):
            engines += [] if path.parent.is_symlink() else [read(path.parent)]
    return sorted(engines, key=lambda engine: engine.built_at, reverse=True)


def current(home: paths.Home) -> str | None:
    """The key of the picked engine."""
    link = home.engines / CURRENT
    return link.readlink().name if link.is_symlink() else None


def find(home: paths.Home, key: str) -> Engine:
    """The installed engine whose key begins so; Error if none or several do."""
    keys = {engine.key: engine for engine in installed(home) if engine.key.startswith(key)}
    if len(keys) != 1 or not key:
        what = f"{len(keys)} engines begin with {key!r}" if keys else f"no engine is called {key!r}"
        raise Error(what, exit=Exit.ENGINE, hint="llmctl engine list")
    return next(iter(keys.values()))


def use(home: paths.Home, key: str) -> Engine:
    """Pick an engine: from the next start on, it is the one that runs."""
    engine = _checked(find(home, key))
    link, fresh = home.engines / CURRENT, home.engines / f".{CURRENT}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(engine.key)
    fresh.replace(link)
    return engine


def remove(home: paths.Home, key: str) -> Engine:
    """Delete an engine; if it was the picked one, none is picked afterwards."""
    engine = find(home, key)
    if current(home) == engine.key:
        (home.engines / CURRENT).unlink(missing_ok=True)
    doomed = home.engines / f".removed.{engine.key}.{os.getpid()}"
    engine.folder.rename(doomed)
    shutil.rmtree(doomed)
    return engine


def capabilities(engine: Engine) -> Flags:
    """Every flag, short and long, that this server takes; asked once per file and process."""
    return _capabilities(engine.server, _identity(engine.server))


@functools.cache
def _capabilities(server: Path, identity: tuple[int, ...]) -> Flags:
    flags = parse_help(ask(server, "--help"))
    if not flags:
        raise Error(f"{server} --help lists no flag", exit=Exit.ENGINE, hint="llmctl build")
    return flags


def sha256(path: Path) -> str:
    """A file's checksum, as the manifest keeps it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damaged(engine: Engine) -> list[str]:
    """The files of an engine whose content isn't what was built."""
    return [n for n, digest in engine.sha256.items() if not (engine.folder / n).is_file() or sha256(engine.folder / n) != digest]


def clean_env(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without the variables and the user's ``config.ini`` by which llama.cpp would be told things behind our back."""
    kept = {k: v for k, v in env.items() if not k.startswith(("LLAMA_", "GGML_", "AIP_"))}
    return kept | {"XDG_CONFIG_HOME": "/nonexistent"}


def ask(server: Path, *arguments: str) -> str:
    """What a short command of the engine prints on stdout and stderr; Error if it can't run or fails."""
    try:
        done = subprocess.run(
            [str(server), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=clean_env(),
            timeout=ASK_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except OSError as exc:
        raise Error(f"the engine {server} can't be run: {exc.strerror}", exit=Exit.ENGINE, hint="llmctl build") from exc
    except subprocess.TimeoutExpired as exc:
        what = f"the engine {server} gave no answer to {' '.join(arguments)} within {ASK_TIMEOUT_S:.0f} s"
        raise Error(what, exit=Exit.ENGINE, hint="llmctl build") from exc
    if done.returncode == -4:
        what = f"the engine {server} was compiled for another CPU (illegal instruction)"
        raise Error(what, exit=Exit.ENGINE, hint="llmctl build")
    if done.returncode != 0:
        last = done.stdout.strip().splitlines()[-1:] or ["nothing"]
        what = f"the engine {server} {' '.join(arguments)} ended with {done.returncode}: {last[0]}"
        raise Error(what, exit=Exit.ENGINE, hint="llmctl build")
    return done.stdout


def _checked(engine: Engine) -> Engine:
    if why := pin().refusal(engine.build):
        what = f"llama.cpp b{engine.build} at {engine.server} must not be used: {why}"
        raise Error(what, exit=Exit.ENGINE, hint=f"llmctl build (makes b{pin().build})")
    return engine
