"""Where a prompt parts from those before it: llama-server's cache serves what they begin with alike, and computes the rest. Pure.

A request's body is read once more when it is closed, into pieces in the order in which most templates put them: tools, system, messages.
What of it never enters the prompt (the model's name, ``temperature``, where a client marks its ``cache_control``) is left out.

Of the pieces no text is kept, but marks: at the end of each block, 8 bytes of a keyed hash of everything up to there, so that prompts whose
marks are equal up to one have equal text up to there. The key is this process's own and never written anywhere. No block reaches over the
end of a piece, and the first ones are short: what changes in a prompt's beginning costs most, and is told most exactly.

Templates differ. Some put the system's text before the tools, and a few change their beginning with a field that isn't looked at here
(``chat_template_kwargs``, ``reasoning_effort``): the figures are those of the prompt as it came, not of what the engine made of it.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pydantic_core import from_json, to_json

from supervisor.routes import Api
from supervisor.units import MIB

LIMIT: Final = MIB
"""Bytes of a body that is still read: parsing it holds the interpreter, 1 MiB for some milliseconds."""
KEPT: Final = 64
"""Prompts of a preset that are kept, of those that aren't the beginning of a later one."""
MARKS: Final = 4000
"""Of one prompt; what goes beyond is one block. So a preset's prompts take at most KEPT × MARKS × 8 bytes, 2 MiB."""
_MARK: Final = 8
_SIZES: Final = ((64, 8), (512, 32), (4096, 128))
"""Up to which byte of the prompt blocks have which size."""
_SIZE: Final = 256
"""From there on."""
_END: Final = b"\xff"
"""Around whose a piece is, among the text. No UTF-8 has it."""
_KEYED: Final = blake2b(digest_size=_MARK, key=secrets.token_bytes(16))

_ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool"))
_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {"function_call": "assistant", "function_call_output": "tool", "reasoning": "assistant"}
)
"""Whose a Responses item without a role is, by its type (tools/server/server-chat.cpp:152-221 at b11312)."""
_UNREAD: Final = frozenset(("cache_control", "content", "text"))
_TEXTS: Final = frozenset(("text", "type", "cache_control", "citations", "annotations", "logprobs"))
"""What a block of text has, of which only the text counts."""
_BILLING: Final = re.compile(rb"\A(x-anthropic-billing-header:.*?cch=).{5};", re.DOTALL)
"""A stamp that is new in every request of Claude Code. The engine writes ``fffff`` there (server-chat.cpp:326-346)."""

Part = tuple[str, bytes]
"""A piece of a prompt: its label, in which nothing of the prompt is, and its text."""


def parts(api: Api, body: bytes) -> list[Part] | None:
    """The prompt of a request's body, labelled: tools, system, message 1 (user), input 2 (tool), prompt.

    None where there is no one prompt: a route that has none to cache, several prompts, a body over :data:`LIMIT` or one that isn't
    understood.
    """
    if api is Api.WHOLE or len(body) > LIMIT:
        return None
    try:
        found = from_json(body)
    except ValueError:
        return None
    return _READERS[api](found) if isinstance(found, dict) else None


def _chat(found: Mapping[str, Any]) -> list[Part] | None:
    messages = found.get("messages")
    return [*_tools(found), *_turns("message", messages)] if isinstance(messages, list) else None


def _anthropic(found: Mapping[str, Any]) -> list[Part] | None:
    turns, system = _chat(found), found.get("system")
    if turns is None or not system:
        return turns
    blocks = system if isinstance(system, list) else [system]
    text = b"".join(_BILLING.sub(rb"\1fffff;", _flat(block)) for block in blocks)
    tools = len(turns) - len(found["messages"])
    return [*turns[:tools], ("system", text), *turns[tools:]]


def _responses(found: Mapping[str, Any]) -> list[Part] | None:
    asked, system = found.get("input"), found.get("instructions")
    head = [*_tools(found), *([("system", _flat(system))] if system else [])]
    if isinstance(asked, str):
        return [*head, ("input", _flat(asked))]
    return [*head, *_turns("input", asked)] if isinstance(asked, list) else None


