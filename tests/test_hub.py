"""The hub's client against a real HTTP server that behaves, and against ones that don't."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import gguf, hub, phantom
from supervisor.errors import Error, Exit
from supervisor.units import KIB, MIB
from tests.fakes import gguf as fake
from tests.fakes.hub import Site, serve

CONTENT = random.Random(7).randbytes(3 * MIB + 17)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site()
    made.files["/some/repo/resolve/r1/m.gguf"] = CONTENT
    server = serve(made)
    monkeypatch.setenv("HF_ENDPOINT", made.address)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(hub, "_WAIT_S", 0.01)
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def remote() -> Iterator[hub.Remote]:
    with hub.Remote("some/repo", "r1", "m.gguf") as made:
        yield made


def fetch(remote: hub.Remote, part: Path, *, size: int | None = len(CONTENT), sha256: str = SHA256) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    hub.download(remote, part, lambda *each: told.append(each), bytes_expected=size, sha256=sha256)
    return told


# Reading parts.


def test_a_header_is_read_by_ranges_and_little_more(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    phantom.write(fake.qwen35(words=60_000), path)
    site.files["/some/repo/resolve/r1/m.gguf"] = path.read_bytes()
    with hub.Remote("some/repo", "r1", "m.gguf") as remote:
        header = gguf.read(remote)
    assert header == gguf.read(path)
    assert header.data_offset > MIB
    assert site.sent_bytes < header.data_offset + 2 * MIB
    assert len(site.asked) < 6
    assert {ask["path"] for ask in site.asked} == {"/some/repo/resolve/r1/m.gguf"}


def test_any_place_can_be_read(site: Site, remote: hub.Remote) -> None:
    assert remote.size == len(CONTENT)
    places = [0, 1, 300 * KIB, 5, 2 * MIB, len(CONTENT) - 3, len(CONTENT), len(CONTENT) + 9]
    assert [remote.read_at(at, 8) for at in places] == [CONTENT[at : at + 8] for at in places]
    assert remote.read_at(100, 3 * MIB) == CONTENT[100 : 100 + 3 * MIB]


def test_a_split_file_is_read_through_its_siblings(site: Site, tmp_path: Path) -> None:
    for part in fake.split(tmp_path, 2):
        site.files[f"/some/repo/resolve/r1/sub/{part.name}"] = part.read_bytes()
    header = gguf.read(hub.Remote("some/repo", "r1", "sub/m-00001-of-00002.gguf"))
    assert header == gguf.read(tmp_path / "m-00001-of-00002.gguf")
    del site.files["/some/repo/resolve/r1/sub/m-00002-of-00002.gguf"]
    with pytest.raises(
        Error, match=r"part 2 of 2 of some/repo/sub/m-00001-of-00002.gguf is not usable: sub/m-00002.* isn't there"
    ):
        gguf.read(hub.Remote("some/repo", "r1", "sub/m-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ({"ranges": False}, "m.gguf of some/repo can't be read in parts: its server ignores ranges"),
        ({"status": 401}, "m.gguf of some/repo is not open to everybody (HTTP 401)"),
        ({"status": 403}, "m.gguf of some/repo is not open to everybody (HTTP 403)"),
        ({"files": {}}, "m.gguf of some/repo isn't there at revision r1 (HTTP 404)"),
        ({"status": 503}, "m.gguf of some/repo can't be read: 127.0.0.1 answers HTTP 503"),
        ({"status": 418}, "m.gguf of some/repo can't be fetched: 127.0.0.1 answers HTTP 418"),
        ({"page": True}, "m.gguf of some/repo can't be fetched: 127.0.0.1 sends a web page"),
        ({"cut_bytes": 1000}, "m.gguf of some/repo can't be read: the connection to 127.0.0.1:"),
        ({"cut_bytes": 1000, "length": False}, "m.gguf of some/repo can't be read: the answer ended after 1000 of 262144 bytes"),
        ({"files": {"/some/repo/resolve/r1/m.gguf": b""}}, "m.gguf of some/repo ends before byte 0"),
    ],
)
def test_what_a_server_does_instead_is_said(behaviour: dict[str, object], says: str, site: Site, remote: hub.Remote) -> None:
    for name, value in behaviour.items():
        setattr(site, name, value)
    with pytest.raises(Error) as raised:
        gguf.read(remote)
    assert raised.value.exit is Exit.MODEL
    assert raised.value.message.startswith(says)
    assert raised.value.hint
    assert site.sent_bytes < 5 * MIB


def test_a_hub_that_isnt_there_is_said(site: Site, remote: hub.Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = serve(Site())
    closed.shutdown()
    closed.server_close()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.server_port}")
    with pytest.raises(Error, match=rf"can't be read: the connection to 127.0.0.1:{closed.server_port} failed \(.*refused"):
        gguf.read(remote)


def test_a_server_that_is_silent_is_given_up(remote: hub.Remote, monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "_TIMEOUT_S", 0.05)
        with pytest.raises(Error, match="gave no answer within 0 s"):
            gguf.read(remote)


def test_off_line_nothing_is_asked(site: Site, remote: hub.Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Error, match="HF_HUB_OFFLINE is set"):
        gguf.read(remote)
    assert site.asked == []


# The token.


def test_the_token_goes_to_the_hub_alone(site: Site, remote: hub.Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    store = Site(files=site.files)
    server = serve(store)
    site.redirect = store.address
    assert remote.read_at(0, 4) == CONTENT[:4]
    server.shutdown()
    server.server_close()
    assert [ask.get("authorization") for ask in site.asked] == ["Bearer hf_secret"]
    assert [ask.get("authorization") for ask in store.asked] == [None]


@pytest.mark.parametrize("token", ["hf_secret", "hf_secret\x01", "hf_secrét", "hf_secret\u2028"])
@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_the_token_is_in_no_message(
    token: str, status: int, site: Site, remote: hub.Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    site.status = status
    with pytest.raises(Error) as raised:
        gguf.read(remote)
    assert "hf_sec" not in raised.value.message + raised.value.hint
    assert "some/repo" in raised.value.message


# Fetching the whole.


def test_a_file_is_fetched(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    told = fetch(remote, part)
    assert part.read_bytes() == CONTENT
    assert told[-1] == ("fetching m.gguf, MiB", 3, 3)
    assert list(tmp_path.iterdir()) == [part]


def test_a_cut_connection_is_taken_up_again(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    site.cut_bytes = MIB
    fetch(remote, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert [ask.get("range") for ask in site.asked] == [None, *(f"bytes={count * MIB}-" for count in (1, 2, 3))]
    assert {ask.get("if-range") for ask in site.asked[1:]} == {'"one"'}
    assert site.sent_bytes == len(CONTENT)


def test_what_was_cut_off_goes_on_where_it_was(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(CONTENT[:MIB])
    site.cut_bytes = 0
    with pytest.raises(Error, match=r"can't be fetched: .*, with 1.0 MiB here") as raised:
        fetch(remote, part)
    assert raised.value.hint == "the same again; it goes on where it was"
    assert part.read_bytes() == CONTENT[:MIB]
    assert len(site.asked) == 3
    site.cut_bytes = None
    fetch(remote, part)
    assert part.read_bytes() == CONTENT
    assert site.sent_bytes == len(CONTENT) - MIB


def test_a_server_without_ranges_sends_it_all_again(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(CONTENT[:MIB])
    site.ranges = False
    fetch(remote, part)
    assert part.read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_is_sent_whole(
    site: Site, remote: hub.Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    other = bytes(len(CONTENT))
    site.files["/some/repo/resolve/r1/m.gguf"], site.etag, site.cut_bytes = other, '"other"', MIB
    with monkeypatch.context() as once:
        once.setattr(hub, "_TRIES", 1)
        with pytest.raises(Error, match=r"1\.0 MiB here"):
            fetch(remote, part)
    assert part.read_bytes() == other[:MIB]
    site.files["/some/repo/resolve/r1/m.gguf"], site.etag, site.cut_bytes = CONTENT, '"one"', None
    fetch(remote, part)
    assert part.read_bytes() == CONTENT
    assert [ask.get("if-range") for ask in site.asked] == [None, '"other"']


@pytest.mark.parametrize("here", [CONTENT + b"more", bytes(len(CONTENT) + 5)])
def test_a_part_that_is_too_long_is_begun_anew(here: bytes, site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(here)
    fetch(remote, part)
    assert part.read_bytes() == CONTENT
    part.write_bytes(here)
    fetch(remote, part, size=None)
    assert part.read_bytes() == CONTENT


def test_a_whole_part_costs_no_request(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(CONTENT)
    fetch(remote, part)
    assert site.asked == []
    fetch(remote, part, size=None)  # the size isn't known, so the server has to say that nothing follows
    assert part.read_bytes() == CONTENT
    assert site.sent_bytes == 0


@pytest.mark.parametrize("length", [True, False])
def test_size_and_sum_need_not_be_known(length: bool, site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    site.length = length
    fetch(remote, tmp_path / "part", size=None, sha256="")
    assert (tmp_path / "part").read_bytes() == CONTENT


def test_another_size_is_refused_before_it_is_fetched(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    with pytest.raises(Error, match=rf"m.gguf of some/repo has {len(CONTENT)} bytes, 5000000 were expected"):
        fetch(remote, tmp_path / "part", size=5_000_000)
    assert (tmp_path / "part").stat().st_size == 0


def test_a_wrong_sum_is_said_and_not_kept(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    with pytest.raises(Error, match=f"has sha256 {SHA256}, {'0' * 64} was expected") as raised:
        fetch(remote, part, sha256="0" * 64)
    assert raised.value.exit is Exit.MODEL
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_part_is_found_by_its_sum(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(bytes(MIB))
    with pytest.raises(Error, match="has sha256"):
        fetch(remote, part)
    fetch(remote, part)
    assert part.read_bytes() == CONTENT


@pytest.mark.parametrize("behaviour", ["page", "gone"])
def test_what_is_no_file_is_not_stored(behaviour: str, site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    site.page, site.files = behaviour == "page", {}
    with pytest.raises(Error, match="sends a web page" if behaviour == "page" else "isn't there"):
        fetch(remote, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == b""


def test_a_full_disk_is_said(site: Site, remote: hub.Remote, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.symlink_to("/dev/full")
    with pytest.raises(Error, match=rf"m.gguf can't be stored in {tmp_path}: the disk is full, it needs 3.0 MiB"):
        fetch(remote, part)
