"""Words and what they mean."""

from __future__ import annotations

import pytest

from supervisor import value
from supervisor.option import options
from supervisor.value import Choice, Choices, Duration, Integer, Kind, List, Names, Number, Switch, Text, Value
from supervisor.words import FAULTS, Fault, Series, Word

WHOLE = Integer(1, 256)
AUTO = Integer(1, 16, ("auto",))
DECIMAL = Number(-2, 2)
LASTING = Duration(1, 86_400, ("off",))
DURATION = "should be 'off' or a duration from 1s to 1d, like 90s, 10m, 2h or 1d"
SOME = Choices("[a]", ("a", "b", "c"))
NAME = "a name of 1 to 128 printable characters without blanks"


@pytest.mark.parametrize(
    ("kind", "word", "expected"),
    [
        (WHOLE, "1", 1),
        (WHOLE, "010", 10),
        (WHOLE, "+7", 7),
        (AUTO, "auto", "auto"),
        (DECIMAL, "0.7", 0.7),
        (DECIMAL, "-2", -2.0),
        (DECIMAL, ".5", 0.5),
        (Choice(("a", "b")), "b", "b"),
        (Switch(), "on", True),
        (Switch("yes", "no"), "no", False),
        (Text(), "off", "off"),
        (Text(lines=True), "two\nlines\tand a tab", "two\nlines\tand a tab"),
        (DECIMAL, "0.7000000000000000000001", 0.7),
        (DECIMAL, "1." + "0" * 64, 1.0),
        (WHOLE, "0" * 63 + "7", 7),
        (List(), "--lora 'a b'", ("--lora", "a b")),
        (LASTING, "90", 90),
        (LASTING, "090s", 90),
        (LASTING, "10m", 600),
        (LASTING, "24h", 86_400),
        (LASTING, "1d", 86_400),
        (LASTING, "off", "off"),
        (Duration(0, 9), "0", 0),
        (Names(), "gpt-4o qwen/qwen3.5:4b 'ü'", ("gpt-4o", "qwen/qwen3.5:4b", "ü")),
        (Names(), "", ()),
        (SOME, "b a", ("b", "a")),
        (SOME, "", ()),
        (Names(), "a" * 128, ("a" * 128,)),
    ],
)
def test_what_is_read(kind: Kind, word: str, expected: Value) -> None:
    found = kind.read(word)
    assert (found, type(found)) == (expected, type(expected))
    assert kind.read(kind.write(found)) == found


@pytest.mark.parametrize(
    ("kind", "word", "says"),
    [
        (WHOLE, "0", "should be a whole number from 1 to 256"),
        (WHOLE, "257", "should be a whole number from 1 to 256"),
        (WHOLE, "1.0", "should be a whole number from 1 to 256"),
        (WHOLE, "1_0", "should be a whole number from 1 to 256, in the digits 0 to 9 with nothing between them"),
        (WHOLE, "1,000", "should be a whole number from 1 to 256, in the digits 0 to 9 with nothing between them"),
        (WHOLE, "٣", "should be a whole number from 1 to 256, in the digits 0 to 9 with nothing between them"),
        (WHOLE, "１", "should be a whole number from 1 to 256, in the digits 0 to 9 with nothing between them"),
        (WHOLE, " 1", "should be a whole number from 1 to 256, in the digits 0 to 9 with nothing between them"),
        (WHOLE, "9" * 5000, "should be a whole number from 1 to 256, in at most 64 digits"),
        (DECIMAL, "1." + "0" * 65, "should be a number from -2 to 2, in at most 64 digits"),
        (AUTO, "Auto", "should be 'auto' or a whole number from 1 to 16"),
        (DECIMAL, "inf", "should be a number from -2 to 2"),
        (DECIMAL, "nan", "should be a number from -2 to 2"),
        (DECIMAL, "1e-1", "should be a number from -2 to 2"),
        (DECIMAL, "2.0001", "should be a number from -2 to 2"),
        (DECIMAL, "", "should be a number from -2 to 2"),
        (Choice(("a", "b", "c")), "d", "should be 'a', 'b' or 'c'"),
        (Switch(), "true", "should be 'on' or 'off'"),
        (Text("[a-z]+", "a lower-case word"), "A", "should be a lower-case word"),
        (Text(), "bell \x07", "should be text without '\\x07'"),
        (Text(), "two\nlines", "should be text without '\\n'"),
        (Text(), "\x9b31m", "should be text without '\\x9b'"),
        (Text(), "no UTF-8 \udcff", "should be text without '\\udcff'"),
        (Text(lines=True), "two\nlines\0", "should be text without '\\x00'"),
        (Text(lines=True), "no UTF-8 \udcff", "should be text without '\\udcff'"),
        (List(), "--grammar 'a\0b'", "its word 'a\\x00b' should be without '\\x00'"),
        (List(), "--grammar 'a\nb'", "its word 'a\\nb' should be without '\\n'"),
        (List(), "'open", "should be words as a shell takes them (No closing quotation)"),
        *(
            (LASTING, word, DURATION)
            for word in ("0", "0m", "86401", "2d", "-5", "+5", "1.5h", "1h30m", "10 m", "10M", "", "s", "٣s")
        ),
        (LASTING, "9" * 5000, DURATION),
        (Duration(0, 3_600), "61m", "should be a duration from 0s to 1h, like 90s, 10m, 2h or 1d"),
        (Names(), "'a b'", f"its word 'a b' should be {NAME}"),
        (Names(), "a ''", f"its word '' should be {NAME}"),
        (Names(), "a" * 129, f"its word '{'a' * 80}…' should be {NAME}"),
        (Names(), "'a\nb'", f"its word 'a\\nb' should be {NAME}"),
        (Names(), "'a\u00a0b'", f"its word 'a\\xa0b' should be {NAME}"),
        (Names(), "'a\u202eb'", f"its word 'a\\u202eb' should be {NAME}"),
        (Names(), "no\udcff", f"its word 'no\\udcff' should be {NAME}"),
        (Names(), "a b a", "its word 'a' should stand once"),
        (SOME, "a d", "its word 'd' should be 'a', 'b' or 'c'"),
        (SOME, "a b a", "its word 'a' should stand once"),
    ],
)
def test_what_is_refused(kind: Kind, word: str, says: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the text follows)
        kind.read(word)
    assert str(raised.value) == says


