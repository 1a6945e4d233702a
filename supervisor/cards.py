"""Cards that aren't here: planning for ``--gpu rtx3070`` on any machine.

Memory, cores and boost clock are NVIDIA's published figures (desktop reference cards). What of the memory an idle, headless Linux box
leaves free is measured: 7,670 of 8,192 MiB on RTX 3070s (CUDA itself reports 7,816 to 7,885 there, before a context), taken as the same
share for the others. A desktop takes more: say what is free with ``--vram``.
"""

from __future__ import annotations

from typing import Final

from supervisor.errors import Error, Exit
from supervisor.hardware import Card
from supervisor.units import MIB
from supervisor.value import nearest

FREE_SHARE: Final = 7670 / 8192
UNKNOWN_ARCH: Final = "86"
"""Of a card of which only the free memory was said: that of the reference card."""

_CARDS: Final[dict[str, tuple[int, str, int, int]]] = {
    # name: memory in MiB, compute capability without the dot, CUDA cores, boost clock in MHz
    "rtx2060": (6144, "75", 1920, 1680),
    "rtx2070": (8192, "75", 2304, 1620),
    "rtx2080": (8192, "75", 2944, 1710),
    "rtx2080ti": (11264, "75", 4352, 1545),
    "rtx3050": (8192, "86", 2560, 1777),
    "rtx3060": (12288, "86", 3584, 1777),
    "rtx3060ti": (8192, "86", 4864, 1665),
    "rtx3070": (8192, "86", 5888, 1725),
    "rtx3070ti": (8192, "86", 6144, 1770),
    "rtx3080": (10240, "86", 8704, 1710),
    "rtx3080ti": (12288, "86", 10240, 1665),
    "rtx3090": (24576, "86", 10496, 1695),
    "rtx4060": (8192, "89", 3072, 2460),
    "rtx4060ti": (8192, "89", 4352, 2535),
    "rtx4070": (12288, "89", 5888, 2475),
    "rtx4070ti": (12288, "89", 7680, 2610),
    "rtx4080": (16384, "89", 9728, 2505),
    "rtx4090": (24576, "89", 16384, 2520),
    "rtx5060": (8192, "120", 3840, 2497),
    "rtx5060ti": (16384, "120", 4608, 2572),
    "rtx5070": (12288, "120", 6144, 2512),
    "rtx5080": (16384, "120", 10752, 2617),
    "rtx5090": (32768, "120", 21760, 2407),
}
NAMES: Final = tuple(_CARDS)


def named(name: str) -> Card:
    """The card of that name ("rtx3070", "RTX 3070 Ti", "NVIDIA GeForce RTX 4060"), idle and headless. Raises :class:`Error` for others."""
    key = "".join(char for char in name.lower() if char.isalnum()).removeprefix("nvidia").removeprefix("geforce")
    if key not in _CARDS:
        near = nearest(key, NAMES)
        raise Error(
            f"the card {name!r} is not one of those known: {', '.join(NAMES)}",
            exit=Exit.USAGE,
            hint=f"--gpu {near}" if near else "--vram 7400M, what is free on it",
        )
    memory_mib, arch, cores, clock_mhz = _CARDS[key]
    title = f"RTX {key[3:7]}{' Ti' if key.endswith('ti') else ''}"
    return Card(0, title, "", arch, memory_mib * MIB, round(memory_mib * FREE_SHARE) * MIB, cores, clock_mhz)


def free(bytes_: int) -> Card:
    """A card of which only this is known: so many bytes are free."""
    return Card(0, "card", "", UNKNOWN_ARCH, bytes_, bytes_)
