"""Who was in flight at a death: one at two deaths is poison, and none is forgotten too early or kept too long."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from supervisor.suspects import MARK_BYTES, MOST, REMEMBERED_S, Standing, Suspects, fingerprint


def test_equal_requests_have_one_mark_and_others_another() -> None:
    request = ("/v1/completions", "tiny", b'{"prompt": "a"}')
    assert fingerprint(*request) == fingerprint(*request)
    assert len(fingerprint(*request)) == MARK_BYTES
    others = {
        fingerprint(*request),
        fingerprint("/completion", *request[1:]),
        fingerprint(request[0], "tiny2", request[2]),
        fingerprint(*request[:2], b'{"prompt": "b"}'),
        fingerprint("/v1/completionstiny", "", request[2]),
        fingerprint(request[0], "", b"tiny" + request[2]),
    }
    assert len(others) == 6


def test_another_process_gives_another_mark() -> None:
    code = "from supervisor.suspects import fingerprint; print(fingerprint('/completion', 'tiny', b'{}').hex())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert len(bytes.fromhex(said)) == MARK_BYTES
    assert bytes.fromhex(said) != fingerprint("/completion", "tiny", b"{}")


def test_one_death_makes_a_suspect_and_two_make_poison() -> None:
    suspects = Suspects()
    assert suspects.standing(b"a", 0.0) is Standing.CLEAR
    suspects.died(b"a", 1, 0.0)
    assert suspects.standing(b"a", 1.0) is Standing.SUSPECT
    suspects.died(b"a", 2, 5.0)
    assert suspects.standing(b"a", 6.0) is Standing.POISON
    assert suspects.standing(b"b", 6.0) is Standing.CLEAR


def test_two_equal_requests_at_one_death_are_one() -> None:
    suspects = Suspects()
    for _ in range(3):
        suspects.died(b"a", 1, 0.0)
    assert suspects.standing(b"a", 0.0) is Standing.SUSPECT


def test_who_is_answered_well_is_cleared() -> None:
    suspects = Suspects()
    suspects.died(b"a", 1, 0.0)
    suspects.served(b"a")
    suspects.served(b"never noted")
    assert suspects.standing(b"a", 0.0) is Standing.CLEAR
    suspects.died(b"a", 2, 1.0)
    assert suspects.standing(b"a", 1.0) is Standing.SUSPECT


def test_either_ends_ten_minutes_after_the_last_death() -> None:
    suspects = Suspects()
    suspects.died(b"suspect", 1, 0.0)
    suspects.died(b"poison", 1, 0.0)
    suspects.died(b"poison", 2, 300.0)
    assert suspects.standing(b"suspect", REMEMBERED_S - 1) is Standing.SUSPECT
    assert suspects.standing(b"suspect", REMEMBERED_S) is Standing.CLEAR
    assert suspects.standing(b"poison", REMEMBERED_S) is Standing.POISON
    assert suspects.standing(b"poison", 300.0 + REMEMBERED_S) is Standing.CLEAR
    suspects.died(b"suspect", 3, REMEMBERED_S + 500.0)
    assert suspects.standing(b"suspect", REMEMBERED_S + 500.0) is Standing.SUSPECT


def test_it_is_falsy_while_nothing_is_noted() -> None:
    suspects = Suspects()
    assert not suspects
    suspects.died(b"a", 1, 0.0)
    assert suspects
    assert repr(suspects) == "<Suspects 1, poison 0>"
    suspects.served(b"a")
    assert not suspects
    suspects.died(b"a", 2, 0.0)
    suspects.died(b"a", 3, 0.0)
    assert suspects
    suspects.standing(b"other", REMEMBERED_S)
    assert not suspects


def test_it_is_bounded_and_poison_outlives_suspicion() -> None:
    suspects = Suspects()
    for death in (1, 2):
        suspects.died(b"poison", death, float(death))
    for number in range(MOST + 100):
        suspects.died(number.to_bytes(16), 3, 10.0)
    assert repr(suspects) == f"<Suspects {MOST - 1}, poison 1>"
    assert suspects.standing(b"poison", 10.0) is Standing.POISON
    assert suspects.standing((100).to_bytes(16), 10.0) is Standing.CLEAR
    assert suspects.standing((101).to_bytes(16), 10.0) is Standing.SUSPECT


def test_where_all_is_poison_the_oldest_gives_way_to_a_new_suspect() -> None:
    """Else nobody new could become poison."""
    suspects = Suspects()
    for number in range(MOST):
        for death in (1, 2):
            suspects.died(number.to_bytes(16), death, 0.0)
    suspects.died(b"new", 3, 1.0)
    assert suspects.standing(b"new", 1.0) is Standing.SUSPECT
    assert suspects.standing((0).to_bytes(16), 1.0) is Standing.CLEAR
    assert suspects.standing((1).to_bytes(16), 1.0) is Standing.POISON


@pytest.mark.parametrize("seed", range(40))
def test_any_history_goes_as_the_plain_words_say(seed: int) -> None:
    """The model keeps every death of every mark since it was last served, and looks at all of them each time."""
    draw = random.Random(seed)
    suspects = Suspects()
    model: dict[bytes, list[tuple[int, float]]] = {}
    marks = [bytes([number]) for number in range(draw.choice([1, 5, 40]))]
    now_s, death = 0.0, 0
    for _ in range(600):
        now_s += draw.choice([0.0, 1.0, 30.0, 200.0])
        mark = draw.choice(marks)
        if model.get(mark) and now_s - model[mark][-1][1] >= REMEMBERED_S:
            del model[mark]
        chance = draw.random()
        if chance < 0.4:
            death += draw.random() < 0.7
            history = model.setdefault(mark, [])
            if not any(number == death for number, _ in history):
                history.append((death, now_s))
            suspects.died(mark, death, now_s)
        elif chance < 0.6:
            model.pop(mark, None)
            suspects.served(mark)
        for each in marks:
            deaths = [number for number, _ in model.get(each, [])]
            ended = not deaths or now_s - model[each][-1][1] >= REMEMBERED_S
            expected = Standing.CLEAR if ended else Standing.SUSPECT if len(deaths) == 1 else Standing.POISON
            assert suspects.standing(each, now_s) is expected
        assert bool(suspects) is any(suspects.standing(each, now_s) is not Standing.CLEAR for each in marks)