@pytest.mark.parametrize("number", [0.1, 1.5, 0.05, -2.0, 1 / 3, 1e-9])
def test_a_number_is_written_without_exponent_and_reads_back(number: float) -> None:
    word = DECIMAL.write(number)
    assert "e" not in word
    assert DECIMAL.read(word) == pytest.approx(number, abs=1e-14)


@pytest.mark.parametrize(
    ("seconds", "word"),
    [
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (90, "90s"),
        (600, "10m"),
        (5_400, "90m"),
        (86_399, "86399s"),
        (86_400, "1d"),
        ("off", "off"),
    ],
)
def test_a_duration_is_written_in_the_largest_unit_that_needs_no_fraction(seconds: int | str, word: str) -> None:
    kind = Duration(0, 90_000, ("off",))
    assert kind.write(seconds) == word
    assert kind.read(word) == seconds
    assert kind.told == "off, 0s–25h"


def test_every_options_example_would_do() -> None:
    for option in options().values():
        if not isinstance(option.kind, List | Text):
            option.kind.read(option.kind.example)


def test_a_list_is_a_list_and_a_word_a_word() -> None:
    faults: list[Fault] = []
    assert value.take(List(), Series((Word("-x", 3), Word("1", 3)), 3), "extra_args", faults) == ("-x", "1")
    assert faults == []
    assert value.take(List(), Series((Word("-x\0", 3),), 3), "extra_args", faults) is None
    assert faults.pop().message == "extra_args is a list, but its word '-x\\x00' should be without '\\x00'"
    assert value.take(List(), Word("-x", 4), "extra_args", faults) is None
    assert value.take(List(), Series((Series((), 5),), 5), "extra_args", faults) is None
    assert value.take(WHOLE, Series((), 6), "contexts.long.slots", faults) is None
    assert value.take(Names(), Series((Word("gpt-4o", 7), Word("4", 7)), 7), "aliases", faults) == ("gpt-4o", "4")
    assert value.take(Names(), Series((Word("a b", 8),), 8), "aliases", faults) is None
    assert value.take(LASTING, Series((), 9), "ttl", faults) is None
    assert [(fault.line, fault.message, fault.hint) for fault in faults] == [
        (4, "extra_args is '-x', but should be a list", "extra_args: []"),
        (5, "extra_args is a list, but its items should be words, not a list", "extra_args: []"),
        (6, "contexts.long.slots is a list, but should be a whole number from 1 to 256", "slots: 1"),
        (8, f"aliases is a list, but its word 'a b' should be {NAME}", "aliases: [gpt-4o]"),
        (9, f"ttl is a list, but {DURATION}", "ttl: off"),
    ]


def test_of_many_keys_that_are_none_the_nearest_is_sought_for_those_that_will_be_told() -> None:
    faults: list[Fault] = []
    for number in range(100):
        value.unknown("slotz", number, ["slots"], faults)
    value.unknown("slot" + "z" * 100_000, 1, ["slots"], faults)
    assert [fault.hint for fault in faults].count("did you mean slots?") == FAULTS
    assert max(len(fault.message) for fault in faults) < 200
