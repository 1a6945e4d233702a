"""What of a server can be seen on this machine: its processes, by who listens on its port; its engine's command line, and its model file.

So a result names what stands behind an address, whether or not the server would tell. What somebody may not be shown isn't: a process
that isn't ours to look at is none, and keys in a command line are hidden.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from bench.result import Kind, Subject
from supervisor import engine, kept, paths, rundir
from supervisor.errors import Error
from supervisor.running import Running
from supervisor.units import MIB, Progress

SHA256: Final = "sha256"
"""Folder in the cache: a model file's checksum, by the file."""
HIDDEN: Final = "***"
SECRETS: Final = ("--api-key", "--hf-token", "-hft")
"""llama-server's flags whose values are nobody's business (common/arg.cpp:3077, 3492)."""
_MODEL: Final = ("-m", "--model")
_BLOB: Final = re.compile(r"sha256-([0-9a-f]{64})$")
"""A file as Ollama names it."""


def processes(url: str) -> list[psutil.Process]:
    """Those of the server at ``url`` that may be looked at: who listens, and all that it has started."""
    parts = urlsplit(url)
    if not _is_here(parts.hostname or ""):
        return []
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        owners = [each.pid for each in listening if each.laddr and each.laddr.port == port]
        for pid in dict.fromkeys(pid for pid in owners if pid):
            process = psutil.Process(pid)
            found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return list(found.values())


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine."""
    try:
        told = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    own = {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}
    return any(ipaddress.ip_address(address).is_loopback or address in own for address in told)


def looked_at(subject: Subject, here: Sequence[psutil.Process], home: paths.Home, progress: Progress) -> Subject:
    """With what can be seen on this machine: the engine's command line and its model file, and what the user's own llmctl tells him."""
    subject = _told_to_its_owner(subject, home)
    engine_process = next((each for each in here if _is_engine(each, subject)), None)
    try:
        argv, folder = (engine_process.cmdline(), Path(engine_process.cwd())) if engine_process else ([], Path())
    except (psutil.Error, OSError):
        return subject
    if not argv:
        return subject
    subject = replace(subject, argv=_without_secrets(argv))
    if not subject.engine and Path(argv[0]).name == engine.SERVER:
        with contextlib.suppress(Error):
            version = engine.parse_version(engine.ask(Path(argv[0]), "--version"))
            subject = replace(subject, engine=f"b{version.build} ({version.commit[:9]})" if version else "")
    file = _value(argv, _MODEL)
    if file is None or subject.kind == Kind.VLLM:
        return subject
    if digest := _BLOB.search(file):
        return replace(subject, sha256=digest[1])
    with contextlib.suppress(OSError):
        return replace(subject, file=Path(file).name, sha256=sha256(folder / file, home, progress))
    return subject


def _told_to_its_owner(subject: Subject, home: paths.Home) -> Subject:
    instance = rundir.read(home.run)
    if instance is None or instance.address != subject.url:
        return subject
    status = Running(instance).get("/llmctl/status")
    mine = next((each for each in status["presets"] if each["name"] == subject.preset), None)
    slots = mine["slots"]["total"] if mine else subject.slots
    return replace(subject, version=status["version"], engine=status["engine"], slots=slots)


def _is_engine(process: psutil.Process, subject: Subject) -> bool:
    """Whether it is what computes, of a server's processes, the one that listens first."""
    try:
        match subject.kind:
            case Kind.LLMCTL:  # its child has a home of its own, named like the preset (``argv.environment``)
                environment = process.environ()
                folder = environment.get("HOME", "")
                return folder == environment.get("XDG_CONFIG_HOME") and Path(folder).name == subject.preset
            case Kind.OLLAMA:
                return bool(_BLOB.search(_value(process.cmdline(), _MODEL) or ""))
            case Kind.LLAMA_CPP | Kind.VLLM:
                return True
            case _:  # what its command line may hold isn't known
                return False
    except (psutil.Error, OSError):
        return False


def _value(argv: Sequence[str], names: Iterable[str]) -> str | None:
    """Of a flag; the last one counts."""
    found = None
    for at, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag in names:
            found = value if equals else next(iter(argv[at + 1 : at + 2]), None)
    return found


def _without_secrets(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line as it may be written."""
    found: list[str] = []
    for before, word in zip(("", *argv), argv, strict=False):
        flag, equals, _ = word.partition("=")
        found.append(HIDDEN if before in SECRETS else f"{flag}={HIDDEN}" if equals and flag in SECRETS else word)
    return tuple(found)


def sha256(file: Path, home: paths.Home, progress: Progress) -> str:
    """A file's checksum, worked out once for as long as it stays as it is. Raises OSError."""
    place = home.cache / SHA256 / kept.name(kept.identity(file))
    with contextlib.suppress(OSError):
        if re.fullmatch(r"[0-9a-f]{64}", found := place.read_text()):
            return found
    digest, done, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb") as source:
        while part := source.read(4 * MIB):
            digest.update(part)
            done += len(part)
            progress(f"checksum of {file.name}, MiB", done // MIB, total // MIB)
    kept.write(place, digest.hexdigest())
    return digest.hexdigest()
