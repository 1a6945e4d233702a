"""Sampling chains: the card's values for a Qwen3.5, llama.cpp's for others, and the preset's own over both."""

from __future__ import annotations

import dataclasses

import pytest

from supervisor import sampling
from supervisor.option import Options, options


@pytest.mark.parametrize(
    ("thinking", "name", "values"),
    [  # the model card's table: temperature, top_p, top_k, min_p, presence, repeat
        (True, "chat", (1.0, 0.95, 20, 0.0, 1.5, 1.0)),
        (True, "code", (0.6, 0.95, 20, 0.0, 0.0, 1.0)),
        (False, "chat", (0.7, 0.8, 20, 0.0, 1.5, 1.0)),
        (False, "creative", (1.0, 1.0, 40, 0.0, 2.0, 1.0)),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_a_qwen35_has_its_cards_values(architecture: str, thinking: bool, name: str, values: tuple[float, ...]) -> None:
    found = sampling.chain(name, architecture=architecture, thinking=thinking)
    assert dataclasses.astuple(found)[:-1] == values
    assert "card" in found.source


def test_what_the_card_has_no_row_for_is_made_of_its_rows() -> None:
    """The card recommends nothing for structured answers, nor for code without thinking."""
    plain, thinking, generic = sampling.QWEN35_PLAIN, sampling.QWEN35_THINKING, sampling.GENERIC
    low = generic["structured"]
    assert (low.temperature, low.presence_penalty, low.repeat_penalty) == (0.2, 0.0, 1.0)
    made = dataclasses.replace(plain["chat"], temperature=low.temperature, presence_penalty=0.0, source="")
    assert dataclasses.replace(plain["structured"], source="") == made
    assert dataclasses.replace(plain["code"], source="") == dataclasses.replace(thinking["code"], source="")
    assert dataclasses.replace(thinking["structured"], source="") == dataclasses.replace(thinking["code"], source="")
    assert thinking["creative"] == thinking["chat"]
    assert all(table["benchmark"] == generic["benchmark"] for table in (plain, thinking))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("benchmark", (0.0, 1.0, 1, 0.0, 0.0, 1.0)),
        ("code", (0.2, 0.95, 40, 0.0, 0.0, 1.0)),
        ("creative", (1.0, 1.0, 0, 0.05, 0.0, 1.0)),
        ("structured", (0.2, 0.95, 40, 0.0, 0.0, 1.0)),
    ],
)
def test_an_unknown_model_has_what_the_use_asks(name: str, values: tuple[float, ...]) -> None:
    assert dataclasses.astuple(sampling.GENERIC[name])[:-1] == values


def test_the_names_are_options() -> None:
    assert sampling.NAMES == ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repeat_penalty")
    assert {name for name, option in options().items() if option.default == "chain"} == set(sampling.NAMES)


@pytest.mark.parametrize("architecture", ["", "llama", "qwen3"])
def test_another_model_has_llama_cpps_values(architecture: str) -> None:
    found = sampling.chain("chat", architecture=architecture, thinking=False)
    assert dataclasses.astuple(found)[:-1] == (0.8, 0.95, 40, 0.05, 0.0, 1.0)


@pytest.mark.parametrize("table", [sampling.GENERIC, sampling.QWEN35_PLAIN, sampling.QWEN35_THINKING])
def test_every_chain_is_whole_and_in_the_options_bounds(table: dict[str, sampling.Chain]) -> None:
    assert ", ".join(table) == options()["sampling"].kind.told
    assert table["benchmark"].temperature == 0
    for chain in table.values():
        assert chain.source
        for name in sampling.NAMES:
            value = getattr(chain, name)
            assert options()[name].kind.read(options()[name].kind.write(value)) == value


def test_what_the_preset_sets_is_left_alone() -> None:
    chosen = Options(sampling="code", temperature=0.1, top_k=7)
    found = sampling.resolve(chosen, "qwen35")
    assert found == {"top_p": 0.95, "min_p": 0.0, "presence_penalty": 0.0, "repeat_penalty": 1.0}
    assert sampling.resolve(Options(reasoning=True), "qwen35")["temperature"] == 1.0
    assert sampling.resolve(Options(reasoning=False), "qwen35")["temperature"] == 0.7