def _text(found: Mapping[str, Any]) -> list[Part] | None:
    text = _prompt(found.get("prompt"))
    return None if text is None else [("prompt", text)]


def _native(found: Mapping[str, Any]) -> list[Part] | None:
    """llama.cpp's own; ``/infill`` puts other files first and the prompt last (tools/server/server-common.cpp:1750-1760)."""
    if "input_prefix" not in found and "input_suffix" not in found:
        return _text(found)
    fields = (found.get(name) for name in ("input_extra", "input_prefix", "input_suffix", "prompt"))
    return [("prompt", _flat(each)) for each in fields if each]


_READERS: Final[Mapping[Api, Callable[[Mapping[str, Any]], list[Part] | None]]] = MappingProxyType(
    {Api.CHAT: _chat, Api.ANTHROPIC: _anthropic, Api.RESPONSES: _responses, Api.TEXT: _text, Api.NATIVE: _native}
)


def _tools(found: Mapping[str, Any]) -> list[Part]:
    tools = found.get("tools")
    return [("tools", b"".join(_flat(tool) for tool in tools))] if isinstance(tools, list) and tools else []


def _turns(what: str, turns: Sequence[object]) -> Iterator[Part]:
    """The pieces of a dialogue, numbered."""
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            yield f"{what} {number} (other)", _flat(turn)
            continue
        role = turn.get("role") or _TYPES.get(str(turn.get("type")))
        yield f"{what} {number} ({role if isinstance(role, str) and role in _ROLES else 'other'})", _said(turn)


def _said(turn: Mapping[str, Any]) -> bytes:
    """What a turn adds to the prompt: the fields that the engine reads of it (common/chat.cpp:373-463, server-chat.cpp:33-225)."""
    head = _some(turn, "name", "tool_call_id", "call_id", "reasoning_content")
    return b"".join((head, *(_flat(turn[name]) for name in ("content", "output") if turn.get(name)), _some(turn, *_CALLS)))


_CALLS: Final = ("tool_calls", "arguments")


def _some(turn: Mapping[str, Any], *names: str) -> bytes:
    found = {name: turn[name] for name in names if turn.get(name)}
    return to_json(found) if found else b""


def _flat(value: object) -> bytes:
    """The text of a message's content, of its blocks, or of a tool; what isn't text as JSON."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    if isinstance(value, list):
        return b"".join(map(_flat, value))
    if not isinstance(value, dict):
        return to_json(value)
    if isinstance(value.get("text"), str) and value.keys() <= _TEXTS:
        return _flat(value["text"])
    rest = to_json({name: each for name, each in value.items() if name not in _UNREAD})
    return b"".join((rest, *(_flat(value[name]) for name in ("text", "content") if value.get(name))))


def _prompt(value: object) -> bytes | None:
    """A prompt of completions: text, an array of tokens (and texts), an object with images; None for several."""
    if isinstance(value, list) and not any(type(each) is int for each in value):
        return _prompt(value[0]) if len(value) == 1 else None
    if isinstance(value, list):
        return to_json(value)
    return _flat(value) if isinstance(value, str | dict) else None


@dataclass(frozen=True, slots=True)
class Parting:
    """How far a prompt is the same as the likest before it. The fields are the record's of these names."""

    prompt_chars: int
    """Bytes."""
    shared_chars: int
    """Bytes."""
    shared_with: str | None
    """None where nothing is the same."""
    parted_in: str | None
    """The piece of the new one in which they part, its first where it begins like none; None where all of it is in the earlier one, or
    there was none.
    """


class _Trail(NamedTuple):
    """A prompt that came."""

    id: str
    marks: bytes
    last: int
    """Bytes of its last block, with whose its pieces are."""
    chars: int


