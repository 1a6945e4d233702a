"""Cards that aren't here."""

from __future__ import annotations

import pytest

from supervisor import cards
from supervisor.errors import Error, Exit
from supervisor.units import MIB


@pytest.mark.parametrize("name", ["rtx3070", "RTX 3070", "rtx-3070", "NVIDIA GeForce RTX 3070"])
def test_a_card_by_any_of_its_spellings(name: str) -> None:
    card = cards.named(name)
    assert (card.name, card.arch, card.total_bytes, card.free_bytes) == ("RTX 3070", "86", 8192 * MIB, 7670 * MIB)


def test_every_card_has_its_title() -> None:
    assert cards.named("rtx4060ti").name == "RTX 4060 Ti"
    for name in cards.NAMES:
        card = cards.named(name)
        assert cards.named(card.name) == card
        assert 0.9 * card.total_bytes < card.free_bytes < card.total_bytes
        assert card.cores
        assert card.clock_mhz


@pytest.mark.parametrize(("name", "hint"), [("rtx3071", "--gpu rtx3070"), ("voodoo2", "--vram 7400M, what is free on it")])
def test_an_unknown_card_is_named_with_those_known(name: str, hint: str) -> None:
    with pytest.raises(Error) as caught:
        cards.named(name)
    assert caught.value.message.startswith(f"the card {name!r} is not one of those known: rtx2060, ")
    assert (caught.value.exit, caught.value.hint) == (Exit.USAGE, hint)
