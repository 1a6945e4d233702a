"""A model file is told from everything that is none, before a process is started on it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from supervisor import gguf as headers
from supervisor.errors import Error, Exit
from tests.fakes import gguf


def test_a_gguf_files_header_is_read(tmp_path: Path) -> None:
    assert headers.read(gguf.minimal(tmp_path / "m.gguf")) == headers.Header(version=3, tensors=0, entries=len(gguf.KEYS))


def test_version_2_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 2, 291, 24) + b"rest")
    assert headers.read(path) == headers.Header(2, 291, 24)


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
    with pytest.raises(Error) as raised:
        headers.read(path)
    assert raised.value.exit is Exit.MODEL
    assert raised.value.message.startswith(f"{path} is not a GGUF model: ")
    assert says in raised.value.message


@pytest.mark.parametrize("kind", ["missing", "folder", "dangling"])
def test_what_can_not_be_read_is_a_model_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if kind == "folder":
        path.mkdir()
    if kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(Error) as raised:
        headers.read(path)
    assert raised.value.exit is Exit.MODEL
    assert raised.value.message.startswith(f"the model file {path} can't be read: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_model_is_said(tmp_path: Path) -> None:
    path = gguf.minimal(tmp_path / "m.gguf")
    path.chmod(0)
    with pytest.raises(Error, match="Permission denied"):
        headers.read(path)
