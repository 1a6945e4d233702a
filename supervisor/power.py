"""What the cards take, looked at each second while a child of ours is on one, and never else; ``energy`` shares it.

A look is a question to the driver, on a thread. One more is taken when a card's last child has ended, before NVML is closed: what its last
requests took would be lost. Where no card tells its energy there is another try each minute, since a driver can be loaded anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from supervisor.energy import Sharing
from supervisor.vram import Vram

LOOK_S: Final = 1.0
"""Between two looks. A counter goes on each 20 to 100 ms on newer cards (PETSc's manual, PetscLogGpuEnergyMeter), so one is off by a tenth
at most."""
AGAIN_S: Final = 60.0
"""Until cards that tell nothing are asked again."""

Credit = Callable[[Mapping[str, float], float], None]
"""Told joules by request, to be added to what it had, and those that nobody had. A request may have left up to a second ago."""
Tokens = Callable[[], Mapping[str, int]]
"""How many tokens those in work have made so far, at the engine that has them."""


class Power:
    """The cards' power now, and who it goes to. All but the question itself is on the loop's thread."""

    def __init__(self, cards: Vram, credit: Credit, tokens: Tokens) -> None:
        self._cards = cards
        self._credit = credit
        self._tokens = tokens
        self._sharing = Sharing()
        self._watts: Mapping[str, float] = {}
        self._turn = 0
        """Grows when a card is left: what a thread has read before that is of no use."""
        cards.leaving = self._leave_card

    def __repr__(self) -> str:
        return f"<Power {self.watts} W>"

    @property
    def watts(self) -> float | None:
        """What the cards that children are on took in the last second, together; None if that isn't known."""
        return sum(self._watts.values()) if self._watts else None

    def enter(self, request: str, device: str) -> None:
        """An engine on this card (``CUDA0``) has it."""
        self._sharing.enter(request, device, time.monotonic())

    def leave(self, request: str, tokens: int) -> None:
        """It has ended, with so many tokens of its last engine. Harmless for one that never entered."""
        self._sharing.leave(request, tokens, time.monotonic())

    async def tend(self) -> None:
        """Look each second while a child is on a card, until it is cancelled."""
        while True:
            await self._cards.used.wait()
            await asyncio.sleep(LOOK_S if await self.sample() else AGAIN_S)

    async def sample(self) -> bool:
        """Look once; False if the cards tell nothing of their energy."""
        turn = self._turn
        energy_mj, now_s = await asyncio.to_thread(self._read)
        if turn != self._turn:
            return True  # that nothing was told may be because nobody was there
        self._share(energy_mj, now_s)
        return energy_mj is not None

    def _read(self) -> tuple[dict[str, int] | None, float]:
        found = self._cards.energy_mj()  # may take a while, when it opens NVML
        return found, time.monotonic()

    def _share(self, energy_mj: Mapping[str, int] | None, now_s: float) -> None:
        shares = self._sharing.look(now_s, energy_mj or {}, self._tokens())
        self._watts = shares.watts
        if shares.by_request or shares.idle_j:
            self._credit(shares.by_request, shares.idle_j)

    def _leave_card(self, device: str) -> None:
        """The last child on a card has ended."""
        self._turn += 1
        if self._cards.is_open:  # opening it takes long, and there would be nothing to compare with
            self._share(*self._read())
        self._sharing.forget(device)
        self._watts = {each: watts for each, watts in self._watts.items() if each != device}
