"""The offline bundle: one folder that builds an engine and measures its memory and speed on a box that has a card and no network.

It holds everything such a box lacks, and nothing more, since it travels by hand and has to stay under :data:`LIMIT_BYTES`:

- ``source.tar.xz``: llama.cpp's tree without what the recipe never compiles (:data:`LEFT_OUT`, the backends of other machines);
- ``wheels/``: llmctl's own wheel, made here out of the running package, and the wheels of what it needs, in the versions that run here;
- ``tools.tar.xz``: cmake and ninja out of their wheels, without manual and menus, laid out as ``toolchain.find_tool`` looks for them;
- ``run.sh``, ``measure.py`` and what it imports, ``README.txt``: ``build/pack``, as it is shipped;
- ``manifest.json``: the pin, the versions, and the sha256 of every other file, which ``measure.py`` compares before it believes one.

Nothing of llmctl's data has to be packed apart: presets, recipe and pin lie inside its wheel. The models are phantoms that the box writes
from condensed headers. A bundle is complete or absent: it is made beside its place and renamed. Archives carry no times and no owners, so
that the same inputs give the same bytes.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from supervisor import engine as engines
from supervisor import paths, pip, source
from supervisor import recipe as recipes
from supervisor.errors import Error, Exit
from supervisor.recipe import Recipe, Tool
from supervisor.units import MIB, Progress, size

LIMIT_BYTES: Final = 40 * MIB
"""Of the whole bundle. A box that lends its card for minutes takes a small upload, 64 MiB with the rest at the one we know."""
USUAL_PYTHON: Final = "3.12"
"""Of Ubuntu 24.04, which most boxes with a card run. A third version's wheels, 7.5 MiB, would not fit."""
MANIFEST: Final = "manifest.json"
SCRIPTS: Final = "pack"
"""The folder below ``build`` whose files are copied as they are."""
LEFT_OUT: Final = frozenset(
    [
        *(".devops", ".github", "app", "benches", "ci", "conversion", "docs", "examples", "gguf-py", "media", "models", "pocs"),
        *("requirements", "skills", "tests", "tools/server/bench", "tools/server/tests"),
        *("tools/ui/src", "tools/ui/static", "tools/ui/tests"),
    ]
)
"""Folders of llama.cpp's tree that no target of the recipe needs: 150 of 176 MB. Not ``scripts``: one is run (tools/ui/CMakeLists.txt)."""
BACKENDS: Final = frozenset(["ggml-cpu", "ggml-cuda"])
"""Those of the folders ``ggml/src/ggml-*`` that the recipe compiles."""
CMAKE_LEFT_OUT: Final = re.compile(r"/bin/c(?:test|pack)$|/doc/|/share/(?!cmake-)|/share/cmake-[\d.]+/Help/")
"""56 of the 77 MB in cmake's wheel."""
_DISTRIBUTION: Final = "llmctl"
_PYTHON: Final = re.compile(r"3\.\d{1,2}")
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""The oldest time that a zip archive can tell."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the bundle, or its folder of wheels."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """A finished bundle."""

    folder: Path
    parts: tuple[Part, ...]
    """Largest first; the wheels together."""
    pythons: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(part.bytes for part in self.parts)


def make(
    home: paths.Home,
    folder: Path,
    *,
    pythons: Sequence[str] = (),
    source_dir: Path | None = None,
    checkout: Path | None = None,
    recipe: Recipe | None = None,
    progress: Progress,
) -> Bundle:
    """Make the bundle ``folder``, which must be absent or empty.

    ``pythons`` are the versions (``3.12``) that the box may run it with; none means this one's and :data:`USUAL_PYTHON`. Raises Error:
    exit USAGE for a folder that is in use, a version that is none, and a bundle over :data:`LIMIT_BYTES`; exit ENGINE where something
    can't be fetched or written.
    """
    folder = folder.expanduser().absolute()
    versions = _versions(pythons)
    _check_place(folder)
    pin = engines.pin()
    with _translated(folder):
        tree = source.local(source_dir, checkout or Path(__file__).parent.parent, pin) or source.fetch(home, pin, progress)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".new-{folder.name}-", dir=folder.parent) as scratch:
            fresh = Path(scratch, "bundle")
            (fresh / "wheels").mkdir(parents=True)
            progress("packing llama.cpp's source", 0, 0)
            archive(source_files(tree.folder), fresh / "source.tar.xz")
            _pack_tools((recipe or recipes.load()).tools, Path(scratch), fresh / "tools.tar.xz", progress)
            progress("packing llmctl", 0, 0)
            own_wheel(fresh / "wheels")
            for version in versions:
                progress(f"fetching what llmctl needs, for Python {version}", 0, 0)
                _download(version, fresh / "wheels")
            for path in sorted((paths.data_folder("build") / SCRIPTS).iterdir()):
                if path.is_file():
                    shutil.copy(path, fresh / path.name)
            _write_manifest(fresh, tree, versions)
            made = Bundle(folder, _parts(fresh), versions)
            if made.bytes > LIMIT_BYTES:
                raise _too_large(made)
            fresh.chmod(0o755)
            if folder.is_dir():
                folder.rmdir()
            fresh.rename(folder)
    return made


