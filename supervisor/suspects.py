"""Requests that were in flight when a child died: who is suspected of it, and who is refused. Pure: time is an argument.

A request in flight at one death is a suspect: it may have killed the child, or was only there. It runs alone when it comes again
(``admission``), so that what it kills next is itself only. One in flight at two deaths is poison, and refused: SDKs send a failed request
again, and one killer prompt would take the preset down for everybody. Either ends :data:`REMEMBERED_S` after the last death, and as soon
as the request is answered well. Which deaths count is not decided here: nobody is blamed for a kill from outside (``causes``).

What is kept of a request is a :func:`fingerprint`, in memory only, of its bytes: another client's spacing makes another request.
"""

from __future__ import annotations

import hashlib
import secrets
from enum import Enum, auto
from typing import Final

REMEMBERED_S: Final = 600.0
"""A client that tries again after so long is rather somebody else, or a driver was mended."""
MOST: Final = 1024
"""Requests that are remembered: a hundred kilobytes, and many more than one child has in flight at five deaths."""
MARK_BYTES: Final = 16
_SALT: Final = secrets.token_bytes(32)
"""Drawn once a process: without it nothing of a prompt can be guessed from its mark."""


class Standing(Enum):
    """What is thought of a request."""

    CLEAR = auto()
    SUSPECT = auto()
    """In flight at one death: it runs alone."""
    POISON = auto()
    """In flight at two: it is refused."""


def fingerprint(path: str, preset: str, body: bytes) -> bytes:
    """The mark of a request: equal for equal requests within this process, and never written anywhere. 10 MB take about 20 ms."""
    mark = hashlib.blake2b(digest_size=MARK_BYTES, key=_SALT)
    for part in (path.encode(), preset.encode()):
        mark.update(len(part).to_bytes(8, "big") + part)
    mark.update(body)
    return mark.digest()


class Suspects:
    """The marks of those that were in flight at a death. Falsy when there are none, so that nothing has to be hashed.

    Each half is in the order of its last death, the oldest first, so that what ends is in front.
    """

    def __init__(self) -> None:
        self._suspects: dict[bytes, tuple[object, float]] = {}
        """The last death, and when it was."""
        self._poison: dict[bytes, tuple[object, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._suspects or self._poison)

    def __repr__(self) -> str:
        return f"<Suspects {len(self._suspects)}, poison {len(self._poison)}>"

    def died(self, mark: bytes, death: object, now_s: float) -> None:
        """``mark`` was in flight at ``death`` (its number, say): two equal requests at one death count once."""
        self._forget(now_s)
        known = self._poison.get(mark) or self._suspects.get(mark)
        if known is not None and known[0] == death:
            return
        noted = self._suspects if known is None else self._poison
        self.served(mark)
        noted[mark] = death, now_s
        if len(self._suspects) + len(self._poison) > MOST:
            old = next(each for half in (self._suspects, self._poison) for each in half if each != mark)
            self.served(old)

    def served(self, mark: bytes) -> None:
        """It was answered well: nothing is held against it."""
        self._suspects.pop(mark, None)
        self._poison.pop(mark, None)

    def standing(self, mark: bytes, now_s: float) -> Standing:
        """What is thought of it now."""
        self._forget(now_s)
        if mark in self._poison:
            return Standing.POISON
        return Standing.SUSPECT if mark in self._suspects else Standing.CLEAR

    def _forget(self, now_s: float) -> None:
        for half in (self._suspects, self._poison):
            while half:
                oldest = next(iter(half))
                if now_s - half[oldest][1] < REMEMBERED_S:
                    break
                del half[oldest]
