"""Bytes and durations as people read them. Inside the program a number's unit is in its name: ``_bytes``, ``_mib``, ``_s``, ``_ms``."""

from __future__ import annotations

from collections.abc import Callable

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

Progress = Callable[[str, int, int], None]
"""How long work reports: ``(what, done, total)``, called often; total 0 means not known. See ``render.progress``."""


JOULES_A_WH = 3600.0


def size(count_bytes: float) -> str:
    """``98362432`` → ``"93.8 MiB"``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count_bytes >= unit:
            return f"{count_bytes / unit:.1f} {name}"
    return f"{count_bytes:.0f} B"


def spell_ms(milliseconds: float) -> str:
    """``410.2`` → ``"410 ms"``, ``9400`` → ``"9.4 s"``."""
    return f"{milliseconds:.0f} ms" if milliseconds < 999.5 else duration(milliseconds / 1e3)


def duration(seconds: float) -> str:
    """``4.2`` → ``"4.2 s"``, ``75`` → ``"1 min 15 s"``, ``7260`` → ``"2 h 1 min"``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
