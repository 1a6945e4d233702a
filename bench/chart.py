"""Pictures of numbers as SVG: a frame with two axes, marks, words that don't lie on each other. Text in, text out.

Sizes are the picture's own units, which are a pixel where it has its full width; a phone shows it a fifth smaller. Colours are classes that
the page declares (``s0``…), so that they follow its light and dark. A series has a mark of its own beside its colour: the palette is the
one of Okabe and Ito, "Color Universal Design" (2008), which those who see red and green alike can tell apart, and a printer can't.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

WIDTH: Final = 400
HEIGHT: Final = 262
LETTER: Final = 6.4
"""Width of a letter of 11 px, at most in the mean."""
LINE: Final = 13
MARKS: Final = (
    '<circle r="4.6"/>',
    '<rect x="-4.2" y="-4.2" width="8.4" height="8.4"/>',
    '<path d="M0-5.6 5.2 3.8H-5.2Z"/>',
    '<path d="M0-6 5.4 0 0 6-5.4 0Z"/>',
    '<path d="M0 5.6 5.2-3.8H-5.2Z"/>',
    '<path d="M-5-1.7H-1.7V-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5Z"/>',
    '<path d="M-1.6-5.4H1.6V5.4H-1.6Z"/>',
)
"""By series: circle, square, triangle, diamond, the triangle on its head, cross, bar."""
PALETTE: Final = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8c3a"),
    ("#009e73", "#2fd6a8"),
    ("#b0508f", "#e59ac4"),
    ("#a57400", "#f0c04a"),
    ("#5b5b5b", "#c8c8c8"),
    ("#3c3ca8", "#9f9ff5"),
)
"""By series, on white and on black: Okabe and Ito's, or darker where they are too faint on white, lighter where too faint on black."""

Anchor = Literal["start", "middle", "end"]


def series(number: int) -> str:
    """The class of a series."""
    return f"s{number % len(PALETTE)}"