def source_files(tree: Path) -> dict[str, Path]:
    """The files of llama.cpp's tree that travel, by their name in the archive (``ggml/src/ggml.c``)."""
    found = {}
    for path in sorted(path for path in tree.rglob("*") if path.is_file()):
        name = path.relative_to(tree)
        if not _left_out(PurePosixPath(*name.parts)):
            found[name.as_posix()] = path
    return found


def archive(files: Mapping[str, Path], into: Path) -> None:
    """Write files under these names into a ``.tar.xz``, without times and owners."""
    with tarfile.open(into, "w:xz") as tar:
        for name, path in files.items():
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)


def own_wheel(into: Path) -> Path:
    """Write llmctl's wheel out of the running package, an installed one or a checkout's: no build tool and no network is asked for.

    The layout is that of PEP 427; ``pyproject.toml`` says the same about the data folders. Returns the file.
    """
    try:
        told = importlib.metadata.distribution(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as exc:
        what = f"{_DISTRIBUTION} is not installed in {sys.prefix}, so its version and what it needs are not known"
        raise Error(what, exit=Exit.ENGINE, hint=f"{sys.executable} -m pip install --editable .") from exc
    info = f"{_DISTRIBUTION}-{told.version}.dist-info"
    contents = {name: path.read_bytes() for name, path in _package_files().items()}
    contents |= {
        f"{info}/METADATA": (told.read_text("METADATA") or "").encode(),
        f"{info}/entry_points.txt": (told.read_text("entry_points.txt") or "").encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: llmctl pack\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_record_digest(data)},{len(data)}\n" for name, data in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    place = into / f"{_DISTRIBUTION}-{told.version}-py3-none-any.whl"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in contents.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            member.external_attr = 0o644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(member, data)
    return place


def requirements() -> tuple[str, ...]:
    """What llmctl needs at run time, in pip's words, without the extras."""
    told = importlib.metadata.distribution(_DISTRIBUTION).requires or ()
    return tuple(line for line in told if not re.search(r";.*\bextra\s*==", line))


def _versions(pythons: Sequence[str]) -> tuple[str, ...]:
    for version in pythons:
        if not _PYTHON.fullmatch(version) or recipes.numbers(version) < (3, 11):
            what = f"{version!r} is not a Python that llmctl runs on, which is 3.11 or newer"
            raise Error(what, exit=Exit.USAGE, hint="--python 3.12")
    return tuple(dict.fromkeys(pythons or (_here(), USUAL_PYTHON)))


def _here() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _check_place(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        what = "is not empty" if folder.is_dir() else "is not a folder"
        raise Error(f"{folder} {what}, and a bundle is made new", exit=Exit.USAGE, hint=f"llmctl pack {folder}-2, or remove it")


def _left_out(name: PurePosixPath) -> bool:
    if any(str(parent) in LEFT_OUT for parent in name.parents) or ".git" in name.parts:
        return True
    backend = name.parts[2] if name.parts[:2] == ("ggml", "src") and len(name.parts) > 3 else ""
    return backend.startswith("ggml-") and backend not in BACKENDS


def _pack_tools(tools: Mapping[str, Tool], scratch: Path, into: Path, progress: Progress) -> None:
    """Pack cmake and ninja as the recipe pins them, each under ``NAME-VERSION/``, where ``toolchain.find_tool`` finds it."""
    files = {}
    for name, tool in sorted(tools.items()):
        progress(f"fetching {name} {tool.version} from PyPI", 0, 0)
        place = scratch / f"{name}-{tool.version}"
        pip.install([pip.Pinned(name, tool.version, tool.sha256)], place)
        programs = (place / name / "data" / "bin" / name, place / "bin" / name)
        wanted = [path for path in programs if path.is_file()][:1]
        wanted += sorted(path for path in place.glob(f"{name}/data/share/**/*") if path.is_file())
        for path in wanted:
            told = path.relative_to(scratch).as_posix()
            if not CMAKE_LEFT_OUT.search(f"/{told}"):
                files[told] = path
    archive(files, into)


def _package_files() -> dict[str, Path]:
    """What the wheel holds, as ``pyproject.toml`` says it: two packages, and beside one's code what a checkout has at its top level."""
    package = Path(__file__).parent
    found = _files(package, "supervisor", "data") | _files(package.parent / "bench", "bench", "proof")
    for name in ("presets", "build"):
        found |= _files(paths.data_folder(name), f"supervisor/data/{name}")
    return found


def _files(folder: Path, named: str, but: str = "") -> dict[str, Path]:
    """All files of a folder but those of one below it, and but what Python writes there, by their names in the wheel."""
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        f"{named}/{name.as_posix()}": path
        for name, path in found.items()
        if name.parts[0] != but and "__pycache__" not in name.parts
    }


def _record_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _download(version: str, into: Path) -> None:
    """The wheels of :func:`requirements` for one Python, in the versions that are installed here."""
    names = f"llmctl's requirements for Python {version}"
    if importlib.util.find_spec("pip") is None:
        what = f"{names} can't be fetched: the Python environment {sys.prefix} has no pip (uv makes them so)"
        raise Error(
            what, exit=Exit.ENGINE, hint=f"uv pip install --python {sys.executable} pip, or {sys.executable} -m ensurepip"
        )
    with tempfile.TemporaryDirectory(prefix="llmctl-") as scratch:
        wanted, pinned = Path(scratch, "requirements.txt"), Path(scratch, "constraints.txt")
        wanted.write_text("".join(f"{line}\n" for line in requirements()))
        there = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
        pinned.write_text("".join(f"{name}=={one}\n" for name, one in sorted(there.items()) if name != _DISTRIBUTION))
        command = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:", "--dest", str(into)]
        command += ["--requirement", str(wanted), "--constraint", str(pinned)]
        command += [] if version == _here() else ["--python-version", version]
        env = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise pip.failure(names, done.stdout + done.stderr, Exit.ENGINE)


def _write_manifest(fresh: Path, tree: source.Source, versions: tuple[str, ...]) -> None:
    files = sorted(path for path in fresh.rglob("*") if path.is_file())
    told = {
        "llmctl": importlib.metadata.version(_DISTRIBUTION),
        "pythons": versions,
        "machine": platform.machine(),
        "source": {"commit": tree.commit, "build": tree.build, "digest": tree.digest},
        "sha256": {path.relative_to(fresh).as_posix(): engines.sha256(path) for path in files},
    }
    (fresh / MANIFEST).write_text(json.dumps(told, indent=2) + "\n")


def _parts(fresh: Path) -> tuple[Part, ...]:
    sizes: dict[str, int] = {}
    for path in fresh.rglob("*"):
        if path.is_file():
            name = path.relative_to(fresh).parts[0]
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    return tuple(Part(name, count) for name, count in sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def _too_large(made: Bundle) -> Error:
    largest = ", ".join(f"{part.name} {size(part.bytes)}" for part in made.parts[:3])
    what = f"the bundle would have {size(made.bytes)}, {size(LIMIT_BYTES)} is the limit ({largest})"
    hint = f"llmctl pack {made.folder} --python {made.pythons[0]}"
    return Error(what, exit=Exit.USAGE, hint=hint if len(made.pythons) > 1 else f"{hint} --source /a/smaller/llama.cpp")


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        why = "the disk is full" if exc.errno == errno.ENOSPC else str(exc)
        raise Error(f"{folder} can't be made: {why}", exit=Exit.ENGINE, hint="llmctl pack /a/larger/disk/bundle") from exc
