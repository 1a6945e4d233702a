"""Words of a text: common ones, in an order that its seed decides."""

from __future__ import annotations

import re
from itertools import islice

from bench import text


def test_the_words_are_plain_and_none_stands_twice() -> None:
    assert len(set(text.WORDS)) == len(text.WORDS) >= 300
    assert [word for word in text.WORDS if not re.fullmatch("[a-z]+", word)] == []


def test_texts_of_one_seed_begin_alike_and_those_of_another_do_not() -> None:
    long = list(islice(text.words("a", text.WORDS), 1000))
    assert list(islice(text.words("a", text.WORDS), 130)) == long[:130]
    assert list(islice(text.words("b", text.WORDS), 130)) != long[:130]
    assert len(set(long)) > 300  # not few words again and again


def test_only_known_words_are_drawn() -> None:
    assert set(islice(text.words("a", ("one", "two")), 100)) == {"one", "two"}
