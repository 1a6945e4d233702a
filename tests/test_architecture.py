"""A model's shape, read from true headers and from headers that are wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import pytest

from bench.proof import memory
from supervisor import architecture, gguf
from supervisor.errors import Error, Exit
from supervisor.gguf import Header, Tensor, Value
from supervisor.units import MIB
from tests.fakes import gguf as fake


def read(model: str) -> architecture.Architecture:
    return architecture.read(memory.header(model))


def changed(header: Header, changes: Mapping[str, Value | None]) -> Header:
    """The header with some keys replaced, or taken away where the value is None."""
    entries = {**header.entries, **changes}
    return dataclasses.replace(header, entries={key: value for key, value in entries.items() if value is not None})


def plain(family: str, **keys: Value) -> Header:
    """A header of four layers of 64 elements."""
    whole: dict[str, Value] = {
        "block_count": 4,
        "embedding_length": 64,
        "feed_forward_length": 192,
        "attention.head_count": 4,
        "context_length": 2048,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    entries: dict[str, Value] = {"general.architecture": family} | {f"{family}.{key}": value for key, value in whole.items()}
    return Header(3, entries, {}, (Tensor("token_embd.weight", "f32", (64, 512), 64 * 512 * 4),), 0)


@pytest.mark.parametrize(
    ("model", "n_layer", "full", "widths", "state_mib"),
    [
        ("qwen3.5-0.8b", 24, 6, (512, 512), 19.27),
        ("qwen3.5-2b", 24, 6, (512, 512), 19.27),
        ("qwen3.5-4b", 32, 8, (1024, 1024), 50.25),
        ("qwen3.5-9b", 32, 8, (1024, 1024), 50.25),
    ],
)
def test_qwen35(model: str, n_layer: int, full: int, widths: tuple[int, int], state_mib: float) -> None:
    """Widths and state are those of the published configurations."""
    shape = read(model)
    attending = [layer for layer in shape.layers if layer.kind == "full"]
    assert (shape.n_layer, len(attending), shape.mtp) == (n_layer, full, ())
    assert {(layer.k_width, layer.v_width) for layer in attending} == {widths}
    assert [i for i, layer in enumerate(shape.layers) if layer.kind == "full"][:2] == [3, 7]
    assert round(shape.state_row_bytes / MIB, 2) == state_mib
    assert (shape.vocabulary, shape.context_train, shape.rough) == (248320, 262144, "")
    assert shape.tied == (model != "qwen3.5-9b")


def test_the_mtp_head_is_a_full_layer_of_its_own() -> None:
    shape, without = read("qwen3.5-4b-mtp"), read("qwen3.5-4b")
    assert [layer.kind for layer in shape.mtp] == ["full"]
    assert shape.layers == without.layers
    assert (shape.offloadable, without.offloadable) == (34, 33)


def test_recurrent_layers_written_out_win_over_the_interval() -> None:
    told = (True,) * 30 + (False,) * 2
    shape = architecture.read(changed(memory.header("qwen3.5-4b"), {"qwen35.attention.recurrent_layers": told}))
    assert [layer.kind for layer in shape.layers].count("full") == 2


def test_gemma3_looks_back_on_a_window_in_five_layers_of_six() -> None:
    shape = read("gemma3-270m")
    assert [i for i, layer in enumerate(shape.layers) if layer.kind == "full"] == [5, 11, 17]
    assert (shape.window, shape.head_k, shape.qk_norm, shape.tied) == (512, 256, True, True)


@pytest.mark.parametrize(("pattern", "full"), [(3, [2]), (0, []), ((True, False, True, False), [1, 3])])
def test_a_windows_pattern(pattern: Value, full: list[int]) -> None:
    header = plain("gemma3", attention__sliding_window=128, attention__sliding_window_pattern=pattern)
    assert [i for i, layer in enumerate(architecture.read(header).layers) if layer.kind == "full"] == full


def test_gemma3_without_a_window_attends_to_everything() -> None:
    assert {layer.kind for layer in architecture.read(plain("gemma3")).layers} == {"full"}


def test_smollm2_is_a_llama() -> None:
    shape = read("smollm2-135m")
    assert (shape.family, shape.n_layer, shape.n_embd, shape.vocabulary) == ("llama", 30, 576, 49152)
    assert {(layer.n_head, layer.k_width, layer.v_width, layer.n_ff) for layer in shape.layers} == {(9, 192, 192, 1536)}


def test_numbers_a_layer() -> None:
    shape = architecture.read(plain("llama", attention__head_count_kv=(1, 2, 4, 4), feed_forward_length=(64, 128, 192, 256)))
    assert [(layer.k_width, layer.n_ff) for layer in shape.layers] == [(16, 64), (32, 128), (64, 192), (64, 256)]


def test_what_isnt_said_is_taken_as_llama_cpp_takes_it() -> None:
    """As many heads of keys as of queries, as wide as the model divided by them."""
    assert {layer.k_width for layer in architecture.read(plain("qwen2")).layers} == {64}


def test_biases_and_norms_are_seen_by_their_tensors() -> None:
    header = plain("qwen2")
    more = (Tensor("blk.0.attn_q.bias", "f32", (64,), 256), Tensor("blk.0.attn_q_norm.weight", "f32", (16,), 64))
    with_them = architecture.read(dataclasses.replace(header, tensors=header.tensors + more))
    without = architecture.read(header)
    assert (with_them.qkv_bias, with_them.qk_norm) == (True, True)
    assert (without.qkv_bias, without.qk_norm) == (False, False)


def test_an_unknown_family_is_planned_as_a_plain_transformer_and_says_so() -> None:
    shape = architecture.read(plain("mamba9"))
    known = "gemma3, llama, qwen2, qwen3, qwen35, smollm3"
    assert shape.rough == f"the estimate is rough: mamba9 is planned as a plain transformer, known are {known}"
    assert {layer.kind for layer in shape.layers} == {"full"}


def test_an_unknown_family_may_leave_its_width_of_feed_forward_out() -> None:
    header = changed(plain("moe9"), {"moe9.feed_forward_length": None})
    assert {layer.n_ff for layer in architecture.read(header).layers} == {256}


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "feed_forward_length"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(Error) as caught:
        architecture.read(changed(plain("llama"), {f"llama.{key}": None}))
    assert f"llama.{key}" in caught.value.message
    assert caught.value.exit is Exit.MODEL


@pytest.mark.parametrize("key", ["ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"])
def test_a_missing_key_of_the_delta_net_is_named(key: str) -> None:
    with pytest.raises(Error) as caught:
        architecture.read(changed(memory.header("qwen3.5-4b"), {f"qwen35.{key}": None}))
    assert f"qwen35.{key}" in caught.value.message


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"block_count": 10**9}, "llama.block_count is 1000000000"),
        ({"nextn_predict_layers": 4}, "llama.block_count is 4"),
        ({"attention__head_count": 0}, "llama.attention.head_count is 0"),
        ({"attention__head_count_kv": (1, 2)}, "llama.attention.head_count_kv is 2 values for 4 layers"),
    ],
)
def test_a_senseless_number_is_named(keys: dict[str, Value], said: str) -> None:
    with pytest.raises(Error) as caught:
        architecture.read(plain("llama", **keys))
    assert caught.value.message == f"the model's {said}, which makes no sense"


@pytest.mark.parametrize(("key", "value"), [("full_attention_interval", 0), ("ssm.group_count", 0), ("ssm.time_step_rank", 0)])
def test_a_senseless_delta_net_is_refused(key: str, value: int) -> None:
    with pytest.raises(Error, match="makes no sense"):
        architecture.read(changed(memory.header("qwen3.5-4b"), {f"qwen35.{key}": value}))


def test_every_shipped_header_can_be_read() -> None:
    from supervisor import paths

    for path in sorted((paths.data_folder("presets") / "headers").glob("*.json")):
        assert architecture.read(gguf.expand(json.loads(path.read_text()))).rough == "", path.name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", -1),
        ("attention.head_count_kv", (-1,) * 8),
        ("attention.head_count", 0),
        ("attention.key_length", -(10**9)),
        ("feed_forward_length", -1),
        ("feed_forward_length", 1 << 40),
        ("embedding_length", 0),
        ("ssm.conv_kernel", -(10**9)),
        ("ssm.state_size", 1 << 40),
    ],
)
def test_a_width_that_makes_no_sense_is_refused(key: str, value: int | tuple[int, ...]) -> None:
    header = fake.qwen35()
    with pytest.raises(Error) as caught:
        architecture.read(dataclasses.replace(header, entries={**header.entries, f"qwen35.{key}": value}))
    assert f"qwen35.{key} is " in caught.value.message
    assert "makes no sense" in caught.value.message
