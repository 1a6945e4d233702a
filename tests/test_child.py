"""One real process: it starts in its folder, is watched, is stopped by a ladder that ends, and never outlives us."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from supervisor import argv, child, logfile
from supervisor.child import Child
from supervisor.errors import Error, Exit
from supervisor.units import KIB, MIB
from supervisor.upstream import Upstream
from tests import fakes
from tests.conftest import until

T = TypeVar("T")


class Site:
    """Where one child runs: its engine, its folder, its log."""

    def __init__(self, root: Path, **knobs: Any) -> None:
        self.engine = root / "engine"
        self.server = fakes.install(self.engine, **knobs)
        self.folder = root / "run" / "tiny"
        self.log = root / "logs" / "tiny.log"

    def command(self) -> list[str]:
        return [str(self.server), "--model", "m.gguf", "--alias", "tiny", "--host", argv.SOCKET, "--parallel", "2"]

    def spawn(self) -> Child:
        return child.spawn("tiny", self.command(), argv.environment(os.environ, self.folder), self.folder, self.log)

    def run(self, story: Callable[[Child], Awaitable[T]]) -> T:
        """Spawn, live the story, and leave no process, whatever it did."""

        async def live() -> T:
            process = self.spawn()
            try:
                async with asyncio.timeout(30):
                    return await story(process)
            finally:
                process.kill()
                await process.wait()

        return asyncio.run(live())

    async def loaded(self) -> None:
        await asyncio.to_thread(fakes.wait_event, self.engine, "loaded")


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def reaches(told: Callable[[], object]) -> None:
    await asyncio.wait_for(asyncio.to_thread(until, told), 60)


# Starting.


def test_it_runs_in_its_folder_with_a_scrubbed_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    site = Site(tmp_path)

    async def story(process: Child) -> None:
        await site.loaded()
        start = fakes.events(site.engine, "start")[0]
        assert start["pid"] == process.pid  # exec all the way down: our pid is the engine's
        assert start["ppid"] == os.getpid()
        assert start["cwd"] == str(site.folder)
        assert start["argv"] == site.command()[1:]
        assert {"HF_TOKEN", "LLAMA_ARG_CTX_SIZE"}.isdisjoint(start["env"])
        assert stat.S_ISSOCK(process.socket.stat().st_mode)
        assert stat.S_IMODE(site.folder.stat().st_mode) == 0o700
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)  # a Ctrl-C on our terminal isn't its business
        assert psutil.Process(process.pid).terminal() is None
        assert os.readlink(f"/proc/{process.pid}/fd/0") == "/dev/null"
        assert process.returncode is None
        assert repr(process) == f"<Child tiny pid={process.pid} alive>"

    site.run(story)


def test_it_inherits_none_of_our_descriptors(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with (tmp_path / "ours").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)

        async def story(process: Child) -> None:
            await site.loaded()
            fds = f"/proc/{process.pid}/fd"
            targets = [os.readlink(f"{fds}/{number}") for number in os.listdir(fds)]
            assert str(tmp_path / "ours") not in targets

        site.run(story)


def test_a_path_longer_than_a_sockets_may_be_works(tmp_path: Path) -> None:
    """A Unix socket's path may have 107 bytes."""
    site = Site(tmp_path / ("long" * 30) / ("er" * 60))
    assert len(os.fsencode(site.folder)) > 250

    async def story(process: Child) -> None:
        await site.loaded()
        async with Upstream(process) as upstream:
            assert await upstream.healthy()

    site.run(story)


def test_a_stale_socket_is_removed_before_the_start_and_the_own_one_after_the_end(tmp_path: Path) -> None:
    """llama-server doesn't, and one that is there makes its bind fail."""
    site = Site(tmp_path)
    site.folder.mkdir(parents=True)
    (site.folder / argv.SOCKET).write_text("stale")

    async def story(process: Child) -> Path:
        await site.loaded()
        assert await process.stop() == 0
        return process.socket

    assert not site.run(story).exists()


