"""A model file is told from everything that is none, before a process is started on it; its header is read whole, whoever made it."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from supervisor import ggml, paths, phantom
from supervisor import gguf as headers
from supervisor.cursor import LIMIT_BYTES
from supervisor.errors import Error, Exit
from supervisor.units import MIB
from tests.fakes import gguf

SHIPPED = sorted((paths.data_folder("presets") / "headers").glob("*.json"))


@dataclass
class Memory:
    """A file in memory that counts what is read; past ``content`` it is ``size`` bytes of zeros."""

    content: bytes
    size: int = 0
    name: str = "m.gguf"
    read_bytes: int = 0

    def __post_init__(self) -> None:
        self.size = self.size or len(self.content)

    def read_at(self, offset: int, count: int) -> bytes:
        count = max(0, min(count, self.size - offset))
        self.read_bytes += count
        return self.content[offset : offset + count].ljust(count, b"\0")

    def sibling(self, name: str) -> Memory:
        raise AssertionError(f"nobody asked for {name}")


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, data: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + data


def array(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return pair(key, 9, struct.pack("<IQ", kind, count) + data)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def built(
    *parts: bytes, pairs: int | None = None, tensors: int | None = None, tail: int = 4096, size: int = 0, version: int = 3
) -> Memory:
    """A file of these pairs and tensors, told apart by their counts; ``tail`` bytes of data follow."""
    of_tensors = tensors or 0
    of_pairs = len(parts) - of_tensors if pairs is None else pairs
    return Memory(b"GGUF" + struct.pack("<IQQ", version, of_tensors, of_pairs) + b"".join(parts) + bytes(tail), size)


def refused(source: Memory | Path) -> Error:
    with pytest.raises(Error) as raised:
        headers.read(source)
    assert raised.value.exit is Exit.MODEL
    assert raised.value.hint
    return raised.value


# What is read.


def test_a_gguf_files_header_is_read(tmp_path: Path) -> None:
    path = gguf.minimal(tmp_path / "m.gguf")
    header = headers.read(path)
    assert (header.version, header.file_bytes) == (3, path.stat().st_size)
    assert header.tensors == (headers.Tensor("token_embd.weight", "f32", (64, 32), 8192),)
    assert dict(header.entries) == pytest.approx(gguf.KEYS)
    assert header.architecture == "llama"
    assert (header.integer("block_count"), header.get("attention.head_count_kv"), header.get("nothing")) == (2, 2, None)
    assert not header.assumed
    assert not header.has_mtp


def test_version_2_is_read_too() -> None:
    assert headers.read(built(pair("a", 4, struct.pack("<I", 7)), version=2)).entries == {"a": 7}


def test_every_type_of_value_is_read() -> None:
    numbers = {0: ("B", 200), 1: ("b", -5), 2: ("H", 60000), 3: ("h", -6), 4: ("I", 1 << 31), 5: ("i", -7), 6: ("f", 0.5)}
    numbers |= {7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -8), 12: ("d", 0.1)}
    parts = [pair(f"one.{kind}", kind, struct.pack("<" + form, value)) for kind, (form, value) in numbers.items()]
    parts += [array(f"some.{kind}", kind, 2, struct.pack(f"<2{form}", value, value)) for kind, (form, value) in numbers.items()]
    parts += [pair("text", 8, string("é")), pair("bytes", 8, string(b"\xff")), array("none", 4, 0)]
    header = headers.read(built(*parts))
    for kind, (_, value) in numbers.items():
        assert (header.entries[f"one.{kind}"], header.entries[f"some.{kind}"]) == (value, (value, value))
    assert header.entries["one.7"] is True
    assert (header.entries["text"], header.entries["bytes"], header.entries["none"]) == ("é", "\ufffd", ())
    assert header.lengths == {f"some.{kind}": 2 for kind in numbers} | {"none": 0}


def test_of_long_and_of_string_arrays_only_the_length_is_kept() -> None:
    long = array("long", 5, 4097, bytes(4 * 4097))
    header = headers.read(built(array("words", 8, 3, string("a") + string("") + string("ccc")), long, pair("after", 7, b"\1")))
    assert header.lengths == {"words": 3, "long": 4097}
    assert header.entries == {"after": True}


def test_tensors_and_where_their_data_starts() -> None:
    shapes = [tensor("a", (256, 3), 12), tensor("b", (5,), 0, 448), tensor("c", (), 0, 480), tensor("d", (32, 2, 3, 2), 8, 512)]
    header = headers.read(built(*shapes, tensors=4))
    assert [(each.name, each.type, each.shape, each.bytes) for each in header.tensors] == [
        ("a", "q4_K", (256, 3), 3 * 144),
        ("b", "f32", (5,), 20),
        ("c", "f32", (), 4),
        ("d", "q8_0", (32, 2, 3, 2), 12 * 34),
    ]
    assert header.data_offset % 32 == 0
    assert header.tensor_bytes == 3 * 144 + 20 + 4 + 12 * 34


def test_alignment_is_the_files_own() -> None:
    two = tensor("a", (1,)), tensor("b", (1,), 0, 256)
    header = headers.read(built(pair("general.alignment", 4, struct.pack("<I", 256)), *two, tensors=2))
    assert header.data_offset == 256
    assert refused(built(*two, tensors=2)).message.endswith("the data of b begins at 256, 32 was expected")


def test_a_real_models_header(tiny_model: Path) -> None:
    header = headers.read(tiny_model)
    assert (header.architecture, header.integer("block_count"), len(header.tensors)) == ("llama", 30, 272)
    assert header.lengths["tokenizer.ggml.tokens"] == 49152
    ends = [each.bytes + -each.bytes % 32 for each in header.tensors]
    assert header.data_offset + sum(ends) == header.file_bytes == tiny_model.stat().st_size
    assert headers.faults(header) == ()


def test_a_vocabulary_of_a_quarter_of_a_million_is_read_in_few_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    phantom.write(gguf.qwen35(words=248_320), path)
    source = Memory(path.read_bytes())
    tracemalloc.start()
    header = headers.read(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header.lengths["tokenizer.ggml.tokens"] == 248_320
    assert source.read_bytes < header.data_offset + 5 * MIB
    assert peak < 16 * MIB


def test_a_split_file_is_read_through_its_parts(tmp_path: Path) -> None:
    first, *others = gguf.split(tmp_path, 3)
    header = headers.read(first)
    assert [each.name for each in header.tensors] == ["blk.0.w", "blk.1.w", "blk.2.w"]
    assert header.architecture == "llama"
    assert header.file_bytes == sum(path.stat().st_size for path in (first, *others))
    assert refused(others[0]).hint == f"give {first}"
    others[0].write_bytes(others[1].read_bytes())
    assert "m-00002-of-00003.gguf is damaged: it isn't part 2 of 3" in refused(first).message
    others[0].unlink()
    error = refused(first)
    assert error.message.startswith(
        f"part 2 of 3 of {first} is not usable: the model file {others[0]} can't be read: No such file"
    )
    moved = first.rename(tmp_path / "model.gguf")
    assert "isn't named like ...-00001-of-00003.gguf" in refused(moved).message


# What is asked of a header.


def test_what_a_header_lacks_is_said(tmp_path: Path) -> None:
    header = headers.read(gguf.minimal(tmp_path / "m.gguf"))
    with pytest.raises(Error, match=r"the model's header has no llama\.rope\.freq_base"):
        header.integer("rope.freq_base")
    assert header.integer("rope.freq_base", 4) == 4
    with pytest.raises(Error, match=r"llama.attention.layer_norm_rms_epsilon should be a whole number and is 9.99"):
        header.integer("attention.layer_norm_rms_epsilon")
    with pytest.raises(Error, match="should be a whole number and is 2 values"):
        replace(header, entries={"general.architecture": "llama", "llama.block_count": (1, 2)}).integer("block_count")
    with pytest.raises(Error, match=r"has no general\.architecture"):
        _ = replace(header, entries={}).architecture


def test_known_faults_are_named() -> None:
    good = gguf.qwen35()
    assert headers.faults(good) == ()
    old = replace(good, entries=good.entries | {"qwen35.rope.dimension_sections": (11, 11, 10)})
    assert headers.faults(old) == ("qwen35.rope.dimension_sections has 3 entries where llama.cpp wants 4 (an old Ollama file)",)
    headless = replace(good, tensors=tuple(each for each in good.tensors if "nextn" not in each.name))
    assert headers.faults(headless) == ("it says that it has an MTP head, but the head's tensors are missing",)
    assert headers.faults(replace(good, tensors=good.tensors[1:])) == ("it has no token_embd.weight",)
    assert headers.faults(replace(good, tensors=())) == (
        "it holds a vocabulary and no weights",
        "it says that it has an MTP head, but the head's tensors are missing",
    )
    vocabulary = headers.read(built(pair("general.architecture", 8, string("llama"))))
    assert headers.faults(vocabulary) == ("it holds a vocabulary and no weights",)
    for entries, what in (
        ({"general.architecture": "clip"}, "it is the image part of a model, not a language model"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "it is a LoRA adapter, not a language model"),
        ({"general.type": "imatrix"}, "it is an importance matrix, not a language model"),
    ):
        assert headers.faults(replace(good, entries=entries)) == (what,)


# What is refused.


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b"????" + bytes(40), "it begins with b'????'"),
        (b"GGU", "it begins with b'GGU'"),
        (b"GGUF\x03", "cut off after 5 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"<html><body>404", "a web page"),
        (b"PK\x03\x04" + bytes(40), "a zip archive"),
        (b"GGML" + bytes(40), "a GGML file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1), "GGUF version 1; llama.cpp reads little-endian versions 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 4, 1, 1), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
    ],
)
def test_what_it_is_instead_is_said(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    error = refused(path)
    assert error.message.startswith(f"{path} is not a GGUF model: ")
    assert says in error.message


@pytest.mark.parametrize("kind", ["missing", "folder", "dangling", "pipe"])
def test_what_can_not_be_read_is_a_model_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if kind == "folder":
        path.mkdir()
    if kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    if kind == "pipe":
        os.mkfifo(path)
    assert refused(path).message.startswith(f"the model file {path} can't be read: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_model_is_said(tmp_path: Path) -> None:
    path = gguf.minimal(tmp_path / "m.gguf")
    path.chmod(0)
    assert "Permission denied" in refused(path).message


HUGE = (1 << 64) - 1
INT = struct.pack("<I", 1)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (built(pairs=HUGE), f"it says that it has {HUGE} key-value pairs, 65536 are allowed"),
        (built(tensors=HUGE, pairs=0), f"it says that it has {HUGE} tensors, 131072 are allowed"),
        (built(pairs=60_000), "it ends after 4120 bytes, before its header does (60000 key-value pairs at byte 24)"),
        (built(tensors=100_000, pairs=0), "before its header does (100000 tensors at byte 24)"),
        (built(struct.pack("<Q", HUGE), pairs=1), f"key 0 is {HUGE} bytes long, 65535 are allowed"),
        (built(struct.pack("<Q", 60_000), pairs=1), "before its header does (key 0)"),
        (built(pair("", 4, INT)), "key 0 is empty"),
        (built(pair("a", 4, INT), pair("a", 4, INT)), "the key 'a' is there twice"),
        (built(array("a", 8, 0), array("a", 8, 0)), "the key 'a' is there twice"),
        (built(pair("a", 13, INT)), "a has a value of type 13"),
        (built(pair("a", HUGE & 0xFFFFFFFF, INT)), "a has a value of type 4294967295"),
        (built(pair("a", 8, struct.pack("<Q", HUGE))), f"a is {HUGE} bytes long"),
        (built(pair("a", 8, struct.pack("<Q", 1 << 32)), size=1 << 40), "a is 4294967296 bytes long"),
        (built(pair("a", 8, struct.pack("<Q", 9 << 20)), size=1 << 40), "holds more than 8 MiB besides the vocabulary (a)"),
        (built(pair("a", 8, struct.pack("<Q", 5000))), "before its header does (a)"),
        (built(array("a", 9, 1, struct.pack("<IQ", 4, 0))), "a is an array of values of type 9"),
        (built(array("a", 99, 1)), "a is an array of values of type 99"),
        (built(array("a", 8, HUGE)), f"before its header does ({HUGE} strings of a at byte"),
        (built(array("a", 8, 1 << 30), size=1 << 40), "its header goes on after 64 MiB (1073741824 strings of a"),
        (built(array("a", 8, 9, struct.pack("<Q", HUGE))), "before its header does (a)"),
        (built(array("a", 8, 9, struct.pack("<Q", 1 << 63))), "before its header does (a)"),
        (built(array("a", 8, 9, struct.pack("<Q", 1 << 40)), size=1 << 50), "its header goes on after 64 MiB (a)"),
        (built(array("a", 4, HUGE)), "bytes of a at byte"),
        (built(array("a", 12, 1 << 61)), "bytes of a at byte"),
        (built(array("a", 12, 4096), tail=100), "before its header does (a)"),
        (built(pair("general.alignment", 4, bytes(4))), "general.alignment should be a power of 2 and is 0"),
        (built(pair("general.alignment", 4, struct.pack("<I", 48))), "general.alignment should be a power of 2 and is 48"),
        (built(pair("general.alignment", 8, string("a"))), "general.alignment should be a power of 2 and is 'a'"),
        (built(tensor("a" * 64, (1,)), tensors=1), "the name of tensor 0 is 64 bytes long, 63 are allowed"),
        (built(tensor("a", (1, 1, 1, 1, 1)), tensors=1), "the tensor a has 5 dimensions, 4 are allowed"),
        (built(string("a") + struct.pack("<I", 1 << 31), tensors=1, pairs=0), "the tensor a has 2147483648 dimensions"),
        (built(tensor("a", (4, 0)), tensors=1), "the tensor a has the shape [4, 0]"),
        (built(tensor("a", (HUGE,)), tensors=1), "the tensor a has the shape"),
        (built(tensor("a", (1 << 32, 1 << 32)), tensors=1), "the tensor a has the shape"),
        (built(tensor("a", (33, 2), 8), tensors=1), "the rows of a have 33 elements, no multiple of the 32 of a q8_0 block"),
        (built(tensor("a", (32,), 4), tensors=1), "the tensor a is of type 4, which llama.cpp doesn't read"),
        (built(tensor("a", (32,), HUGE & 0xFFFFFFFF), tensors=1), "the tensor a is of type 4294967295"),
        (built(tensor("a", (1,), 0, 64), tensors=1), "the data of a begins at 64, 0 was expected"),
        (built(tensor("a", (1,)), tensor("b", (1,), 0, 0), tensors=2), "the data of b begins at 0, 32 was expected"),
        (built(tensor("a", (1,)), tensor("a", (1,), 0, 32), tensors=2), "the tensor 'a' is there twice"),
        (built(tensor("a", (1025,)), tensors=1), "its tensors end at"),
        (built(tensor("a", (1 << 60,)), tensors=1), "its tensors end at"),
        (built(pair("split.count", 2, struct.pack("<H", 0))), "it says that it has 0 parts"),
        (built(pair("split.count", 2, struct.pack("<H", 65535))), "it says that it has 65535 parts"),
        (built(pair("split.count", 8, string("two"))), "it says that it has two parts"),
    ],
)
def test_a_hostile_file_is_refused_at_once(source: Memory, says: str) -> None:
    source.read_bytes = 0
    tracemalloc.start()
    error = refused(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.message.startswith("the GGUF file m.gguf is damaged: ")
    assert says in error.message
    assert source.read_bytes <= 2 * 64 * 1024
    assert peak < MIB


def test_many_strings_to_keep_are_bounded() -> None:
    long = string(b"a" * 60_000)
    source = built(*(pair(f"k{number}", 8, long) for number in range(200)))
    assert "more than 8 MiB besides the vocabulary" in refused(source).message


def test_the_longest_header_is_bounded() -> None:
    """Strings nearly without end: a file of a terabyte of zeros, each eight of which are an empty string."""
    source = built(array("a", 8, LIMIT_BYTES // 8 - 8), pairs=1, tensors=1, tail=0, size=1 << 40)
    assert "its header goes on after 64 MiB (1 tensors" in refused(source).message
    assert source.read_bytes <= LIMIT_BYTES + 24


@pytest.mark.parametrize("where", range(0, 260, 1))
def test_a_file_cut_off_anywhere_is_refused(where: int) -> None:
    whole = built(
        pair("general.name", 8, string("x")),
        array("words", 8, 2, string("a") + string("bb")),
        array("n", 5, 3, bytes(12)),
        tensor("a", (4, 2)),
        tensors=1,
        tail=64,
    ).content
    if where < len(whole) - 40:
        assert refused(Memory(whole[:where])).message


def _seeds(folder: Path) -> list[bytes]:
    path = folder / "seed.gguf"
    phantom.write(gguf.qwen35(1, words=300), path)
    small = gguf.minimal(folder / "minimal.gguf").read_bytes()
    return [path.read_bytes(), small, gguf.split(folder, 2)[0].read_bytes()]


def _mutated(dice: random.Random, seed: bytes, header_bytes: int) -> bytes:
    """Some changes to the header: flipped bits, spliced numbers, pieces left out or doubled, an early end."""
    data = bytearray(seed)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(min(header_bytes, len(data)) or 1) if data else 0
        match dice.randrange(6):
            case 0 if data:
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                number = dice.choice([0, 1, 9, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, HUGE])
                data[at : at + 8] = struct.pack("<Q", number)
            case 2:
                data[at : at + 4] = struct.pack("<I", dice.choice([0, 8, 9, 12, 13, 1 << 31, 0xFFFFFFFF]))
            case 3:
                del data[at : at + dice.randint(1, 40)]
            case 4:
                data[at:at] = data[at : at + dice.randint(1, 40)]
            case 5 if not dice.randrange(4):
                del data[at:]
    return bytes(data)


def test_fuzz(tmp_path: Path) -> None:
    """Whatever a file says, it gives a header that holds together or an Error, and is read at most once."""
    dice = random.Random(20_261_130)
    seeds = [(seed, headers.read(Memory(seed)).data_offset if b"split" not in seed else 300) for seed in _seeds(tmp_path)]
    outcomes = {"header": 0, "error": 0}
    highest = 0
    for number in range(4000):
        seed, header_bytes = dice.choice(seeds)
        data = _mutated(dice, seed, header_bytes)
        source = Memory(data) if dice.randrange(4) else Memory(data, size=len(data) + (1 << 40))
        if number % 4 == 0:  # it makes reading four times as slow
            tracemalloc.start()
        try:
            header = headers.read(source)
        except Error as error:
            outcomes["error"] += error.exit is Exit.MODEL
        else:
            outcomes["header"] += 1
            assert header.data_offset + header.tensor_bytes <= source.size
            assert all(each.bytes > 0 and math.prod(each.shape) > 0 for each in header.tensors)
            assert set(headers.expand(headers.condense(header)).tensors) == set(header.tensors)
        finally:
            highest = max(highest, tracemalloc.get_traced_memory()[1])  # 0 where it isn't traced
            tracemalloc.stop()
        assert source.read_bytes <= LIMIT_BYTES + 24
        assert source.size != len(data) or source.read_bytes <= len(data) + 24
    assert sum(outcomes.values()) == 4000
    assert min(outcomes.values()) > 200, outcomes
    assert highest < 32 * MIB  # a string of 8 MiB, its window and its text


# Condensed.


def test_a_condensed_header_is_the_header_without_the_vocabulary(tiny_model: Path) -> None:
    header = headers.read(tiny_model)
    text = headers.dump(headers.condense(header, file=tiny_model.name, sha256="0" * 64))
    back = headers.expand(json.loads(text))
    assert sorted(back.tensors, key=lambda each: each.name) == sorted(header.tensors, key=lambda each: each.name)
    assert back.lengths == header.lengths
    assert back.entries == {
        key: value
        for key, value in header.entries.items()
        if not key.startswith("tokenizer.") or key.endswith((".model", ".pre"))
    }
    assert (back.file_bytes, back.data_offset, back.assumed, back.version) == (header.file_bytes, 0, False, 3)
    assert len(text) < 6000
    assert headers.expand(json.loads(json.dumps(headers.condense(back)))) == back


def test_assumed_stays_assumed() -> None:
    header = gguf.qwen35()
    assert headers.expand(headers.condense(header)) == replace(headers.expand(headers.condense(header)), assumed=True)
    assert headers.condense(replace(header, assumed=False), assumed="by hand")["assumed"] == "by hand"
    assert headers.expand(headers.condense(replace(header, assumed=False), assumed="by hand")).assumed


def test_oddly_named_tensors_survive() -> None:
    odd: list[tuple[str, str, tuple[int, ...]]] = [
        ("blk.007.w", "f32", (2,)),
        ("blk.1.w", "f32", (2,)),
        ("blk.3.w", "q8_0", (32, 2)),
        ("blk.2.w", "q8_0", (32, 2)),
        ("s", "f32", ()),
    ]
    tensors = tuple(
        headers.Tensor(name, type_, shape, ggml.BY_NAME[type_].row_bytes(math.prod(shape))) for name, type_, shape in odd
    )
    header = replace(gguf.qwen35(), tensors=tensors)
    data = headers.condense(header)
    assert data["tensors"] == [
        ["blk.007.w", [2], "f32"],
        ["s", [], "f32"],
        ["blk.*.w", [2], {"f32": "1"}],
        ["blk.*.w", [32, 2], {"q8_0": "2-3"}],
    ]
    assert set(headers.expand(data).tensors) == set(tensors)


@pytest.mark.parametrize("data", [{}, {"tensors": 3}, {"tensors": [["a", [1], "q9_9"]]}, {"tensors": [["a", [1], {"f32": "x"}]]}])
def test_what_is_no_condensed_header_is_said(data: dict[str, object]) -> None:
    with pytest.raises(Error, match="a condensed header can't be read"):
        headers.expand(data)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_headers_are_whole(path: Path) -> None:
    text = path.read_text()
    data = json.loads(text)
    header = headers.expand(data)
    assert len(text) < 6000
    assert text == headers.dump(data)
    assert path.stem.startswith(data["file"].removesuffix(".gguf").lower())
    assert path.stem.endswith(".mtp") == header.has_mtp
    assert len(data["sha256"]) == 64
    assert isinstance(data.get("assumed", ""), str)
    assert headers.faults(header) == ()


@pytest.mark.parametrize(
    ("stem", "tensors", "parameters", "mib"),
    [  # facts on Qwen3.5: parameters as llama.cpp prints them, MiB by llama-quantize --dry-run
        ("qwen3.5-2b-q4_k_m", 320, 1_881_825_088, 1204.9),
        ("qwen3.5-4b-q4_k_m", 426, 4_205_751_296, 2572.9),
        ("qwen3.5-4b-q4_k_m.mtp", 441, 4_326_350_848, 2644.0),
        ("qwen3.5-9b-q4_k_m", 427, 8_953_803_264, 5357.9),
        ("qwen3.5-9b-q4_k_m.mtp", 442, 9_197_093_888, 5501.9),
        ("qwen3.5-9b-iq4_xs", 427, 8_953_803_264, 4975.3),
    ],
)
def test_shipped_headers_have_the_models_size(stem: str, tensors: int, parameters: int, mib: float) -> None:
    header = headers.expand(json.loads((paths.data_folder("presets") / "headers" / f"{stem}.json").read_text()))
    assert header.assumed
    assert len(header.tensors) == tensors
    assert sum(math.prod(each.shape) for each in header.tensors) == parameters
    assert header.tensor_bytes / MIB == pytest.approx(mib, abs=0.06)


def test_the_shipped_header_of_tiny_is_the_files(tiny_model: Path) -> None:
    data = json.loads((paths.data_folder("presets") / "headers" / "smollm2-135m-instruct.q4_1.json").read_text())
    assert data["tensors"] == headers.condense(headers.read(tiny_model))["tensors"]
    assert not headers.expand(data).assumed


def test_types_are_told_apart() -> None:
    assert len(ggml.BY_NAME) == len(ggml.BY_NUMBER) == len(ggml.TYPES)
    assert [ggml.BY_NAME[name].row_bytes(256) for name in ("f16", "q8_0", "q4_0", "q4_K", "q6_K", "iq4_xs")] == [
        512,
        272,
        144,
        144,
        210,
        136,
    ]
