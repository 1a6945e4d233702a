"""``llmctl schema``: the JSON Schema of a preset's file, or of ``config.yaml``, from the declarations; an editor completes with it."""

from __future__ import annotations

from typing import Any

import click

from supervisor import config, model, profile, render
from supervisor.option import options
from supervisor.value import Schema

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


@click.command("schema")
@click.option("--config", "of_config", is_flag=True, help="That of config.yaml.")
def command(of_config: bool) -> None:
    """Print the JSON Schema of a preset's file, or of the user's settings.

    \b
    llmctl schema > preset.schema.json
    # yaml-language-server: $schema=preset.schema.json    (as a preset's second line)
    llmctl schema --config > config.schema.json
    """
    render.as_json({"$schema": _DRAFT, **config.schema()} if of_config else document())


def document() -> dict[str, Any]:
    """A preset's schema."""
    settings: dict[str, Schema] = {}
    for name, option in options().items():
        unit = f" ({option.unit})" if option.unit else ""
        default = list(option.default) if isinstance(option.default, tuple) else option.default
        word = option.kind.write(option.default) if isinstance(option.default, bool) else default
        settings[name] = option.kind.schema() | {"description": option.help + unit, "default": word}
    for name, told in profile.MODELS.items():
        settings[name] = {"$ref": "#/$defs/model", "description": told}
    overlay = {**settings, "fallback": {"$ref": "#/$defs/fallback"}}
    rung = {name: value for name, value in settings.items() if name not in profile.RUNG_FIXED}
    return {
        "$schema": _DRAFT,
        "title": "a preset of llmctl",
        **_block(
            {
                **overlay,
                "contexts": _named({"allOf": [{"$ref": "#/$defs/overlay"}, {"required": ["context"]}]}, "contexts"),
                "modes": _named({"$ref": "#/$defs/overlay"}, "modes"),
                "default_context": {"type": "string", "description": profile.BLOCKS["default_context"]},
                "default_mode": {"type": "string", "description": profile.BLOCKS["default_mode"]},
            }
        ),
        "required": ["model"],
        "$defs": {
            "model": model.schema(),
            "overlay": _block(overlay),
            "fallback": {
                "type": "array",
                "description": profile.BLOCKS["fallback"],
                "items": {"anyOf": [{"enum": [profile.FEWER_LAYERS]}, _block(rung) | {"minProperties": 1}]},
            },
        },
    }


def _block(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _named(schema: Schema, key: str) -> Schema:
    return {
        "type": "object",
        "description": profile.BLOCKS[key],
        "propertyNames": {"pattern": f"^{profile.NAME}$"},
        "additionalProperties": schema,
    }
