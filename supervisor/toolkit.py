"""The CUDA toolkit that compiles an engine: the system's, or a private one assembled from NVIDIA's own PyPI wheels.

What is needed is small: nvcc, the runtime, cuBLAS, and something to link the driver's symbols against. A system toolkit lacks cuBLAS
more often than one thinks, so it counts only when both are found. The private one (530 MB to fetch, under ``home.toolkits``) needs two
things that the wheels leave out: the unversioned library links the linker looks for, and a stub ``libcuda.so``, here with every function
that ``cuda.h`` declares. The stub is linked against and never loaded: its SONAME is the driver's ``libcuda.so.1``.

An assembled toolkit is complete or absent; its folder is named after what went into it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

from supervisor import paths, pip
from supervisor.errors import Error, Exit
from supervisor.units import MIB, Progress, size

Choice = Literal["auto", "system", "wheels"]
SYSTEM_PLACES: Final = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc", "/usr/lib/cuda/bin/nvcc")
LIBRARY_PLACES: Final = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
SYSTEM_LIBRARIES: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
ASK_TIMEOUT_S: Final = 20.0
_DECLARED: Final = re.compile(r"\bCUDAAPI\s+(cu\w+)\s*\(")
_RENAMED: Final = re.compile(r"^\s*#\s*define\s+cu\w+\s+(?:__CUDA_API_PT\w+\()?(cu\w+)", re.MULTILINE)
_HOST_LIMIT: Final = re.compile(r"#if __GNUC__ > (\d+)")


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A toolkit that can compile and link ggml-cuda."""

    root: Path
    nvcc: Path
    version: str
    """``13.0``"""
    detail: str
    """What else tells two toolkits of one version apart: the compiler's full version, or a hash of the wheels."""
    origin: Literal["system", "wheels"]
    runtime: tuple[Path, ...] = ()
    """Libraries an engine needs beside it because no loader path knows them."""

    @property
    def host_limit(self) -> int | None:
        """The newest major version of GCC that this nvcc takes; None where it doesn't say."""
        header = self.root / "include" / "crt" / "host_config.h"
        found = _HOST_LIMIT.search(header.read_text(errors="replace")) if header.is_file() else None
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Wheels:
    """``build/toolkit.yaml``."""

    cuda: str
    driver_at_least: int
    root: str
    free_mib: int
    packages: tuple[pip.Pinned, ...]
    unversioned: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder's name: CUDA version and a hash over the packages."""
        text = "\n".join(str(package) for package in self.packages)
        return f"cuda-{self.cuda}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@functools.cache
def wheels() -> Wheels:
    """``build/toolkit.yaml``."""
    raw = yaml.safe_load((paths.data_folder("build") / "toolkit.yaml").read_text())
    packages = tuple(pip.Pinned(w["name"], str(w["version"]), (w["sha256"],)) for w in raw["wheels"])
    return Wheels(raw["cuda"], raw["driver_at_least"], raw["root"], raw["free_mib"], packages, tuple(raw["unversioned"]))


def choose(
    home: paths.Home, choice: Choice, *, driver_major: int, progress: Progress, env: Mapping[str, str] = os.environ
) -> Toolkit:
    """The toolkit for a build. ``auto``: (1) the system's if it is whole and the driver can run what it makes, else (2) the wheels.

    ``driver_major`` is 0 where there is no driver: then nothing is known about the machine that will run the engine.
    """
    if choice != "wheels":  # (1)
        found = system(env)
        if isinstance(found, Toolkit) and (choice == "system" or not too_new(found.version, driver_major)):
            return found
        if choice == "system":
            assert isinstance(found, str)
            raise Error(f"the system has no usable CUDA toolkit: {found}", exit=Exit.ENGINE, hint="llmctl build --toolkit wheels")
    if 0 < driver_major < wheels().driver_at_least:  # (2)
        raise driver_too_old(driver_major, wheels())
    return assemble(home, wheels(), progress)


def too_new(cuda: str, driver_major: int) -> bool:
    """Whether a driver is too old for what a toolkit compiles. Each major CUDA release sets one floor for all its minors."""
    floors = {"11": 450, "12": 525, "13": wheels().driver_at_least}
    return 0 < driver_major < floors.get(cuda.split(".")[0], 0)


def driver_too_old(driver_major: int, wanted: Wheels) -> Error:
    """Why the wheels don't help here."""
    what = (
        f"the NVIDIA driver is {driver_major}, but CUDA {wanted.cuda} of the PyPI wheels needs {wanted.driver_at_least} or later, "
        "and NVIDIA's CUDA 12 wheel of nvcc holds no nvcc"
    )
    hint = f"update the driver to {wanted.driver_at_least}, or install a CUDA 12 toolkit with cuBLAS and llmctl build --toolkit system"
    return Error(what, exit=Exit.ENGINE, hint=hint)


