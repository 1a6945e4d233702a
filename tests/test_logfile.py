"""A log stays bounded, in place, and its end is told whatever became of the file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import logfile
from supervisor.units import KIB, MIB

LIMIT = 32 * KIB


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "LOG_LIMIT", LIMIT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "tiny.log"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root mounts")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * KIB):
                pass
        except OSError:
            return


def test_the_tail_is_the_end_of_the_file_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert logfile.tail(path) == ""
    path.write_bytes(b"")
    assert logfile.tail(path) == ""
    path.write_bytes(b"x" * 100_000 + b"\xff\xe2\x82\xac end\n")
    assert logfile.tail(path).endswith("\ufffd\u20ac end\n")
    assert len(logfile.tail(path)) <= logfile.TAIL_BYTES
    assert logfile.tail(path, 5) == " end\n"


def test_a_log_within_the_limit_is_left_alone(path: Path) -> None:
    log = logfile.start("tiny", path)
    assert (log.written_bytes, log.tail(), log.head()) == (0, "", "")
    os.write(log.descriptor, b"x" * LIMIT)
    assert log.trim() == logfile.trim(path) == 0
    assert log.written_bytes == LIMIT
    log.close()
    log.close()
    assert log.written_bytes == LIMIT
    assert log.head() == "x" * LIMIT
    assert [each.name for each in path.parent.iterdir()] == ["tiny.log"]


def test_a_longer_one_moves_on_and_its_writer_goes_on(path: Path) -> None:
    log = logfile.start("tiny", path)
    os.write(log.descriptor, b"first\n" + b"x" * LIMIT + b"\nlast\n")
    whole = path.read_bytes()
    assert log.trim() == len(whole)
    assert path.read_bytes() == b""
    assert path.with_name("tiny.log.1").read_bytes() == whole[-LIMIT:]
    assert log.tail().endswith("x\nlast\n")
    os.write(log.descriptor, b"more\n")
    assert path.read_bytes() == b"more\n"
    assert log.tail().endswith("x\nlast\nmore\n")
    assert len(log.tail()) == logfile.TAIL_BYTES
    assert log.tail(6) == "\nmore\n"
    assert log.written_bytes == len(whole) + 5
    log.close()
    path.unlink()
    assert log.tail().endswith("x\nlast\nmore\n")
    assert log.head() == ""


def test_what_fills_up_again_and_again_stays_within_the_limit(path: Path) -> None:
    log = logfile.start("tiny", path)
    for number in range(9):
        os.write(log.descriptor, str(number).encode() * (LIMIT + 1))
        assert log.trim() == LIMIT + 1
        kept = [each.read_bytes() for each in sorted(path.parent.iterdir())]
        assert sum(map(len, kept)) <= LIMIT * logfile.KEEP_LOGS
        assert [each[:1] for each in kept] == [b"", *(str(older).encode() for older in range(number, max(-1, number - 4), -1))]
    assert log.written_bytes == 9 * (LIMIT + 1)
    log.close()


def test_a_log_that_its_last_start_left_too_long_is_cut_by_the_next(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"x" * 3 * LIMIT)
    logfile.start("tiny", path).close()
    assert [each.stat().st_size for each in sorted(path.parent.iterdir())] == [0, LIMIT]


def test_any_file_that_is_appended_to_can_be_trimmed(tmp_path: Path) -> None:
    """As llmctl's own, which is its stderr when it is detached."""
    path = tmp_path / "llmctl.log"
    assert logfile.trim(path) == 0
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * (LIMIT + 1))
        assert logfile.trim(path) == LIMIT + 1
        writer.write(b"y")
        assert path.read_bytes() == b"y"
        writer.write(b"x" * (LIMIT + 1))
        assert logfile.trim(path, writer.fileno()) == LIMIT + 2  # it can't be read through: it is emptied all the same
        assert path.read_bytes() == b""


@pytest.mark.parametrize("gone", ["folder", "file"])
def test_a_log_that_was_deleted_is_emptied_and_told_all_the_same(path: Path, gone: str) -> None:
    log = logfile.start("tiny", path)
    os.write(log.descriptor, b"x" * LIMIT + b"\nlast\n")
    path.unlink()
    if gone == "folder":
        path.parent.rmdir()
    assert log.trim() == LIMIT + 6
    assert os.fstat(log.descriptor).st_size == 0
    assert log.tail().endswith("last\n")
    log.close()


def test_on_a_full_disk_a_log_is_emptied_without_a_copy(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = small_disk / "tiny.log"
    log = logfile.start("tiny", path)
    os.write(log.descriptor, b"x" * LIMIT + b"\nlast\n")
    fill(small_disk)
    assert log.trim() == LIMIT + 6
    assert "emptied without a copy: No space left" in caplog.text
    assert [each.name for each in small_disk.iterdir() if each.name != "ballast"] == ["tiny.log"]
    assert log.tail().endswith("last\n")
    assert os.write(log.descriptor, b"more\n") == 5  # there is room again
    log.close()


@pytest.mark.parametrize("free_bytes", [0, 100 * KIB])
def test_a_start_on_a_full_disk_has_its_log_in_memory(
    small_disk: Path, free_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    fill(small_disk)
    os.truncate(small_disk / "ballast", (small_disk / "ballast").stat().st_size - free_bytes)
    log = logfile.start("tiny", small_disk / "tiny.log")
    assert log.path is None
    assert "kept in memory" in caplog.text
    os.write(log.descriptor, b"x" * LIMIT + b"\nlast\n")
    assert log.trim() == LIMIT + 6
    os.write(log.descriptor, b"more\n")
    assert log.head() == "more\n"
    log.close()
    assert log.tail().endswith("x\nlast\nmore\n")
    assert log.head() == ""


def test_a_log_that_is_no_file_is_kept_in_memory(path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to("/dev/null")
    log = logfile.start("tiny", path)
    os.write(log.descriptor, b"why\n")
    log.close()
    assert log.tail() == "why\n"


def test_the_head_is_the_first_of_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "LOG_LIMIT", 4 * MIB)
    log = logfile.start("tiny", path)
    os.write(log.descriptor, b"first" + b"x" * 2 * MIB)
    before = log.head()
    log.close()
    assert before == log.head() == "first" + "x" * (MIB - 5)
