"""The graph's buffer, where the engine's own log tells it. More figures are in ``test_estimate.py``."""

from __future__ import annotations

import dataclasses

import pytest

from bench.proof import memory
from supervisor import architecture, estimate, graph
from supervisor.estimate import Settings
from supervisor.layout import Place, buffers
from supervisor.units import MIB


@pytest.mark.parametrize(
    ("model", "changes", "mib"),
    [
        ("qwen3.5-4b", {}, 77.02),
        ("qwen3.5-4b", {"flash_attention": False}, 315.01),
        ("qwen3.5-4b", {"context": 32768, "speculative": "ngram"}, 103.59),
        ("smollm2-135m", {"flash_attention": False}, 166.38),
        ("gemma3-270m", {"slots": 4, "unified": True}, 28.27),
    ],
)
def test_what_the_engine_said(model: str, changes: dict[str, int | bool | str], mib: float) -> None:
    settings = dataclasses.replace(Settings(context=8192), **changes)  # type: ignore[arg-type]
    shape = architecture.read(memory.header(model))
    assert round(graph.compute(shape, estimate.shape(shape, settings))[0] / MIB, 2) == mib


def test_on_a_card_a_quantised_cache_needs_room_to_be_converted() -> None:
    """As logged on an RTX 4060: 690.28 MiB, of which 512 for 128k tokens of one layer in f16, and 170.02 for the MTP head."""
    shape = architecture.read(memory.header("qwen3.5-4b-mtp"))
    settings = Settings(
        context=131072, cache_type_k="q8_0", cache_type_v="q8_0", cuda=True, gpu_layers=99, speculative="mtp", draft_length=3
    )
    wanted = estimate.shape(shape, settings)
    assert abs(graph.compute(shape, wanted)[0] / MIB - 690.28) < 0.02
    assert (
        abs(graph.compute(shape, wanted)[0] - graph.compute(shape, dataclasses.replace(wanted, scratch=False))[0] - 512 * MIB)
        < 20 * MIB
    )
    head = estimate.shape(shape, dataclasses.replace(settings, cache_type_k="f16", cache_type_v="f16", speculative="off"))
    assert round(graph.compute(shape, head, mtp=True)[0] / MIB, 2) == 170.02


def test_without_a_card_there_is_one_buffer() -> None:
    shape = architecture.read(memory.header("smollm2-135m"))
    assert graph.compute(shape, estimate.shape(shape, Settings(context=8192)))[1] == 0


def test_nothing_is_left_on_the_other_side() -> None:
    """All nodes of a plan without a card are the host's."""
    shape = architecture.read(memory.header("qwen3.5-0.8b"))
    built = graph.build(shape, estimate.shape(shape, Settings(context=8192)))
    assert buffers(built)[Place.DEVICE] == 0
