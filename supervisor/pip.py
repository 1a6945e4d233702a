"""The package registry, through pip, the client that the user's mirrors and proxies are already set up for.

Everything is fetched by exact version and sha256 (``--require-hashes``), so that a registry can't give us something else. Nothing goes
into llmctl's own environment.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from supervisor.errors import Error, Exit


@dataclass(frozen=True, slots=True)
class Pinned:
    """One distribution, of one version, whose files may have one of these checksums."""

    name: str
    version: str
    sha256: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}=={self.version} " + " ".join(f"--hash=sha256:{digest}" for digest in self.sha256)


def download_sdist(package: Pinned, into: Path, *, exit: Exit = Exit.ENGINE) -> Path:  # noqa: A002
    """Fetch a source distribution. pip compares the checksum before any of the package's code runs. Returns the file."""
    _pip(["download", "--no-deps", "--no-binary", package.name, "--dest", str(into)], [package], exit)
    return next(path for path in sorted(into.iterdir()) if path.name.endswith((".tar.gz", ".zip")))


def download_wheel(package: Pinned, into: Path, *, exit: Exit = Exit.ENGINE) -> Path:  # noqa: A002
    """Fetch a wheel without installing it. Returns the file."""
    _pip(["download", "--no-deps", "--only-binary", ":all:", "--dest", str(into)], [package], exit)
    return next(iter(sorted(into.glob("*.whl"))))


def install(packages: Iterable[Pinned], target: Path, *, exit: Exit = Exit.ENGINE) -> None:  # noqa: A002
    """Unpack wheels into a folder of their own, without their dependencies."""
    arguments = ["install", "--no-deps", "--only-binary", ":all:", "--no-compile", "--no-cache-dir", "--target", str(target)]
    _pip(arguments, list(packages), exit)


def _pip(arguments: Sequence[str], packages: Sequence[Pinned], code: Exit) -> None:
    names = ", ".join(f"{package.name} {package.version}" for package in packages)
    if importlib.util.find_spec("pip") is None:
        what = f"{names} can't be fetched: the Python environment {sys.prefix} has no pip (uv makes them so)"
        raise Error(what, exit=code, hint=f"uv pip install --python {sys.executable} pip, or {sys.executable} -m ensurepip")
    with tempfile.TemporaryDirectory(prefix="llmctl-") as scratch:
        listed = Path(scratch, "requirements.txt")
        listed.write_text("".join(f"{package}\n" for package in packages))
        command = [sys.executable, "-m", "pip", *arguments, "--require-hashes", "-r", str(listed)]
        env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise failure(names, done.stdout + done.stderr, code)


def failure(names: str, output: str, code: Exit) -> Error:
    """What pip's output means: a wrong checksum, a full disk, an unreachable registry."""
    digests = re.search(r"Expected sha256 (\w+)\s+Got\s+(\w+)", output)
    if digests:
        what = f"{names}: the registry's file has sha256 {digests[2]}, {digests[1]} was expected"
        return Error(what, exit=code, hint="nothing was unpacked; try another index (PIP_INDEX_URL)")
    if "No space left on device" in output:
        return Error(
            f"{names} can't be fetched: the disk is full", exit=code, hint="free some space, or set LLMCTL_HOME and TMPDIR"
        )
    lines = [line.strip() for line in output.splitlines() if line.startswith("ERROR")] or output.strip().splitlines()[-1:]
    why = lines[-1].removeprefix("ERROR: ") if lines else "pip says nothing"
    return Error(
        f"pip can't fetch {names}: {why}", exit=code, hint="check the network and pip's index settings (pip config list)"
    )