def test_a_program_that_is_not_there_ends_the_child_and_the_log_says_why(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.server.unlink()

    async def story(process: Child) -> tuple[int, str]:
        return await process.wait(), process.log_tail()

    code, said = site.run(story)
    assert code == 1
    assert said == f"error: {site.server} can't be started: No such file or directory\n"


def test_a_folder_that_can_not_be_made_is_one_error(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.folder.parent.write_text("a file")

    async def live() -> None:
        with pytest.raises(Error) as raised:
            site.spawn()
        assert raised.value.exit is Exit.CHILD

    asyncio.run(live())


def test_only_the_main_thread_may_spawn(tmp_path: Path) -> None:
    """The death signal fires when the spawning thread ends."""
    site = Site(tmp_path)
    said: list[str] = []

    def spawn() -> None:
        try:
            site.spawn()
        except AssertionError as error:
            said.append(str(error))

    thread = threading.Thread(target=spawn)
    thread.start()
    thread.join()
    assert "bound to the thread" in said[0]
    assert fakes.events(site.engine) == []


# Its end.


@pytest.mark.parametrize(("code", "name"), [(3, "3"), (-6, "-6"), (-9, "-9")])
def test_an_exit_is_noticed_with_its_code(code: int, name: str, tmp_path: Path) -> None:
    site = Site(tmp_path, start_exit=code, start_log="why it ended")

    async def story(process: Child) -> None:
        assert await process.wait() == process.returncode == code
        assert repr(process) == f"<Child tiny pid={process.pid} ended {name}>"
        assert "why it ended" in process.log_tail()
        assert await process.wait() == code  # for as often as one asks
        assert await process.stop() == code  # and nothing is signalled: the pid may be somebody's
        assert not psutil.pid_exists(process.pid)  # reaped

    site.run(story)


def test_everybody_who_waits_is_told_and_a_cancelled_wait_changes_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def story(process: Child) -> None:
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(process.wait()) for _ in range(3)]
            await site.loaded()
            waits[0].cancel()
            await asyncio.wait(waits[:1])
            assert alive(process.pid)
            process.kill()
        assert [wait.result() for wait in waits[1:]] == [-9, -9]

    site.run(story)


def test_no_descriptor_is_left_of_it(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def count() -> int:
        for _ in range(2):  # the first makes what asyncio keeps
            before = len(os.listdir("/proc/self/fd"))
            await child.spawn("tiny", ["/bin/true"], {}, site.folder, site.log).wait()
        return len(os.listdir("/proc/self/fd")) - before

    assert asyncio.run(count()) == 0


# Stopping.


def test_a_polite_stop_is_one_sigterm(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def story(process: Child) -> int:
        await site.loaded()
        return await process.stop()

    assert site.run(story) == 0
    assert [event["number"] for event in fakes.events(site.engine, "signal")] == [signal.SIGTERM]


def test_before_it_has_loaded_a_stop_ends_it_as_well(tmp_path: Path) -> None:
    site = Site(tmp_path, never_healthy=True)

    async def story(process: Child) -> int:
        await asyncio.to_thread(fakes.wait_event, site.engine, "bound")
        return await process.stop()

    assert site.run(story) == -signal.SIGTERM


def test_the_second_rung_is_another_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that waits for a client leaves at once on the second."""
    monkeypatch.setattr(child, "SECOND_TERM_S", 30.0)
    site = Site(tmp_path, slow_exit_s=60)

    async def story(process: Child) -> int:
        await site.loaded()
        return await process.stop(term_s=0.05)

    assert site.run(story) == 1
    assert [event["number"] for event in fakes.events(site.engine, "signal")] == [signal.SIGTERM] * 2


def test_the_last_rung_is_sigkill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SECOND_TERM_S", 0.05)
    site = Site(tmp_path, ignore_sigterm=True)

    async def story(process: Child) -> int:
        await site.loaded()
        return await process.stop(term_s=0.05)

    assert site.run(story) == -signal.SIGKILL


def test_a_cancelled_stop_kills_and_still_waits(tmp_path: Path) -> None:
    site = Site(tmp_path, ignore_sigterm=True)

    async def story(process: Child) -> None:
        await site.loaded()
        async with asyncio.TaskGroup() as group:
            stop = group.create_task(process.stop(term_s=600))
            await asyncio.sleep(0)
            stop.cancel()
            await asyncio.wait([stop])
            assert stop.cancelled()
            assert process.returncode == -signal.SIGKILL

    site.run(story)


def test_a_stop_reaches_the_whole_group(tmp_path: Path) -> None:
    """A wrapper script that doesn't exec leaves a shell between; both end."""
    site = Site(tmp_path)
    site.server.write_text("#!/bin/sh\nsleep 600 &\necho $!\nwait\n")

    async def story(process: Child) -> int:
        inner = int(await asyncio.to_thread(until, process.log_tail))
        await process.stop()
        return inner

    inner = site.run(story)
    until(lambda: not alive(inner))


# It doesn't outlive us.

PARENT = """
import asyncio, os, sys
from pathlib import Path
from supervisor import argv, child, logfile
engine, folder, log = map(Path, sys.argv[1:])
async def main():
    process = child.spawn("tiny", [str(engine), "--host", argv.SOCKET], argv.environment(os.environ, folder), folder, log)
    print(process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["loaded", "at once"])
def test_when_we_are_killed_it_dies(when: str, tmp_path: Path) -> None:
    """By kill -9, also in the middle of the child's start."""
    site = Site(tmp_path, ignore_sigterm=True)
    command = [sys.executable, "-c", PARENT, str(site.server), str(site.folder), str(site.log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if when == "loaded":
            fakes.wait_event(site.engine, "loaded")
        parent.kill()
    until(lambda: not alive(pid))


# Its log; tests/test_logfile.py has the file.


def test_the_last_five_starts_keep_their_logs(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def starts() -> None:
        for number in range(7):
            await child.spawn("tiny", ["/bin/echo", f"start {number}"], {}, site.folder, site.log).wait()

    asyncio.run(starts())
    assert sorted(path.name for path in site.log.parent.iterdir()) == ["tiny.log"] + [f"tiny.log.{n}" for n in range(1, 5)]
    for age in range(5):
        path = site.log if age == 0 else site.log.with_name(f"tiny.log.{age}")
        assert f"start {6 - age}\n" in path.read_text()


def test_a_deleted_run_folder_is_made_again_by_the_next_start(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def story(process: Child) -> None:
        await site.loaded()
        shutil.rmtree(site.folder.parent)
        assert await process.stop() == 0
        again = site.spawn()
        await asyncio.to_thread(fakes.wait_event, site.engine, "loaded", count=2)
        assert stat.S_ISSOCK(again.socket.stat().st_mode)
        await again.stop()

    site.run(story)


TALKS = ["/bin/sh", "-c", "i=0; while :; do i=$((i + 1)); echo line $i; done"]


def test_its_log_is_bounded_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the file open for appending, so it goes on at the start of the emptied one."""
    monkeypatch.setattr(logfile, "LOG_LIMIT", 64 * KIB)
    site = Site(tmp_path)

    async def live() -> tuple[int, str]:
        process = child.spawn("tiny", TALKS, {}, site.folder, site.log)
        try:
            for _ in range(logfile.KEEP_LOGS + 1):
                seen = process.logged_bytes
                await reaches(process.trim_log)
                assert process.logged_bytes > seen
                assert process.log_tail().count("\n") > 100  # right after it was emptied, too
        finally:
            process.kill()
            await process.wait()
        return process.logged_bytes, process.log_tail()

    written, said = asyncio.run(live())
    names = ["tiny.log", *(f"tiny.log.{number}" for number in range(1, logfile.KEEP_LOGS))]
    assert sorted(path.name for path in site.log.parent.iterdir()) == names
    assert written > 6 * 64 * KIB
    assert "\0" not in site.log.read_text()  # no hole where it was emptied
    last = [int(line.split()[1]) for line in said.splitlines()[1:-1]]
    assert last == sorted(last)


@pytest.mark.parametrize("why", ["no folder", "a full disk", "a folder"])
def test_a_log_that_can_not_be_written_is_kept_in_memory(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logfile, "LOG_LIMIT", 64 * KIB)
    site = Site(tmp_path, start_exit=3, start_log="why it ended\n" + "x" * 70_000 + "\nits last words")
    if why == "no folder":
        site.log.parent.write_text("a file")
    else:
        site.log.parent.mkdir()
        site.log.symlink_to("/dev/full" if why == "a full disk" else tmp_path)

    async def story(process: Child) -> None:
        assert await process.wait() == 3
        assert "\nits last words\n" in process.log_tail()
        assert process.logged_bytes > 70_000

    site.run(story)
    assert "the log of tiny is kept in memory" in caplog.text


def test_a_log_in_memory_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "LOG_LIMIT", 64 * KIB)
    site = Site(tmp_path)
    site.log.mkdir(parents=True)

    async def live() -> None:
        process = child.spawn("tiny", TALKS, {}, site.folder, site.log)
        try:
            await reaches(process.log_head)
            assert process.log_head().startswith("line 1\n")
            for _ in range(3):
                await reaches(process.trim_log)
                assert process.log_tail()
            assert process.logged_bytes > 3 * 64 * KIB
        finally:
            process.kill()
            await process.wait()
        assert process.trim_log() == 0
        assert process.log_head() == ""  # it lived in memory
        assert site.log.is_dir()
        assert "line" in process.log_tail()

    asyncio.run(live())


# What it does.


def spin(folder: Path, program: str) -> Child:
    return child.spawn("tiny", [sys.executable, "-c", program], {}, folder / "run", folder / "log")


def test_effort_is_the_time_on_a_core_and_the_wait_for_one(tmp_path: Path) -> None:
    """Two that spin on one core: each gets half of it, and each made an effort all the time."""
    core = {min(os.sched_getaffinity(0))}

    async def live() -> None:
        both = [spin(tmp_path / name, "print(flush=True)\nwhile True: pass") for name in ("a", "b")]
        try:
            for each in both:
                os.sched_setaffinity(each.pid, core)
            await reaches(lambda: all(each.effort_s() > 0.2 for each in both))
            mine = psutil.Process(both[0].pid)

            def waited() -> bool:
                on_core_s = mine.cpu_times()
                return both[0].effort_s() > on_core_s.user + on_core_s.system + 0.2

            await reaches(waited)
        finally:
            for each in both:
                each.kill()
                await each.wait()
        assert both[0].effort_s() == 0.0

    asyncio.run(live())


THREADS = """
import sys, threading, time
def work():
    until_s = time.thread_time() + 0.05
    while time.thread_time() < until_s: pass
for number in range(4):
    threads = [threading.Thread(target=work) for _ in range(3)]
    [each.start() for each in threads]
    [each.join() for each in threads]
print("done", flush=True)
time.sleep(600)
"""


def test_threads_that_ended_take_no_effort_with_them(tmp_path: Path) -> None:
    async def live() -> None:
        process = spin(tmp_path, THREADS)
        seen = [0.0]

        def done() -> bool:
            seen.append(process.effort_s())
            return "done" in process.log_tail()

        try:
            await reaches(done)
            seen.append(process.effort_s())
            assert seen == sorted(seen)
            assert seen[-1] >= 4 * 3 * 0.05 - 0.02  # two ticks
        finally:
            process.kill()
            await process.wait()

    asyncio.run(live())


def test_a_stopped_one_makes_no_effort_and_is_known_as_stopped(tmp_path: Path) -> None:
    async def live() -> None:
        process = spin(tmp_path, "while True: pass")
        try:
            assert not process.stopped()
            os.kill(process.pid, signal.SIGSTOP)
            await reaches(process.stopped)
            before_s = process.effort_s()
            busy_until_s = psutil.Process().cpu_times().user + 0.1
            while psutil.Process().cpu_times().user < busy_until_s:
                assert process.effort_s() == before_s
            os.kill(process.pid, signal.SIGCONT)
            await reaches(lambda: not process.stopped() and process.effort_s() > before_s)
        finally:
            process.kill()
            await process.wait()
        assert not process.stopped()

    asyncio.run(live())


def test_its_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    async def live() -> None:
        process = spin(tmp_path, f"import time; x = bytearray({64 * MIB}); print('held', flush=True); time.sleep(600)")
        try:
            await reaches(lambda: "held" in process.log_tail())
            assert 64 * MIB < process.anonymous_bytes() < process.resident_bytes() < 128 * MIB
            assert process.resident_bytes() == psutil.Process(process.pid).memory_info().rss
            assert process.read_bytes() > 0
        finally:
            process.kill()
            await process.wait()
        assert (process.anonymous_bytes(), process.resident_bytes(), process.read_bytes()) == (0, 0, 0)

    asyncio.run(live())
