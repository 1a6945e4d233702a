"""OpenAI's Responses put together: the stream's last event holds the whole reply, with its keys in another order.

The unstreamed reply says when it was completed, and that its reasoning is; the order of the keys is ``to_json_oaicompat_resp``'s
(tools/server/server-task.cpp at b11312). It has no ``timings``, which the last event has.
"""

from __future__ import annotations

from typing import Any, Final

from supervisor.assemble import Assembler

_ORDER: Final = ("completed_at", "created_at", "id", "model", "object", "output", "status", "usage")
_MESSAGE_ORDER: Final = ("content", "id", "role", "status", "type")


class Responses(Assembler):
    """A response."""

    def __init__(self) -> None:
        super().__init__()
        self._response: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        """After ``response.completed``."""
        return self._response is not None

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "response.completed":
            self._response = dict(event["response"])

    def _reply(self) -> dict[str, Any]:
        assert self._response is not None
        reply = self._response | {
            "completed_at": self._response.get("created_at"),
            "output": [_item(item) for item in self._response["output"]],
        }
        return _ordered(reply, _ORDER)


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") == "message":
        return _ordered(item, _MESSAGE_ORDER)
    return {**item, "status": "completed"}


def _ordered(found: dict[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    """The same keys, those of ``order`` first."""
    return {key: found[key] for key in order if key in found} | found