def symbol(number: int) -> int:
    """The mark of a series: where colours begin anew, other marks go with them."""
    return (number + number // len(PALETTE)) % len(MARKS)


def definitions() -> str:
    """What :func:`mark` refers to; once in a document."""
    symbols = "".join(f'<g id="m{number}">{shape}</g>' for number, shape in enumerate(MARKS))
    return f'<svg width="0" height="0" aria-hidden="true" class="defs"><defs>{symbols}</defs></svg>'


def escaped(text: str) -> str:
    """For an element's text or an attribute."""
    return html.escape(text, quote=True)


def step(most: float, count: int) -> float:
    """The distance of about ``count`` ticks from zero to ``most``: 1, 2 or 5 times a power of ten."""
    least = most / max(1, count)
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def tick(value: float, distance: float) -> str:
    """A tick's number, with the decimals that its distance to the next one needs; from 10,000 to 10,000 in thousands."""
    if distance >= 10_000:
        return f"{value / 1000:,.0f}k"
    decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
    return f"{value:,.{decimals}f}".replace("-", "−")


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers onto an axis."""

    low: float
    high: float
    start: float
    """Where ``low`` lies."""
    end: float
    distance: float
    """From tick to tick."""

    def __call__(self, value: float) -> float:
        """Where it lies."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Where each lies, and its number."""
        first, last = math.ceil(self.low / self.distance - 1e-9), math.floor(self.high / self.distance + 1e-9)
        return [(self(number * self.distance), tick(number * self.distance, self.distance)) for number in range(first, last + 1)]

    @classmethod
    def zero(cls, values: Iterable[float], start: float, end: float, count: int = 5) -> Scale:
        """From zero to the round number above the largest."""
        most = max((value for value in values if value > 0), default=1.0)
        distance = step(most * 1.02, count)
        return cls(0.0, math.ceil(most * 1.02 / distance - 1e-9) * distance, start, end, distance)

    @classmethod
    def around(cls, values: Iterable[float], least: float, start: float, end: float) -> Scale:
        """As far below zero as above it, at least so far."""
        most = max([least, *(abs(value) for value in values)])
        distance = step(most, 2)
        high = math.ceil(most / distance - 1e-9) * distance
        return cls(-high, high, start, end, distance)


@dataclass(slots=True)
class Chart:
    """A picture in the making."""

    title: str
    """For those who don't see it."""
    height: float = HEIGHT
    left: float = 62.0
    right: float = 14.0
    top: float = 12.0
    bottom: float = 42.0
    _parts: list[str] = field(default_factory=list)
    _taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    @property
    def ends(self) -> tuple[float, float, float, float]:
        """The frame: left, top, right, bottom."""
        return self.left, self.top, WIDTH - self.right, self.height - self.bottom

    def word(self, x: float, y: float, text: str, anchor: Anchor = "start", kind: str = "") -> None:
        """Text, where its baseline begins, has its middle or ends."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind or "t"}">{escaped(text)}</text>')

    def axis_x(self, scale: Scale, unit: str) -> None:
        """Along the bottom, with its unit; ticks that would touch are left out."""
        left, top, right, bottom = self.ends
        free = -math.inf
        for x, told in scale.ticks():
            self.line([(x, top), (x, bottom)], "grid")
            half = len(told) * LETTER / 2
            if x - half > free:
                self.word(x, bottom + LINE + 2, told, "middle")
                free = x + half + LETTER
        self.line([(left, bottom), (right, bottom)], "axis")
        self.word((left + right) / 2, self.height - 8, unit, "middle", "unit")

    def axis_y(self, scale: Scale, unit: str) -> None:
        """Along the left, its unit written upwards."""
        left, top, right, bottom = self.ends
        for y, told in scale.ticks():
            self.line([(left, y), (right, y)], "grid")
            self.word(left - 6, y + 4, told, "end")
        self.line([(left, top), (left, bottom)], "axis")
        middle = (top + bottom) / 2
        self._parts.append(
            f'<text transform="translate(12 {middle:.1f}) rotate(-90)" text-anchor="middle" class="unit">{escaped(unit)}</text>'
        )

    def line(self, places: Sequence[tuple[float, float]], kind: str, of: int | None = None) -> None:
        """Through the places."""
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        own = kind if of is None else f"{kind} {series(of)}"
        self._parts.append(f'<polyline points="{points}" class="{own}"/>')
        if of is not None:
            for start, end in itertools.pairwise(places):
                self._taken += _along(start, end)

    def box(self, x: float, y: float, width: float, height: float, kind: str, of: int) -> None:
        """A rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}" class="{kind} {series(of)}"/>'
        )

    def mark(self, x: float, y: float, of: int, told: str, kind: str = "mark", size: float = 1.0) -> None:
        """A series' mark; ``told`` is shown while a pointer is on it."""
        scale = "" if size == 1 else f" scale({size:g})"
        self._parts.append(
            f'<use href="#m{symbol(of)}" transform="translate({x:.1f} {y:.1f}){scale}" class="{kind} {series(of)}">'
            f"<title>{escaped(told)}</title></use>"
        )
        self._taken.append((x - 6, y - 6, x + 6, y + 6))

    def begin(self, told: str) -> None:
        """What is drawn up to :meth:`end` belongs together; ``told`` as for a mark."""
        self._parts.append(f"<g><title>{escaped(told)}</title>")

    def end(self) -> None:
        """Of what belongs together."""
        self._parts.append("</g>")

    def fault(self, x: float, y: float, told: str) -> None:
        """What went wrong, where."""
        self._parts.append(f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8" class="fault"><title>{escaped(told)}</title></path>')

    def name(self, x: float, y: float, text: str, of: int) -> bool:
        """Beside a mark, where there is room, and whether there was. Whatever it may not lie on has to be there first."""
        width, (left, top, right, bottom) = len(text) * LETTER, self.ends
        for dx, dy, anchor in _BESIDE:
            start = x + dx - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
            box = (start, y + dy - 9, start + width, y + dy + 3)
            inside = box[0] >= left and box[2] <= right + self.right and box[1] >= top - 4 and box[3] <= bottom
            if inside and not any(_touch(box, other) for other in self._taken):
                self._taken.append(box)
                self.word(x + dx, y + dy, text, anchor, f"name {series(of)}")
                return True
        return False

    def svg(self) -> str:
        """The element."""
        told = escaped(self.title)
        return f'<svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" aria-label="{told}">{"".join(self._parts)}</svg>'


_BESIDE: Final[tuple[tuple[float, float, Anchor], ...]] = (
    (9, 4, "start"),
    (0, -10, "middle"),
    (0, 18, "middle"),
    (-9, 4, "end"),
    (7, -8, "start"),
    (7, 15, "start"),
    (-7, -8, "end"),
    (-7, 15, "end"),
)
"""Places of a name around its mark, the best first."""


def _touch(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _along(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float, float, float]]:
    """Small boxes on a line, for names to keep off."""
    count = max(1, round(math.dist(start, end) / 4))
    places = [tuple(one + (other - one) * at / count for one, other in zip(start, end, strict=True)) for at in range(count + 1)]
    return [(x - 1, y - 1, x + 1, y + 1) for x, y in places]
