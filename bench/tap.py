"""What the llmctl that runs is asked, with its texts, for as long as somebody listens: a trace whose requests can be sent as they were.

llmctl keeps no text. It tells them here, over its own address and with its owner's right, and forgets them; this keeps them in memory until
the trace is written. How long answers were, and when requests came, is the ledger's to say once they have ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import httpx2

from bench import traffic
from bench.trace import Trace
from supervisor import __version__, accounts
from supervisor.errors import Error, Exit
from supervisor.record import Record
from supervisor.rundir import Instance
from supervisor.running import SILENCE_S
from supervisor.units import Progress

PATH: Final = "/llmctl/texts"
CONNECT_S: Final = 5.0
LOOK_S: Final = 0.2
"""Between two looks whether what is in work has ended: a record is on disk 50 ms after its end."""
_DATA: Final = "data: "
_SOURCE: Final = f"llmctl {__version__}"


@dataclass(slots=True)
class Heard:
    """What was told while somebody listened."""

    since_at: float
    """Seconds since 1970, as the rest."""
    until_at: float = 0.0
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the request's id."""
    dropped: int = 0
    """Texts that came faster than they were read."""
    ended: bool = False
    """llmctl stopped meanwhile."""

    def take(self, told: Mapping[str, Any]) -> None:
        """One event."""
        if "dropped" in told:
            self.dropped += told["dropped"]
        else:
            self.bodies[told["id"]] = told["body"]


async def listen(instance: Instance, for_s: float, progress: Progress) -> Heard:
    """Hear for so long what that llmctl is asked. Cancelling (Ctrl-C) ends it sooner, and what was heard is given.

    Raises :class:`Error`: exit code 7 when it doesn't answer, 2 when it knows no such thing.
    """
    headers = {"Authorization": f"Bearer {instance.token}"}
    timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
    heard = Heard(time.time())
    begun_s = time.monotonic()
    try:
        async with (
            asyncio.timeout(for_s),
            httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as client,
            client.stream("GET", f"{instance.address}{PATH}") as reply,
        ):
            if reply.status_code != 200:
                raise Error(
                    f"llmctl (pid {instance.process.pid}) answers {reply.status_code} to {PATH}: it is an older one",
                    exit=Exit.USAGE,
                    hint="llmctl down, then up again",
                )
            async for line in reply.aiter_lines():
                if line.startswith(_DATA):
                    heard.take(json.loads(line.removeprefix(_DATA)))
                if line:  # also when it says that it listens
                    progress(f"{len(heard.bodies)} requests", min(int(time.monotonic() - begun_s), int(for_s)), int(for_s))
            heard.ended = True
    except (TimeoutError, asyncio.CancelledError):
        pass
    except httpx2.HTTPError as exc:
        if not heard.bodies:
            at = instance.address or "any address yet"
            said = f"llmctl (pid {instance.process.pid}) doesn't answer at {at}: {exc}"
            raise Error(said, exit=Exit.BUSY, hint="llmctl logs llmctl") from exc
        heard.ended = True
    heard.until_at = time.time()
    return heard


def recorded(ledger: Path, since_at: float, until_at: float, preset: str = "") -> Trace:
    """What the ledger has of a window, in seconds since 1970: shapes, and no texts."""
    return traffic.trace(
        _records(ledger, since_at),
        since_at=since_at,
        until_at=until_at,
        recorded_at=time.time(),
        source=_SOURCE,
        preset=preset,
    )


def trace(ledger: Path, heard: Heard, *, preset: str = "", wait_s: float, progress: Progress) -> Trace:
    """What was heard, with what its records say; waits at most so long for requests that are in work still, and leaves those out then."""
    ends_s = time.monotonic() + wait_s
    while True:
        records = _records(ledger, heard.since_at)
        ended = {each.id for each in records if each.status != "open"}
        count = len(heard.bodies.keys() - ended)
        if not count or time.monotonic() >= ends_s:
            break
        progress(f"{count} in work still", 0, 0)
        time.sleep(LOOK_S)
    # A record is opened before its request is admitted: who was at the door when the listening began is told, too.
    return traffic.trace(
        records,
        since_at=min((each.opened_at for each in records if each.id in heard.bodies), default=heard.since_at),
        until_at=heard.until_at,
        recorded_at=heard.until_at,
        source=_SOURCE,
        preset=preset,
        bodies=heard.bodies,
    )


def _records(ledger: Path, since_at: float) -> list[Record]:
    """Of that day and the one before: a prompt may be like one that came before the window."""
    since = date.fromtimestamp(since_at) - timedelta(days=1)
    return [traffic.record(row) for row in accounts.records(ledger, None, since=since)]
