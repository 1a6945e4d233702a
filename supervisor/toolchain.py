"""What compiles an engine: the C and C++ compilers, cmake and ninja, and the environment they run in.

The compilers are the system's and only looked for. cmake and ninja are the system's if new enough, else the PyPI wheels of the same
names in a folder of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor import paths, pip
from supervisor.errors import Error, Exit
from supervisor.recipe import Tool, numbers
from supervisor.toolkit import Toolkit
from supervisor.units import Progress

_SCRUBBED: Final = re.compile(
    r"^(C|CXX|CPP|LD|CUDA|NVCC_(?:AP|PRE)PEND_)_?FLAGS$|^(SOURCE_DATE_EPOCH|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|LIBRARY_PATH)$"
    r"|^CMAKE_|^GIT_|^NINJA|^CUDA(ARCHS|CXX|HOSTCXX)$|^(LLAMA|GGML)_"
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """The C and C++ compilers, and the line by which they name their version."""

    cc: Path
    cxx: Path
    title: str

    @property
    def gcc_major(self) -> int | None:
        """The major version, if it is GCC."""
        found = re.search(r"\) (\d+)\.\d", self.title)
        return int(found[1]) if found and "clang" not in self.title else None


def find_compiler(env: Mapping[str, str] = os.environ) -> Compiler:
    """The C and C++ compilers: CC and CXX, else the usual names; Error if one is missing."""
    found = {}
    for language, variable, names in (("C++", "CXX", ("c++", "g++", "clang++")), ("C", "CC", ("cc", "gcc", "clang"))):
        candidates = (env[variable],) if env.get(variable) else names
        path = next((path for name in candidates if (path := shutil.which(name, path=env.get("PATH", os.defpath)))), None)
        if path is None:
            what = f"there is no {language} compiler ({', '.join(candidates)} in PATH), and llama.cpp is built from source"
            raise Error(what, exit=Exit.ENGINE, hint="apt install g++")
        found[language] = Path(path)
    asked = [str(found["C++"]), "--version"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False, env=clean_env()).stdout
    # "c++ (Debian 12.2.0-14) 12.2.0" and "g++ (Debian …" are one compiler under two names.
    title = re.sub(r"^\S+ (?=\()", "", said.partition("\n")[0]).strip()
    return Compiler(found["C"], found["C++"], title or "unknown")


def find_tool(home: paths.Home, name: str, wanted: Tool, progress: Progress) -> Path:
    """The program cmake or ninja: the system's if it is new enough, else its PyPI wheel in a folder of its own."""
    if path := shutil.which(name):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"(\d+\.\d+(?:\.\d+)?)", said)
        if version and numbers(version[1]) >= wanted.at_least:
            return Path(path)
    place = home.cache / "tools" / f"{name}-{wanted.version}"
    if not place.is_dir():
        progress(f"fetching {name} {wanted.version} from PyPI", 0, 0)
        fresh = place.with_name(f".new-{name}-{os.getpid()}")
        try:
            pip.install([pip.Pinned(name, wanted.version, wanted.sha256)], fresh)
            fresh.rename(place)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    # The wheel of cmake hides the program behind a Python script of the same name; the real one lies in NAME/data/bin.
    for program in (place / name / "data" / "bin" / name, place / "bin" / name):
        if program.is_file():
            return program
    raise Error(f"the wheel {name} {wanted.version} holds no {name}", exit=Exit.ENGINE, hint=f"apt install {name}")


def host_compiler(compiler: Compiler, kit: Toolkit, env: Mapping[str, str] = os.environ) -> Path:
    """The C++ compiler that nvcc drives: ours, or where ours is too new for it the newest ``g++-N`` that isn't."""
    limit, ours = kit.host_limit, compiler.gcc_major
    if limit is None or ours is None or ours <= limit:
        return compiler.cxx
    for major in range(limit, 8, -1):
        if path := shutil.which(f"g++-{major}", path=env.get("PATH", os.defpath)):
            return Path(path)
    what = f"CUDA {kit.version} takes GCC up to {limit}, and this is GCC {ours}"
    raise Error(what, exit=Exit.ENGINE, hint=f"apt install g++-{limit}")


def clean_env(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what would change the binaries behind the key's back."""
    kept = {k: v for k, v in env.items() if not _SCRUBBED.search(k)}
    # CMake asks git for a commit, in the source's folder, and an enclosing repository would answer.
    return kept | {"GIT_DIR": "/nonexistent", "LC_ALL": "C"}
