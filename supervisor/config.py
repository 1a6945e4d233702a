"""The user's own settings, ``config.yaml`` in the config folder: what isn't any preset's. Each is declared once, as an option is.

The file is read as strictly as a preset's: an unknown key, one that stands twice and a value out of its bounds are faults with their line
(``words``, ``value``). No file, or one in which every line is a comment, is every default.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from supervisor import words
from supervisor.errors import Error, Exit
from supervisor.paths import Home
from supervisor.value import Integer, Kind, Number, Schema, Text, Value, take, unknown
from supervisor.words import Fault, first

_DEAREST: Final = 1_000_000
"""Of a kWh. In the smallest units that there are, a rial's or a đồng's, one costs some thousands."""
_CURRENCY: Final = Text(
    r"[A-Za-z.$\u00a2-\u00a5\u00c0-\u024f\u0370-\u1fff\u20a0-\u20cf\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]{1,8}",
    "1 to 8 letters or signs, without blanks",
    "EUR",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One declaration."""

    name: str
    kind: Kind
    default: Value | None
    """None is that there is none."""
    help: str
    unit: str = ""
    example: str = ""
    """What to write: following it must not change what a person meant to leave alone."""


def _setting(default: Any, kind: Kind, help_text: str, unit: str = "", example: str = "") -> Any:  # noqa: ANN401
    """Declare a setting as a field of :class:`Config`."""
    return field(default=default, metadata={"kind": kind, "help": help_text, "unit": unit, "example": example or str(default)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting, with its value."""

    price_per_kwh: float | None = _setting(
        None, Number(0, _DEAREST), "what a kWh costs, in the currency; without it, energy has no price", "a kWh", "0.30"
    )
    currency: str = _setting("", _CURRENCY, "written behind sums of money, as it is", example="EUR")
    records_days: int = _setting(365, Integer(1, 36_500), "how long the record of a request is kept; sums by day stay", "days")
    records_mib: int = _setting(512, Integer(16, 1_000_000), "the most that all records may take; the oldest go first", "MiB")


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Every setting by name, in the order of the declarations."""
    return MappingProxyType(
        {
            each.name: Setting(each.name, default=cast(Value | None, each.default), **each.metadata)
            for each in dataclasses.fields(Config)
        }
    )


def load(home: Home) -> Config:
    """The user's settings; every default where there is no file.

    Raises :class:`Error` (exit code 3) for anything wrong in it; the message names file and line.
    """
    path = home.config_file
    if not os.path.lexists(path):
        return Config()
    config, faults = check(path)
    if faults:
        worst = min(faults, key=lambda fault: (fault.rank, fault.line))
        raise Error(worst.where(path), exit=Exit.CONFIG, hint=worst.hint)
    return config


def check(path: Path) -> tuple[Config, tuple[Fault, ...]]:
    """The settings in a file, and all that is wrong with it, by line. What is wrong has its default."""
    try:
        root, noted = words.read(path)
    except words.Unreadable as exc:
        faults = () if _says_nothing(path) else (dataclasses.replace(exc.fault, hint=f"a line a setting: {_example()}"),)
        return Config(), faults
    found: dict[str, Any] = {}
    faults_found = list(noted)
    for key, node in root.entries.items():
        if key not in settings():
            unknown(key, root.lines[key], settings(), faults_found)
        elif (value := take(settings()[key].kind, node, key, faults_found)) is not None:
            found[key] = value
        else:
            faults_found[-1] = dataclasses.replace(faults_found[-1], hint=f"{key}: {settings()[key].example}")
    return Config(**found), first(faults_found)


def _says_nothing(path: Path) -> bool:
    """Whether a file has only comments and blank lines, as one in which everything is commented out."""
    try:
        lines = path.read_bytes().splitlines() if path.is_file() and path.stat().st_size <= words.SIZE_BYTES else [b"?"]
    except OSError:  # it can't be read: that has been said
        return False
    return all(not line.strip() or line.lstrip().startswith(b"#") for line in lines)


def _example() -> str:
    name, setting = next(iter(settings().items()))
    return f"{name}: {setting.example}"


def worded(config: Config) -> Mapping[str, str]:
    """Each setting as a person would write it; empty for none."""
    values = ((name, getattr(config, name)) for name in settings())
    return MappingProxyType({name: "" if value is None else settings()[name].kind.write(value) for name, value in values})


def schema() -> Schema:
    """The file as JSON Schema, for an editor that has read the YAML."""
    properties = {}
    for name, setting in settings().items():
        unit = f" ({setting.unit})" if setting.unit else ""
        default = {} if setting.default is None else {"default": setting.default}
        properties[name] = setting.kind.schema() | {"description": setting.help + unit} | default
    return {"title": "settings of llmctl", "type": "object", "additionalProperties": False, "properties": properties}
