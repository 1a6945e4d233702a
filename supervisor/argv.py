"""The exact llama-server command line of a preset, and the environment it starts in.

A flag is spelled where its option is declared, in ``preset``; those that no preset may choose are spelled here.

Every flag is passed explicitly, because an omitted one has a default that surprises: ``-np`` unset is four slots, ``--fit`` lowers
the context, ``--cache-ram`` takes 8 GiB. The environment is an allow-list, since ``LLAMA_ARG_*`` variables and the user's
``config.ini`` would be merged into the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

from supervisor import preset as presets
from supervisor.errors import Error, Exit
from supervisor.preset import Preset

SOCKET: Final = "child.sock"
"""The child's socket, relative to its working folder: a Unix socket's path may have 107 bytes, the folder's may be longer."""

_OWNED: Final = (
    ("--fit", "off"),  # we plan; a silently smaller context is a broken promise
    ("--log-colors", "off"),
    ("--log-verbosity", "4"),  # the lines that name what was allocated; no prompt text at this level
    ("--sse-ping-interval", "-1"),  # comments to a waiting client are the front door's
)

_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TMPDIR")


def render(preset: Preset, server: Path, model: Path, *, threads: int, flags: Set[str]) -> tuple[str, ...]:
    """The argument vector that serves ``preset`` from ``model``.

    ``threads`` takes the place of a preset's 0. ``flags`` is what the engine's ``--help`` lists: a flag it doesn't know is an
    :class:`Error` (exit code 5) here, and not a usage text in a log there.
    """
    pairs = [
        ("--model", str(model)),
        ("--alias", preset.name),
        ("--host", SOCKET),
        *_OWNED,
    ]
    for name, field in presets.options().items():
        value = getattr(preset, name)
        if name == "threads":
            value = value or threads
        if value != "":
            pairs.append((str(field.json_schema_extra["flag"]), str(value)))
    if preset.device != "none":
        pairs.append(("--gpu-layers", "99"))
    for flag, _ in pairs:
        if flag not in flags:
            raise Error(f"the engine {server} has no option {flag}", exit=Exit.ENGINE, hint="llmctl build")
    return (str(server), *(word for pair in pairs for word in pair))


def environment(outer: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The child's environment: a few harmless variables of ours, and an empty configuration folder."""
    kept = {name: outer[name] for name in _ENVIRONMENT if name in outer}
    return kept | {"XDG_CONFIG_HOME": str(folder), "HOME": str(folder), "GGML_NO_BACKTRACE": "1"}
