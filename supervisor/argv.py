"""The exact llama-server command line of a preset, and the environment it starts in.

A flag is spelled where its option is declared, in ``option``; those that no preset may choose are spelled here.

Every flag is passed explicitly, because an omitted one has a default that surprises: ``-np`` unset is four slots, ``--fit`` lowers
the context, ``--cache-ram`` takes 8 GiB. What selects a feature (a speculation, an embedding server) is passed only where the preset has
it. ``extra_args`` come last, so that a flag among them whose value was forgotten takes none of ours for it. The environment is an
allow-list, since ``LLAMA_ARG_*`` variables and the user's ``config.ini`` would be merged into the command line; what an option says
there, since there is no flag for it, is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supervisor import passthrough
from supervisor.errors import Error, Exit
from supervisor.option import AUTO, CHAIN, applies, options
from supervisor.preset import Preset
from supervisor.words import quoted

if TYPE_CHECKING:
    from supervisor.engine import Flags

SOCKET: Final = "child.sock"
"""The child's socket, relative to its working folder: a Unix socket's path may have 107 bytes, the folder's may be longer."""

_OWNED: Final = (
    ("--fit", "off"),  # we plan; a silently smaller context is a broken promise
    ("--log-colors", "off"),
    # The lines that name what was allocated. Of a prompt this level says nothing; but at any level the engine quotes a tool, a schema or a
    # grammar that it refuses (tools/server/server.cpp:79, common/json-schema-to-grammar.cpp:980, src/llama-grammar.cpp:720).
    ("--log-verbosity", "4"),
    ("--sse-ping-interval", "-1"),  # comments to a waiting client are the front door's
)
_ENGINES_AUTO: Final = ("flash_attention",)
"""Options whose ``auto`` is the engine's own word."""

_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TMPDIR")


def render(
    preset: Preset, server: Path, model: Path, *, flags: Flags | None = None, draft: Path | None = None
) -> tuple[str, ...]:
    """The argument vector that serves ``preset`` from ``model``, and from ``draft`` where it speculates with a draft model.

    The preset is complete: what it left to the plan (``auto``) and to its sampling chain are numbers now. ``flags`` is what the engine's
    ``--help`` lists: one it doesn't know is an :class:`Error` (exit code 5) here, and not a usage text in a log there. None for no engine
    at hand, whose words are not checked.
    """
    ours = [
        *("--model", str(model)),
        *("--alias", preset.name),
        *("--host", SOCKET),
        *(word for pair in _OWNED for word in pair),
        *(word for name in options() if name != "extra_args" for word in words(preset, name)),
    ]
    late = [name for name in options() if pending(preset, name)]
    assert not late, f"{late} is still to be worked out: the plan and sampling.resolve give it a number"
    if preset.speculative == "draft":
        assert draft is not None
        ours += ["--spec-draft-model", str(draft)]
    if flags is not None:
        for flag in filter(passthrough.is_flag, ours):
            if flag not in flags:
                raise Error(f"the engine {server} has no option {flag}", exit=Exit.ENGINE, hint="llmctl build")
        _check_extra(preset, server, flags)
    return (str(server), *ours, *words(preset, "extra_args"))


def words(preset: Preset, name: str) -> tuple[str, ...]:
    """An option's words of the command line; none for what is ours alone, not used here, or still to be worked out."""
    option = options()[name]
    return option.arguments(getattr(preset, name)) if applies(option, preset) and not pending(preset, name) else ()


def pending(preset: Preset, name: str) -> bool:
    """Whether an option that is used here still waits for its number."""
    return name not in _ENGINES_AUTO and getattr(preset, name) in (AUTO, CHAIN) and applies(options()[name], preset)


def _check_extra(preset: Preset, server: Path, flags: Flags) -> None:
    """Refuse words that this engine doesn't know, or knows as another spelling of what may not be passed on."""
    for word in filter(passthrough.is_flag, preset.extra_args):
        flag = word if word in flags else passthrough.canonical(word)
        if flag not in flags:
            raise Error(
                f"extra_args has {quoted(word)}, which the engine {server} doesn't have",
                exit=Exit.ENGINE,
                hint=f"{server} --help",
            )
        for spelling in flags.group(flag):
            if told := passthrough.refusal(spelling):
                message = told[0].replace(repr(spelling), f"{quoted(word)} ({spelling})", 1)
                raise Error(message, exit=Exit.CONFIG, hint=told[1])


def environment(outer: Mapping[str, str], folder: Path, preset: Preset | None = None) -> dict[str, str]:
    """The child's environment: a few harmless variables of ours, an empty configuration folder, what the preset's options say there.

    None for a process that serves no preset.
    """
    found = {name: outer[name] for name in _ENVIRONMENT if name in outer}
    found |= {"XDG_CONFIG_HOME": str(folder), "HOME": str(folder), "GGML_NO_BACKTRACE": "1"}
    found["CUDA_DEVICE_ORDER"] = (
        "PCI_BUS_ID"  # NVML's order: else CUDA0 is the fastest card, and may be another one than was planned for
    )
    if preset is not None:
        for name, option in options().items():
            found |= option.environment(getattr(preset, name)) if applies(option, preset) else {}
    return found
