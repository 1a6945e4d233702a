"""The llmctl that runs now, as a command talks to it: over its own address, with the admin right that its run folder gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx2

from supervisor import rundir
from supervisor.errors import Error, Exit
from supervisor.paths import Home
from supervisor.rundir import Instance

ANSWER_S: Final = 5.0
SILENCE_S: Final = 60.0
"""Its events beat every 15 s."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running llmctl."""

    instance: Instance

    @classmethod
    def of(cls, home: Home) -> Running:
        """The one of a home. Raises :class:`Error` (exit code 2) when none runs."""
        found = rundir.read(home.run)
        if found is None:
            raise Error("nothing runs", exit=Exit.USAGE, hint="llmctl up tiny --detach")
        return cls(found)

    def get(self, path: str) -> dict[str, Any]:
        """GET one of its routes. Raises :class:`Error` as it says, or with exit code 7 when it doesn't answer."""
        return self._ask("GET", path)

    def post(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        """POST to one of its routes. Same errors."""
        return self._ask("POST", path, json=body)

    @contextmanager
    def polling(self, path: str) -> Iterator[Callable[[], dict[str, Any]]]:
        """Gives what GETs one of its routes each time that it is called, over one kept connection. Same errors as :meth:`get`."""
        with httpx2.Client(headers=self._headers, timeout=ANSWER_S, trust_env=False) as client:

            def ask() -> dict[str, Any]:
                with self._heard():
                    return _answer(client.get(self._url(path)))

            yield ask

    @contextmanager
    def events(self) -> Iterator[Iterator[dict[str, Any]]]:
        """Its events from now on; the present states come first."""
        with (
            self._heard(),
            httpx2.stream("GET", self._url("/llmctl/events"), headers=self._headers, timeout=SILENCE_S, trust_env=False) as reply,
        ):
            _check(reply)
            yield (json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line.startswith("data: "))

    def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        with self._heard():
            return _answer(
                httpx2.request(method, self._url(path), headers=self._headers, timeout=ANSWER_S, trust_env=False, **more)
            )

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.instance.token}"}

    def _url(self, path: str) -> str:
        return f"{self.instance.address}{path}"

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as exc:
            at = self.instance.address or "any address yet"
            raise Error(
                f"llmctl (pid {self.instance.process.pid}) doesn't answer at {at}: {exc}",
                exit=Exit.BUSY,
                hint="llmctl logs llmctl",
            ) from exc


def _answer(reply: httpx2.Response) -> dict[str, Any]:
    _check(reply)
    found = reply.json()
    assert isinstance(found, dict)
    return found


def _check(reply: httpx2.Response) -> None:
    """Raise its error as ours."""
    if reply.status_code < 400:
        return
    reply.read()
    said = reply.json()["error"]
    kind = Exit.MODEL if said["code"] == "model_not_downloaded" else Exit.CONFIG if reply.status_code == 404 else Exit.CHILD
    raise Error(str(said["message"]), exit=kind, hint=str(said.get("try", "")))
