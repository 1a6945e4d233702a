"""The memory a plan may use: of the device that holds the model, and of the host. Pure: the machine is a value.

What counts is what is free now. A card that isn't here is planned for as an idle, headless one; ``--vram`` and ``--ram`` say otherwise.
On the CPU the device is the machine's own memory, and both draw on the same bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from supervisor import cards
from supervisor.errors import Error, Exit
from supervisor.hardware import Card, Hardware
from supervisor.units import GIB, KIB, MIB

CPU: Final = "none"
REFERENCE: Final = "rtx3070"
"""The card that llmctl is made for first."""
_UNITS: Final = {"k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}
_NUMBER: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use, and what it was made for."""

    device: str
    """``RTX 3070``, or ``CPU``."""
    free_bytes: int
    """Of the device."""
    host_free_bytes: int
    source: str
    """Where the figures come from, in words."""
    machine: Hardware
    card: Card | None = None

    @property
    def place(self) -> str:
        """The device's memory in a sentence."""
        return self.device if self.cuda else "this machine's memory"

    @property
    def cuda(self) -> bool:
        """Whether the model goes to a card."""
        return self.card is not None

    def changed(self, device_bytes: int, host_bytes: int) -> Budget:
        """The budget with so many bytes more; negative ones are taken by somebody else."""
        device, host = max(0, self.free_bytes + device_bytes), max(0, self.host_free_bytes + host_bytes)
        return replace(self, free_bytes=device, host_free_bytes=host) if device_bytes or host_bytes else self

    def __repr__(self) -> str:
        return f"<Budget {self.device} {self.free_bytes // MIB} MiB, host {self.host_free_bytes // MIB} MiB, {self.source}>"


def make(device: str, machine: Hardware, *, gpu: str | None = None, vram: int | None = None, ram: int | None = None) -> Budget:
    """The budget of a preset's ``device`` (``none`` or ``CUDA0``). ``vram`` and ``ram`` are bytes that are to count as free.

    Raises :class:`Error` with exit code 4 when the device isn't here and no card was named, 2 for a card on a CPU preset.
    """
    if ram is not None:
        machine = replace(machine, total_bytes=ram, available_bytes=ram, limited=False)
    said = f"--ram {ram // MIB}M" if ram is not None else "the container's limit" if machine.limited else "free now"
    host = machine.available_bytes
    if device == CPU:
        if gpu is not None or vram is not None:
            raise Error(
                f"this preset runs on the CPU, {'--gpu' if gpu is not None else '--vram'} is about a card",
                exit=Exit.USAGE,
                hint="--set device=CUDA0 puts it on the card",
            )
        return Budget("CPU", host, host, said, machine)
    if gpu is not None:
        card = cards.named(gpu)
        said = "idle and headless"
    elif vram is not None:
        card = cards.free(vram)
    else:
        card = _here(device, machine)
        said = "free now"
    if vram is not None:
        card = replace(card, free_bytes=vram, total_bytes=max(card.total_bytes, vram))
        said = f"--vram {vram // MIB}M"
    return Budget(card.name, card.free_bytes, host, said, machine, card)


def whole(device: str, machine: Hardware) -> Budget:
    """All the memory there is, as if nothing else used it: what doesn't fit here never fits.

    Where there is no card, :data:`REFERENCE` stands for the one that a preset with a card is meant for.
    """
    if device == CPU:
        return Budget("CPU", machine.total_bytes, machine.total_bytes, "all of it", machine)
    card = _here(device, machine) if machine.cards else cards.named(REFERENCE)
    return Budget(card.name, card.total_bytes, machine.total_bytes, "all of it", machine, card)


def _here(device: str, machine: Hardware) -> Card:
    number = device.removeprefix("CUDA")
    if not machine.cards:
        raise Error(
            f"the preset runs on {device} and this machine has no NVIDIA card ({machine.no_card})",
            exit=Exit.NO_FIT,
            hint="llmctl up cpu_fallback, or plan for a card that isn't here: --gpu rtx3070",
        )
    found = next((card for card in machine.cards if str(card.index) == number), None)
    if found is None:
        known = ", ".join(f"CUDA{card.index} ({card.name})" for card in machine.cards)
        raise Error(
            f"there is no device {device}; there is: {known}", exit=Exit.NO_FIT, hint=f"--set device=CUDA{machine.cards[0].index}"
        )
    return found


def parse_size(text: str) -> int:
    """Bytes of ``7400M``, ``7.2G`` or ``7400`` (MiB, as nvidia-smi counts). Raises :class:`Error` (exit code 2)."""
    word = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = _UNITS.get(word[-1:], 0)
    number = word[:-1] if unit else word
    count = float(number) * (unit or MIB) if _NUMBER.fullmatch(number.strip()) else 0
    if not 1 <= count < 1 << 50:
        raise Error(f"{text!r} is no amount of memory", exit=Exit.USAGE, hint="7400M or 7.2G")
    return int(count)
