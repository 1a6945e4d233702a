"""One llmctl a home; what a killed one left is found and removed, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from supervisor import argv, rundir
from supervisor.errors import Error, Exit
from supervisor.rundir import Instance, Process
from tests import fakes
from tests.conftest import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "run"


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that isn't a child of llmctl's."""
    with subprocess.Popen([shutil.which("sleep") or "sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def gone_process() -> Process:
    """One that has ended and been reaped."""
    with sleeper() as process:
        return Process.of(process.pid)


def leave(folder: Path, *children: Process, owner: Process | None = None) -> None:
    """The folder as a killed llmctl leaves it: its description and a child's folder with a socket."""
    (folder / "tiny").mkdir(parents=True)
    handle = os.open(folder / "tiny", os.O_PATH)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"/proc/self/fd/{handle}/child.sock")
    os.close(handle)
    instance = Instance(owner or gone_process(), "http://127.0.0.1:1", ("tiny",), "token", children)
    (folder / rundir.INSTANCE).write_text(json.dumps(asdict(instance)))


HOLDER = """
import sys
from pathlib import Path
from supervisor import rundir
with rundir.claim(Path(sys.argv[1]), ("tiny", "other"), "secret"):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


# Claiming.


def test_the_owner_is_described_and_afterwards_nothing_is_left(folder: Path) -> None:
    with rundir.claim(folder, ("tiny",), "secret") as owned:
        found = rundir.read(folder)
        assert found == owned.instance
        assert found.process == Process.of(os.getpid())
        assert (found.presets, found.token, found.address, found.children) == (("tiny",), "secret", "", ())
        owned.describe(address="http://127.0.0.1:8080")
        assert rundir.read(folder) == replace(found, address="http://127.0.0.1:8080")
        child = owned.child_folder("tiny")
        child.mkdir()
        (child / "x").write_text("x")
        assert child.parent == folder
    assert list(folder.iterdir()) == []
    assert rundir.read(folder) is None


ELSEWHERE = ["..", ".", "", "../x", "/etc", "a/b", "instance.json", "instance.json.part"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_child_runs_outside_a_folder_of_its_own(folder: Path, name: str) -> None:
    with rundir.claim(folder, ("tiny",), "secret") as owned, pytest.raises(Error) as caught:
        owned.child_folder(name)
    assert caught.value.message == f"{name!r} can't be the name of what runs"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_description_removes_nothing_that_is_not_below_it(tmp_path: Path, name: str) -> None:
    """A preset called ``..`` once made ``down`` remove all of LLMCTL_HOME."""
    folder, precious = tmp_path / "home" / "run", tmp_path / "home" / "x" / "precious"
    with rundir.claim(folder, (name,), "secret"):
        precious.parent.mkdir(exist_ok=True)
        precious.write_text("models")
    assert precious.read_text() == "models"
    assert folder.is_dir()


def test_nothing_is_left_after_a_failure_either(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), rundir.claim(folder, ("tiny",), "secret"):
        raise KeyboardInterrupt
    assert list(folder.iterdir()) == []
    with rundir.claim(folder, ("tiny",), "secret"):
        pass


@pytest.mark.parametrize("before", [None, 0o755, 0o777])
def test_the_folder_is_for_its_owner_alone(before: int | None, folder: Path) -> None:
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    with rundir.claim(folder, ("tiny",), "secret"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_second_claim_says_who_has_it_and_harms_nothing(folder: Path, holder: subprocess.Popen[str]) -> None:
    before = (folder / rundir.INSTANCE).read_text()
    with pytest.raises(Error) as raised, rundir.claim(folder, ("mine",), "x"):
        pass
    error = raised.value
    assert (error.exit, error.hint) == (Exit.BUSY, "llmctl down")
    assert error.message == f"llmctl (pid {holder.pid}) already serves tiny, other"
    assert (folder / rundir.INSTANCE).read_text() == before
    assert rundir.clear(folder) is False
    assert (folder / rundir.INSTANCE).read_text() == before


def test_a_second_claim_of_the_same_process_is_refused_too(folder: Path) -> None:
    with (
        rundir.claim(folder, ("tiny",), "x"),
        pytest.raises(Error, match=f"pid {os.getpid()}"),
        rundir.claim(folder, ("tiny",), "y"),
    ):
        pass


def test_of_many_that_claim_at_once_one_gets_it(folder: Path) -> None:
    got: list[bool] = []
    start, end = threading.Barrier(8), threading.Barrier(8)

    def claim() -> None:
        start.wait()
        try:
            with rundir.claim(folder, ("tiny",), "x"):
                got.append(True)
                end.wait()
        except Error:
            got.append(False)
            end.wait()

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def test_a_killed_owner_blocks_nobody(folder: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert rundir.read(folder) is None
    with rundir.claim(folder, ("tiny",), "x") as owned:
        assert owned.instance.process.pid == os.getpid()


def test_a_spawned_child_does_not_hold_the_lock(folder: Path) -> None:
    """Not even one that is given every descriptor it can be: the folder's is closed by exec, a moment after Popen returns."""
    with rundir.claim(folder, ("tiny",), "x"):
        process = subprocess.Popen([shutil.which("sleep") or "sleep", "600"], close_fds=False)
    with process:
        try:
            until(lambda: claimable(folder))
        finally:
            process.kill()


def claimable(folder: Path) -> bool:
    try:
        with rundir.claim(folder, ("tiny",), "y"):
            return True
    except Error:
        return False


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_folder_that_can_not_be_made_is_one_error(kind: str, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("")
    target = folder if kind == "file" else folder / "run"
    with pytest.raises(Error) as raised, rundir.claim(target, ("tiny",), "x"):
        pass
    assert (raised.value.exit, raised.value.hint) == (Exit.BUSY, "set LLMCTL_HOME")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)
    with pytest.raises(Error, match="belongs to uid 12345"), rundir.claim(folder, ("tiny",), "x"):
        pass


# What a killed one left.


def test_what_a_killed_one_left_is_swept_at_the_next_claim(folder: Path) -> None:
    leave(folder)
    assert rundir.read(folder) is None
    with rundir.claim(folder, ("tiny",), "x"):
        assert [path.name for path in folder.iterdir()] == [rundir.INSTANCE]


def test_clear_sweeps_and_says_whether_there_was_anything(folder: Path) -> None:
    assert rundir.clear(folder) is False
    leave(folder)
    assert rundir.clear(folder) is True
    assert list(folder.iterdir()) == []
    assert rundir.clear(folder) is False


@pytest.mark.parametrize("by", ["claim", "clear"])
def test_a_recorded_orphan_is_ended(by: str, folder: Path) -> None:
    with sleeper() as orphan:
        leave(folder, gone_process(), Process.of(orphan.pid))
        if by == "clear":
            rundir.clear(folder)
        else:
            with rundir.claim(folder, ("tiny",), "x"):
                pass
        assert orphan.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("seconds", [-3600.0, -1.0, 1.0])
def test_a_process_that_only_has_an_orphans_pid_is_not_touched(seconds: float, folder: Path) -> None:
    """The pid was reused: its start time tells."""
    with sleeper() as stranger:
        it = Process.of(stranger.pid)
        leave(folder, replace(it, started=f"{it.started}{seconds}"))
        rundir.clear(folder)
        assert it.alive()
        assert stranger.poll() is None


def test_an_owner_whose_pid_somebody_else_has_counts_as_gone(folder: Path) -> None:
    me = Process.of(os.getpid())
    leave(folder, owner=replace(me, started=f"{me.started}0"))
    assert rundir.read(folder) is None


def test_what_is_not_ours_stays(folder: Path, tmp_path: Path) -> None:
    """A home may be a folder in which somebody has a ``run`` already; and a link in the place of a child's folder is not followed."""
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "file").write_text("x")
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("x")
    (folder / "tiny").symlink_to(keep)
    assert rundir.clear(folder) is False
    with rundir.claim(folder, ("tiny", "other"), "t"):
        (folder / "other").mkdir()
        (folder / "other" / "child.sock").write_text("")
    assert sorted(path.name for path in folder.iterdir()) == ["thesis.txt", "tiny"]
    assert (keep / "file").exists()


