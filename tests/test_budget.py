"""The memory a plan may use, for machines that are values."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor import budget
from supervisor.errors import Error, Exit
from supervisor.hardware import Card, Hardware
from supervisor.units import GIB, MIB

CARD = Card(0, "NVIDIA GeForce RTX 3070", "GPU-1", "86", 7840 * MIB, 7100 * MIB, 5888, 2100)


def machine(*cards: Card, **more: Any) -> Hardware:
    return Hardware("cpu", frozenset({"avx2"}), "AMD 25 33", 8, 16 * GIB, 12 * GIB, cards, "", "no driver", **more)


def test_what_is_free_now_counts() -> None:
    found = budget.make("CUDA0", machine(CARD))
    assert (found.device, found.free_bytes, found.host_free_bytes, found.source) == (CARD.name, 7100 * MIB, 12 * GIB, "free now")
    assert found.cuda


def test_the_second_card() -> None:
    second = Card(1, "NVIDIA GeForce RTX 3060", "GPU-2", "86", 12288 * MIB, 11000 * MIB)
    assert budget.make("CUDA1", machine(CARD, second)).device == second.name


def test_on_the_cpu_the_device_is_the_hosts_memory() -> None:
    found = budget.make("none", machine(CARD))
    assert (found.device, found.free_bytes, found.host_free_bytes, found.cuda) == ("CPU", 12 * GIB, 12 * GIB, False)


def test_a_containers_limit_is_said() -> None:
    assert budget.make("none", machine(limited=True)).source == "the container's limit"


def test_a_card_that_is_not_here() -> None:
    found = budget.make("CUDA0", machine(), gpu="rtx3070")
    assert (found.device, found.free_bytes // MIB, found.source) == ("RTX 3070", 7670, "idle and headless")


@pytest.mark.parametrize("gpu", [None, "rtx3070"])
def test_so_much_of_a_card_is_free(gpu: str | None) -> None:
    found = budget.make("CUDA0", machine(), gpu=gpu, vram=6300 * MIB)
    assert (found.free_bytes, found.source) == (6300 * MIB, "--vram 6300M")


def test_so_much_of_the_host_is_free() -> None:
    found = budget.make("none", machine(), ram=8 * GIB)
    assert (found.free_bytes, found.host_free_bytes, found.source) == (8 * GIB, 8 * GIB, "--ram 8192M")


@pytest.mark.parametrize(
    ("device", "asked", "message", "hint", "code"),
    [
        (
            "CUDA0",
            {},
            "the preset runs on CUDA0 and this machine has no NVIDIA card (no driver)",
            "llmctl up cpu_fallback, or plan for a card that isn't here: --gpu rtx3070",
            Exit.NO_FIT,
        ),
        (
            "none",
            {"gpu": "rtx3070"},
            "this preset runs on the CPU, --gpu is about a card",
            "--set device=CUDA0 puts it on the card",
            Exit.USAGE,
        ),
        (
            "none",
            {"vram": MIB},
            "this preset runs on the CPU, --vram is about a card",
            "--set device=CUDA0 puts it on the card",
            Exit.USAGE,
        ),
    ],
)
def test_what_can_not_be_planned_for(device: str, asked: dict[str, Any], message: str, hint: str, code: Exit) -> None:
    with pytest.raises(Error) as caught:
        budget.make(device, machine(), **asked)
    assert (caught.value.message, caught.value.hint, caught.value.exit) == (message, hint, code)


def test_a_device_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(Error) as caught:
        budget.make("CUDA3", machine(CARD))
    assert caught.value.message == "there is no device CUDA3; there is: CUDA0 (NVIDIA GeForce RTX 3070)"
    assert caught.value.hint == "--set device=CUDA0"


def test_what_others_would_give_or_have_yet_to_take_changes_it() -> None:
    found = budget.make("CUDA0", machine(CARD)).changed(500 * MIB, -2 * GIB)
    assert (found.free_bytes, found.host_free_bytes) == (7600 * MIB, 10 * GIB)
    assert (found.device, found.source, found.card) == (CARD.name, "free now", CARD)


def test_no_budget_is_below_nothing() -> None:
    found = budget.make("none", machine()).changed(-13 * GIB, -13 * GIB)
    assert (found.free_bytes, found.host_free_bytes) == (0, 0)


def test_without_others_it_is_the_same() -> None:
    found = budget.make("none", machine())
    assert found.changed(0, 0) is found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7400M", 7400 * MIB),
        ("7400", 7400 * MIB),
        ("7400 MiB", 7400 * MIB),
        ("7.5G", 7680 * MIB),
        ("8gb", 8 * GIB),
        ("512k", 512 * 1024),
    ],
)
def test_amounts(text: str, count: int) -> None:
    assert budget.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "M", "much", "-1G", "0", "nan", "inf", "1e99", "7_0", "７", "0.000000001k", "9999999T"])
def test_no_amounts(text: str) -> None:
    with pytest.raises(Error) as caught:
        budget.parse_size(text)
    assert (caught.value.message, caught.value.hint, caught.value.exit) == (
        f"{text!r} is no amount of memory",
        "7400M or 7.2G",
        Exit.USAGE,
    )
