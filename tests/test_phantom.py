"""A phantom has the shape of the model it stands for, takes no room, and runs in the real engine."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor import gguf, paths, phantom
from supervisor.engine import Engine
from supervisor.errors import Error, Exit
from supervisor.gguf import Header, Tensor
from supervisor.units import MIB
from tests.conftest import bare_engine
from tests.fakes import gguf as fake

SHIPPED = paths.data_folder("presets") / "headers"
MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "2")


def shipped(stem: str) -> Header:
    return gguf.expand(json.loads((SHIPPED / f"{stem}.json").read_text()))


@pytest.mark.parametrize("stem", sorted(path.stem for path in SHIPPED.glob("*.json")))
def test_a_phantom_is_read_as_its_model(stem: str, tmp_path: Path) -> None:
    header, path = shipped(stem), tmp_path / "m.gguf"
    phantom.write(header, path)
    read = gguf.read(path)
    assert read.tensors == header.tensors
    own = {key: value for key, value in header.entries.items() if not key.startswith("tokenizer.")}
    assert {key: read.entries.get(key) for key in own} == own
    assert read.lengths["tokenizer.ggml.tokens"] == header.lengths["tokenizer.ggml.tokens"]
    assert read.has_mtp == header.has_mtp
    assert path.stat().st_size == read.file_bytes >= header.tensor_bytes
    assert path.stat().st_blocks * 512 < 8 * MIB


def test_every_kind_of_value_is_written(tmp_path: Path) -> None:
    made = fake.qwen35()
    odd: dict[str, gguf.Value] = {"t": True, "i": -1, "l": -(1 << 40), "u": 1 << 40, "f": 0.5, "s": "é"}
    odd |= {"b": (True, False), "n": (1, -2), "x": (0.5, 2.0)}
    header = replace(made, entries=made.entries | {f"odd.{key}": value for key, value in odd.items()} | {"general.alignment": 64})
    phantom.write(header, tmp_path / "m.gguf")
    read = gguf.read(tmp_path / "m.gguf")
    assert {key: read.entries[f"odd.{key}"] for key in odd} == odd
    assert read.entries["odd.t"] is True
    assert "general.alignment" not in read.entries
    assert read.tensors == header.tensors


def test_factors_that_are_divided_by_are_ones(tmp_path: Path) -> None:
    made = fake.qwen35()
    header = replace(made, tensors=(*made.tensors, Tensor("rope_freqs.weight", "f32", (32,), 128)))
    phantom.write(header, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes()[-128:] == struct.pack("<32f", *[1.0] * 32)


def test_a_vocabulary_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Error, match="a vocabulary of 259 tokens or more, this header has 258") as raised:
        phantom.write(fake.qwen35(words=258), tmp_path / "m.gguf")
    assert raised.value.exit is Exit.MODEL
    phantom.write(fake.qwen35(words=259), tmp_path / "m.gguf")


def test_a_folder_that_isnt_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(Error, match="can't be written: No such file or directory"):
        phantom.write(fake.qwen35(), tmp_path / "none" / "m.gguf")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (fake.qwen35(mtp=False), ()),
        (fake.qwen35(), ()),
        (fake.qwen35(), MTP),
        (shipped("smollm2-135m-instruct.q4_1"), ()),
    ],
    ids=["qwen35", "qwen35-head-unused", "qwen35-mtp", "llama"],
)
def test_it_answers_in_the_real_engine(header: Header, words: tuple[str, ...], real_engine: Engine, tmp_path: Path) -> None:
    phantom.write(header, tmp_path / "m.gguf")
    asked = {"messages": [{"role": "user", "content": "Hé, you!"}], "max_tokens": 8, "ignore_eos": True}
    with bare_engine(real_engine.server, tmp_path / "m.gguf", *words) as client:
        reply = client.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 8
    assert ("draft_n" in reply.json()["timings"]) == bool(words)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_other_families_answer_too(architecture: str, real_engine: Engine, tmp_path: Path) -> None:
    phantom.write(fake.plain(architecture), tmp_path / "m.gguf")
    with bare_engine(real_engine.server, tmp_path / "m.gguf") as client:
        reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
    assert reply.status_code == 200, reply.text