def test_a_link_in_the_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(tmp_path)
    with pytest.raises(Error, match="is a link"), rundir.claim(folder, (), "t"):
        pass


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '"x"',
        "{}",
        "\x00",
        '{"process": 1}',
        '{"process": {"pid": 1}}',
        '{"process": {"pid": 1, "started": 0}, "address": "", "presets": 1, "token": "", "children": []}',
        '{"process": {"pid": "x", "started": 0}, "address": "", "presets": [], "token": "", "children": []}',
        '{"process": {"pid": -1, "started": 0}, "address": "", "presets": [], "token": "", "children": []}',
        '{"process": {"pid": 1, "started": 0}, "address": "", "presets": [], "token": "", "children": [{"pid": "x", "started": 1}]}',
    ],
)
def test_a_description_that_says_nothing_is_none(text: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / rundir.INSTANCE).write_text(text)
    assert rundir.read(folder) is None
    with rundir.claim(folder, ("tiny",), "x"):
        pass


def test_a_description_that_was_cut_off_hides_no_orphan(folder: Path) -> None:
    """A disk that ran full left half a file, and only the orphan itself says whose it is."""
    child_folder = folder / "tiny"
    with living_in(child_folder) as orphan:
        leave(folder)
        whole = (folder / rundir.INSTANCE).read_text()
        (folder / rundir.INSTANCE).write_text(whole[: len(whole) // 2])
        (folder / f"{rundir.INSTANCE}.part").write_text("{")
        with rundir.claim(folder, ("tiny",), "x"):
            assert orphan.wait(10) == -signal.SIGKILL
    assert list(folder.iterdir()) == []


@contextmanager
def living_in(home: Path, config: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose environment says so."""
    environment = argv.environment(os.environ, home) | ({"XDG_CONFIG_HOME": str(config)} if config else {})
    with subprocess.Popen([shutil.which("sleep") or "sleep", "600"], env=environment) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/environ").read_bytes().find(b"HOME=") >= 0)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("home", "config"),
    [("run", None), ("run/tiny/deeper", None), ("run2/tiny", None), ("run/tiny", "elsewhere"), ("elsewhere", "run/tiny")],
)
def test_who_only_lives_near_is_not_touched(folder: Path, home: str, config: str | None) -> None:
    root = folder.parent
    with living_in(root / home, root / config if config else None) as stranger:
        leave(folder)
        assert rundir.clear(folder) is True
        assert stranger.poll() is None


OWNER = """
import asyncio, os, sys
from pathlib import Path
from supervisor import argv, child, rundir
folder, engine, log = map(Path, sys.argv[1:])
async def main(owned):
    home = owned.child_folder("tiny")
    process = child.spawn("tiny", [str(engine), "--host", argv.SOCKET], argv.environment(os.environ, home), home, log)
    owned.note_children({"tiny": process.pid})
    print("noted", flush=True)
    await asyncio.sleep(600)
with rundir.claim(folder, ("tiny",), "secret") as owned:
    asyncio.run(main(owned))
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_after_a_kill_of_the_owner_a_child_out_of_the_death_signals_reach_is_ended(
    folder: Path, tmp_path: Path, stopped: bool
) -> None:
    """It serves from a process of its own, in a session of its own: nobody noted its pid."""
    server = fakes.install(tmp_path / "engine", outlive_parent=True, ignore_sigterm=True)
    command = [sys.executable, "-c", OWNER, str(folder), str(server), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "noted\n"
        orphan = Process.of(fakes.wait_event(tmp_path / "engine", "loaded")["pid"])
        if stopped:
            orphan.signal(signal.SIGSTOP)
        owner.kill()
    assert orphan.alive()
    assert rundir.read(folder) is None
    with rundir.claim(folder, ("tiny",), "x"):
        until(lambda: not orphan.alive())
        assert [path.name for path in folder.iterdir()] == [rundir.INSTANCE]


def test_an_owner_that_is_a_zombie_holds_nothing(folder: Path, holder: subprocess.Popen[str]) -> None:
    """Its parent hasn't asked for its exit code yet."""
    holder.kill()
    until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_ZOMBIE)
    assert rundir.read(folder) is None
    with rundir.claim(folder, ("tiny",), "x") as owned:
        assert owned.instance.process.pid == os.getpid()


# The folder is taken away while we run.


def test_a_whole_folder_needs_no_mending(folder: Path) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned:
        before = (folder / rundir.INSTANCE).stat()
        assert owned.mend() is False
        assert (folder / rundir.INSTANCE).stat() == before


@pytest.mark.parametrize("how", ["removed", "replaced", "moved away"])
def test_a_folder_that_was_taken_away_is_made_again(folder: Path, how: str) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned:
        owned.describe(address="http://127.0.0.1:8080")
        if how == "moved away":
            folder.rename(folder.with_name("elsewhere"))
        else:
            shutil.rmtree(folder)
        if how == "replaced":
            folder.mkdir()
        assert not owned.is_ours()
        assert owned.mend() is True
        assert owned.mend() is False
        assert folder.stat().st_mode & 0o777 == 0o700
        assert rundir.read(folder) == owned.instance
        with pytest.raises(Error, match=f"pid {os.getpid()}"), rundir.claim(folder, (), "y"):
            pass
    assert list(folder.iterdir()) == []
    assert claimable(folder)


def test_mending_leaks_no_descriptor(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with rundir.claim(folder, ("tiny",), "x") as owned:
        for _ in range(3):
            shutil.rmtree(folder)
            assert owned.mend() is True
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lone_description_that_was_removed_is_written_again(folder: Path) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned:
        (folder / rundir.INSTANCE).unlink()
        assert owned.mend() is False  # the sockets are there still
        assert rundir.read(folder) == owned.instance


def test_when_another_has_the_new_folder_it_is_said_and_that_one_is_left_alone(folder: Path) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned:
        shutil.rmtree(folder)
        command = [sys.executable, "-c", HOLDER, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "claimed\n"
            told = (folder / rundir.INSTANCE).read_text()
            for _ in range(2):
                with pytest.raises(Error, match=rf"\(pid {other.pid}\) already serves") as raised:
                    owned.mend()
                assert raised.value.exit is Exit.BUSY
            owned.close()
            assert (folder / rundir.INSTANCE).read_text() == told
            other.kill()


def test_what_one_left_that_came_between_is_swept_and_our_own_children_live(folder: Path) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned, living_in(folder / "tiny") as mine, sleeper() as theirs:
        owned.note_children({"tiny": mine.pid})
        shutil.rmtree(folder)
        leave(folder, Process.of(theirs.pid))
        assert owned.mend() is True
        assert theirs.wait(10) == -signal.SIGKILL
        assert mine.poll() is None
        assert rundir.read(folder) == owned.instance


@pytest.mark.parametrize("way", ["file", "link"])
def test_what_can_not_be_mended_is_an_error_each_time_and_then_no_more(folder: Path, way: str, tmp_path: Path) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned:
        shutil.rmtree(folder)
        if way == "file":
            folder.write_text("")
        else:
            folder.symlink_to(tmp_path)
        for _ in range(2):
            with pytest.raises(Error):
                owned.mend()
        folder.unlink()
        assert owned.mend() is True


def test_on_a_full_disk_the_old_description_stays_whole_and_is_renewed_later(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned:
        before = owned.instance
        part = folder / f"{rundir.INSTANCE}.part"
        part.symlink_to("/dev/full")
        owned.describe(address="http://127.0.0.1:8080")
        assert "llmctl status and down may not find what runs" in caplog.text
        assert rundir.read(folder) == before
        assert not part.is_symlink()  # what is half written is removed
        assert owned.mend() is False
        assert rundir.read(folder) == replace(before, address="http://127.0.0.1:8080") == owned.instance


# Processes.


def test_children_are_noted_while_they_live(folder: Path) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned, sleeper() as child:
        owned.note_children({"tiny": child.pid, "other": gone_process().pid})
        found = rundir.read(folder)
        assert found is not None
        assert found.children == (Process.of(child.pid),)
        owned.note_children({})
        assert rundir.read(folder) == replace(found, children=())


def test_the_folders_of_all_that_ran_are_removed_also_of_those_that_nobody_ordered(folder: Path) -> None:
    with rundir.claim(folder, ("tiny",), "x") as owned, sleeper() as child:
        for name in ("tiny", "asked_for", "tiny"):
            owned.child_folder(name).mkdir(exist_ok=True)
            owned.note_children({name: child.pid})
        found = rundir.read(folder)
        assert found is not None
        assert found.presets == ("tiny", "asked_for")
        stranger = folder / "stranger"
        stranger.mkdir()
        owned.note_children({})
    assert list(folder.iterdir()) == [stranger]


def test_a_zombie_counts_as_gone() -> None:
    with sleeper() as process:
        it = Process.of(process.pid)
        assert it.alive()
        process.kill()
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert not it.alive()
        it.signal(signal.SIGTERM)  # harmless


def test_a_signal_reaches_the_process_and_only_it() -> None:
    with sleeper() as process:
        it = Process.of(process.pid)
        replace(it, started=f"{it.started}0").signal(signal.SIGTERM)
        assert process.poll() is None
        it.signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        it.signal(signal.SIGTERM)


def test_a_pid_that_nobody_has_is_no_process() -> None:
    with pytest.raises(ProcessLookupError):
        Process.of(gone_process().pid)
    assert not gone_process().alive()