class Trails:
    """The last prompts of one preset. One thread has it."""

    def __init__(self) -> None:
        self._kept: list[_Trail] = []

    def __repr__(self) -> str:
        return f"<Trails {len(self._kept)}>"

    def compare(self, id: str, parts: Sequence[Part]) -> Parting:  # noqa: A002  (what the record calls it)
        """Where the prompt parts from the likest before it, the later of equals; then it is kept, too.

        Exact where that one ends or a piece does; else the shared bytes are told to within a block, which is never longer than
        :data:`_SIZE` among the first :data:`MARKS`, and never too many.
        """
        blocks, ends = _blocks(parts)
        marks = _marks(blocks)
        goes_on = _Ends(blocks)
        shared, likest, others = 0, None, []
        for trail in self._kept:
            count = _alike(trail.marks, marks)
            whole = count * _MARK == len(trail.marks) or goes_on(trail, count)
            chars = trail.chars if whole else ends[count - 1] if count else 0
            if chars and chars >= shared:
                shared, likest = chars, trail.id
            if not whole:  # else whatever is like it is as like to this one
                others.append(trail)
        parted_in = _label_at(parts, shared) if self._kept else None
        self._kept = others[-(KEPT - 1) :]
        if blocks:
            self._kept.append(_Trail(id, marks, len(blocks[-1]), ends[-1]))
        return Parting(ends[-1] if ends else 0, shared, likest, parted_in)


def _blocks(parts: Sequence[Part]) -> tuple[list[bytes], list[int]]:
    """The blocks of a prompt, whose it is at the beginning of each piece, and where each block ends in the prompt's text."""
    blocks, ends = [], []
    done = 0
    for label, text in parts:
        head, start = _END + _whose(label).encode() + _END, 0
        while start < len(text) or head:
            size = next((size for upto, size in _SIZES if done < upto), _SIZE)
            block = text[start : start + size]
            start += size
            done += len(block)
            blocks.append(head + block)
            ends.append(done)
            head = b""
    if len(blocks) > MARKS:
        blocks[MARKS - 1 :] = [b"".join(blocks[MARKS - 1 :])]
        ends[MARKS - 1 :] = ends[-1:]
    return blocks, ends


def _whose(label: str) -> str:
    """A label without what only its API makes of it: a prompt is the same whichever of them it came by."""
    return "user" if label == "input" else label.rpartition("(")[2].rstrip(")")


def _marks(blocks: Sequence[bytes]) -> bytes:
    found, marks = _KEYED.copy(), bytearray()
    for block in blocks:
        found.update(block)
        marks += found.digest()
    return bytes(marks)


def _alike(some: bytes, others: bytes) -> int:
    """How many marks are the same at the beginning: from the first that differs on, all do."""
    if some[:_MARK] != others[:_MARK]:
        return 0
    count = min(len(some), len(others)) // _MARK
    return bisect_left(
        range(count), True, key=lambda at: some[at * _MARK : (at + 1) * _MARK] != others[at * _MARK : (at + 1) * _MARK]
    )


class _Ends:
    """Whether an earlier prompt ends within the first block of this one that differs, and is the same up to its end."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        self._blocks = blocks
        self._before: dict[int, blake2b] = {}
        """The hash of so many blocks."""

    def __call__(self, trail: _Trail, count: int) -> bool:
        if (count + 1) * _MARK != len(trail.marks) or count >= len(self._blocks) or trail.last >= len(self._blocks[count]):
            return False
        if count not in self._before:
            self._before[count] = found = _KEYED.copy()
            found.update(b"".join(self._blocks[:count]))
        end = self._before[count].copy()
        end.update(self._blocks[count][: trail.last])
        return end.digest() == trail.marks[-_MARK:]


def _label_at(parts: Sequence[Part], at: int) -> str | None:
    """The piece that has this byte of the prompt."""
    ends = accumulate(len(text) for _, text in parts)
    return next((label for (label, _), end in zip(parts, ends, strict=True) if end > at), None)
