"""How an engine is compiled: ``build/recipe.yaml`` as a value, and the two decisions taken from it.

:func:`options` says which CMake options a build gets, every one that could change the binaries written out. :func:`key` names the result:
a hash over those options and what else decides the bytes (the commit or the tree's digest, the compiler, the CUDA toolkit, and with
``GGML_NATIVE`` the CPU). Paths are in neither: two builds of one key, in different folders, give the same sha256.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from supervisor import paths
from supervisor.errors import Error, Exit

KEY_CHARS: Final = 12
"""48 bits: a dozen engines on one box never meet, and it can be read out."""


@dataclass(frozen=True, slots=True)
class Tool:
    """cmake or ninja: the oldest that will do, and the wheel that stands in for it."""

    version: str
    at_least: tuple[int, ...]
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to build."""

    name: str
    about: str
    cuda: bool
    """Whether it may be a CUDA engine."""
    minutes: tuple[int, int]
    """On two free cores, on two busy ones."""
    free_mib: int
    targets: tuple[str, ...]
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The whole of ``build/recipe.yaml``."""

    tools: Mapping[str, Tool]
    options: Mapping[str, str]
    variants: Mapping[str, Variant]
    cpu_options: Mapping[str, str]
    cuda_options: Mapping[str, str]
    cuda_minutes: tuple[int, int]
    cuda_free_mib: int
    default_arch: str
    fa_pairs: tuple[str, ...]
    instruction_sets: Mapping[str, frozenset[str]]

    def variant(self, name: str) -> Variant:
        """The variant of that name; Error if there is none."""
        if name not in self.variants:
            what = f"there is no build variant {name!r}; there are {', '.join(self.variants)}"
            raise Error(what, exit=Exit.USAGE, hint="llmctl build --variant native")
        return self.variants[name]


@functools.cache
def load() -> Recipe:
    """``build/recipe.yaml``."""
    return parse(yaml.safe_load((paths.data_folder("build") / "recipe.yaml").read_text()))


def parse(raw: Mapping[str, Any]) -> Recipe:
    """A recipe out of what its YAML holds."""
    cuda = raw["cuda"]
    return Recipe(
        tools={name: Tool(t["version"], numbers(t["at_least"]), tuple(t["sha256"])) for name, t in raw["tools"].items()},
        options=raw["options"],
        variants={
            name: Variant(
                name=name,
                about=v["about"],
                cuda=v["cuda"],
                minutes=(v["minutes"][0], v["minutes"][1]),
                free_mib=v["free_mib"],
                targets=tuple(v.get("targets", raw["targets"])),
                options=v.get("options", {}),
            )
            for name, v in raw["variants"].items()
        },
        cpu_options=raw["cpu"]["options"],
        cuda_options=cuda["options"],
        cuda_minutes=(cuda["minutes"][0], cuda["minutes"][1]),
        cuda_free_mib=cuda["free_mib"],
        default_arch=cuda["arch"],
        fa_pairs=tuple(cuda["fa_quants"]),
        instruction_sets={name: frozenset(flags) for name, flags in raw["instruction_sets"].items()},
    )


def numbers(version: str) -> tuple[int, ...]:
    """``"3.25.1"`` → ``(3, 25, 1)``; what follows the numbers is left out."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def options(
    recipe: Recipe, variant: Variant, *, build: int, commit: str, cpu_flags: frozenset[str], arch: str = ""
) -> dict[str, str]:
    """The CMake options of a build. ``arch`` (``"86"``, several joined by ``;``) makes it a CUDA engine."""
    chosen = dict(recipe.options)
    chosen |= {"LLAMA_BUILD_NUMBER": str(build), "LLAMA_BUILD_COMMIT": commit[:9]}
    if arch:
        chosen |= recipe.cuda_options
        chosen |= {name: "ON" if needed <= cpu_flags else "OFF" for name, needed in recipe.instruction_sets.items()}
        chosen["CMAKE_CUDA_ARCHITECTURES"] = ";".join(f"{one}-real" for one in arch.split(";"))
        chosen["GGML_CUDA_FA_QUANTS"] = ";".join(recipe.fa_pairs)
    else:
        chosen |= recipe.cpu_options
    return chosen | dict(variant.options)


def key(
    *,
    variant: Variant,
    options: Mapping[str, str],
    commit: str,
    digest: str,
    compiler: str,
    cpu: str,
    cuda: str,
) -> str:
    """The engine's name. ``cpu`` counts only where the compiler is told to look at the machine (GGML_NATIVE)."""
    facts = {
        "commit": commit,
        "digest": digest,
        "variant": variant.name,
        "targets": variant.targets,
        "options": dict(options),
        "compiler": compiler,
        "cpu": cpu if options.get("GGML_NATIVE") == "ON" else "",
        "cuda": cuda,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:KEY_CHARS]