def system(env: Mapping[str, str] = os.environ) -> Toolkit | str:
    """The system's toolkit, or what it lacks."""
    nvcc = _system_nvcc(env)
    if nvcc is None:
        return "there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda"
    version = _ask([str(nvcc), "--version"])
    release = re.search(r"release (\d+\.\d+), V(\S+)", version)
    top = re.search(r"#\$ TOP=(\S+)", _ask([str(nvcc), "-dryrun", "-E", "-x", "cu", "/dev/null"]))
    if release is None or top is None:
        return f"{nvcc} does not run"
    root = Path(os.path.normpath(top[1]))
    libraries = [root / place for place in LIBRARY_PLACES] + [Path(place) for place in SYSTEM_LIBRARIES]
    if not any((folder / "libcublas.so").exists() for folder in libraries):
        return f"{nvcc} (CUDA {release[1]}) has no cuBLAS beside it"
    return Toolkit(root, root / "bin" / "nvcc", release[1], f"V{release[2]}", "system")


def assemble(home: paths.Home, wanted: Wheels, progress: Progress) -> Toolkit:
    """The private toolkit, made if it isn't there. Nothing half-written stays behind."""
    place = home.toolkits / wanted.name
    if not place.is_dir():
        with _translated(place):
            home.toolkits.mkdir(parents=True, exist_ok=True)
            for stale in home.toolkits.glob(".new-*"):
                shutil.rmtree(stale, ignore_errors=True)
            free = shutil.disk_usage(home.toolkits).free
            if free < wanted.free_mib * MIB:
                raise OSError(errno.ENOSPC, f"{size(free)} are free, {size(wanted.free_mib * MIB)} are needed")
            with tempfile.TemporaryDirectory(prefix=".new-", dir=home.toolkits) as scratch:
                fresh = Path(scratch, "toolkit")
                progress(f"fetching CUDA {wanted.cuda} from NVIDIA's PyPI wheels (530 MB)", 0, 0)
                pip.install(wanted.packages, fresh)
                complete(fresh / wanted.root, wanted)
                fresh.rename(place)
    root = place / wanted.root
    runtime = tuple(path for name in wanted.unversioned for path in sorted((root / "lib").glob(f"lib{name}.so.*")))
    return Toolkit(root, root / "bin" / "nvcc", wanted.cuda, wanted.name, "wheels", runtime)


def complete(root: Path, wanted: Wheels) -> None:
    """Add what the wheels leave out: links without version, ``lib64`` (nvcc's own name for it), the driver's stub."""
    lib = root / "lib"
    for name in wanted.unversioned:
        versioned = sorted(lib.glob(f"lib{name}.so.*"))
        if not versioned:
            raise Error(f"the wheels hold no lib{name}", exit=Exit.ENGINE, hint="install a CUDA toolkit and --toolkit system")
        (lib / f"lib{name}.so").symlink_to(versioned[0].name)
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    stub(driver_functions((root / "include" / "cuda.h").read_text(errors="replace")), lib / "stubs" / "libcuda.so")


def driver_functions(header: str) -> list[str]:
    """The functions of the driver that ``cuda.h`` declares, and the names that its macros turn them into (``cuMemAlloc_v2``)."""
    names = set(_DECLARED.findall(header)) | set(_RENAMED.findall(header))
    return sorted(names)


def stub(functions: list[str], library: Path) -> None:
    """A ``libcuda.so`` to link against, with SONAME ``libcuda.so.1`` and empty functions."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Error("there is no C compiler (cc, gcc or clang in PATH)", exit=Exit.ENGINE, hint="apt install g++")
    library.parent.mkdir(parents=True, exist_ok=True)
    code = "".join(f"void {name}(void) {{}}\n" for name in functions)
    command = [compiler, "-shared", "-fPIC", "-w", "-fno-builtin", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Error(f"the stub of libcuda can't be compiled: {why}", exit=Exit.ENGINE, hint="apt install g++")


def _system_nvcc(env: Mapping[str, str]) -> Path | None:
    roots = [Path(env[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    named = [Path(env["CUDACXX"])] if env.get("CUDACXX") else []
    in_path = shutil.which("nvcc", path=env.get("PATH"))
    candidates = [*named, *roots, *([Path(in_path)] if in_path else []), *(Path(place) for place in SYSTEM_PLACES)]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def _ask(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ASK_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


@contextlib.contextmanager
def _translated(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        why = f"the disk is full ({exc.strerror})" if exc.errno == errno.ENOSPC else str(exc)
        raise Error(
            f"the CUDA toolkit can't be put into {place}: {why}", exit=Exit.ENGINE, hint="LLMCTL_HOME=/a/larger/disk"
        ) from exc
