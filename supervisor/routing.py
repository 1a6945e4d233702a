"""Which preset a request is for: by its ``model``, an alias, or the preset that answers for the rest. Pure.

A name finds (1) the preset of that name, (2) the one that has it among its ``aliases``, (3) the one with ``default: on``. llama.cpp's own
routes have no ``model``; there a request that names none is for the preset that ``llmctl up`` was given, if that was one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from supervisor.errors import Error, Exit
from supervisor.preset import Preset
from supervisor.routes import Api, Route, served_by


def resolve(
    model: str | None, route: Route, presets: Mapping[str, Preset], ordered: Sequence[str], is_here: Callable[[str], bool]
) -> str:
    """The name of the preset. Raises :class:`Error`: HTTP 404 for an unknown name, 400 for none, or a preset of another kind.

    The error names presets that would do, of those whose model ``is_here``.
    """
    name = _named(model, presets)
    if name is None and model is None and route.kind in (None, "chat") and _nameless(route) and len(ordered) == 1:
        name = ordered[0]
    if name is not None and route.kind in (None, presets[name].kind):
        return name
    fit = [each for each in presets.values() if route.kind in (None, each.kind) and is_here(each.name)]
    raise _wrong_kind(presets[name], route, fit) if name is not None else unknown(model, fit)


def is_known(model: str, presets: Mapping[str, Preset]) -> bool:
    """Whether it is a preset's name or alias."""
    return model in presets or any(model in preset.aliases for preset in presets.values())


def _named(model: str | None, presets: Mapping[str, Preset]) -> str | None:
    if model is not None:
        if model in presets:  # (1)
            return model
        if found := next((preset.name for preset in presets.values() if model in preset.aliases), None):  # (2)
            return found
    return next((preset.name for preset in presets.values() if preset.default), None)  # (3)


def _nameless(route: Route) -> bool:
    return route.api is Api.NATIVE or not route.path.startswith("/v1/")


def clash(presets: Mapping[str, Preset]) -> str | None:
    """What two presets can't both have: an alias, a preset's name as an alias, ``default: on``; a sentence, or None."""
    taken = {name: name for name in presets}
    defaults = [preset.name for preset in presets.values() if preset.default]
    for preset in presets.values():
        for alias in preset.aliases:
            if (other := taken.setdefault(alias, preset.name)) != preset.name:
                what = (
                    f"is a preset, and an alias of {preset.name}"
                    if alias in presets
                    else f"is an alias of {other} and {preset.name}"
                )
                return f"{alias!r} {what}"
    if len(defaults) > 1:
        return f"{' and '.join(defaults)} both have default: on"
    return None


def unknown(model: str | None, presets: Sequence[Preset]) -> Error:
    """The :class:`Error` (HTTP 404, or 400 for no name at all) that says which presets there are."""
    said = f"the model {_short(model)!r} does not exist" if model is not None else "the request names no model"
    known = ", ".join(preset.name for preset in presets)
    return Error(
        f"{said}; there is: {known or 'none'}",
        exit=Exit.USAGE,
        hint=f'"model": "{presets[0].name}"' if presets else "llmctl presets",
        status=404 if model is not None else 400,
        code="model_not_found" if model is not None else "missing_model",
    )


def _wrong_kind(preset: Preset, route: Route, fit: Sequence[Preset]) -> Error:
    return Error(
        f"{preset.name} is a preset for {preset.kind}, and {route.path} wants one for {route.kind}",
        exit=Exit.USAGE,
        hint=f'"model": "{fit[0].name}"' if fit else served_by(preset.kind),
        status=400,
        code="wrong_kind",
    )


def _short(name: str) -> str:
    """A name as it may stand in a sentence."""
    return name if len(name) <= 100 else f"{name[:100]}…"
