"""llama.cpp's own completions put together: ``/completion`` and ``/infill``.

Every event names its sequence. The last of each has the whole reply but for its text, and is told by ``"stop": true``; it knows that it
was streamed, which the unstreamed one says of itself otherwise. Several sequences (prompts times choices) are an array in their order.
There is no end of the stream besides HTTP's, so it is done when each sequence that spoke has had its last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from supervisor.assemble import Assembler


@dataclass(slots=True)
class _Sequence:
    text: list[str] = field(default_factory=list)
    last: dict[str, Any] | None = None

    def reply(self) -> dict[str, Any]:
        assert self.last is not None
        reply = self.last | {"content": "".join(self.text)}
        if "generation_settings" in reply:
            # The second follows from the first (tools/server/server-schema.cpp:480).
            reply["generation_settings"] |= {"stream": False, "reasoning_in_content": False}
        return reply


class Native(Assembler):
    """A completion, or an array of them."""

    def __init__(self) -> None:
        super().__init__()
        self._sequences: dict[int, _Sequence] = {}

    @property
    def done(self) -> bool:
        """After the last event of each sequence."""
        return bool(self._sequences) and all(sequence.last is not None for sequence in self._sequences.values())

    def _take(self, event: dict[str, Any]) -> None:
        sequence = self._sequences.setdefault(event["index"], _Sequence())
        sequence.text.append(event["content"])
        if event["stop"]:
            sequence.last = event

    def _reply(self) -> dict[str, Any] | list[Any]:
        replies = [sequence.reply() for _, sequence in sorted(self._sequences.items())]
        return replies[0] if len(replies) == 1 else replies
