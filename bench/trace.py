"""Real traffic's shape, as a file: when each request came, how long it and its answer were, and what it began with that had been there.

    {"schema": "llmctl-trace/1", "recorded_at": …, "window_s": …, "source": …, "texts": false, "presets": […], "left_out": {…}}
    {"at_s": 0.0, "preset": "tiny", "route": "/v1/chat/completions", "prompt_tokens": 212, "completion_tokens": 96, …}

A line a request, oldest first. No text is in it, unless it was asked for: then a line has its ``body``, too. A replay makes words up that
share what the recorded prompts shared: a request's prompt is the beginning of its parent's, then what the parent was answered, then words
of its own. So a cache finds as much in it as it found in the real one.

Mooncake's JSONL, which AIPerf and vLLM read, is read as well: there a prompt is a list of blocks of 512 tokens, and equal numbers are
equal text (the format of FAST25-release/traces in kvcache-ai/Mooncake).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from bench.ask import Answer, Ask, Piece, Words
from bench.result import contents
from bench.workload import Api, Span, Workload
from supervisor import routes, units
from supervisor.errors import Error, Exit

SCHEMA: Final = "llmctl-trace/1"
BLOCK: Final = 512
"""Tokens of one of Mooncake's blocks."""
LONGER: Final = 2
"""An answer that its client didn't wait for would have been so many times as long, for all that is known: it has to be there to be left."""
SHORTEST: Final = 16
"""Tokens of such an answer, at least."""
CHAT: Final = "/v1/chat/completions"
_WITH_TEMPLATE: Final = (routes.Api.CHAT, routes.Api.ANTHROPIC, routes.Api.RESPONSES)
_HINT: Final = "llmctl bench record --out trace.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One request that there was. It is known by its number: the first line after the header is 0."""

    at_s: float
    """From the window's beginning."""
    preset: str = ""
    route: str = CHAT
    stream: bool = True
    batch: bool = False
    client: int = 0
    """A number for each key or place that requests came from; never more of it."""
    prompt_tokens: int
    cached_tokens: int | None = None
    """Of those, what its server had in its cache."""
    completion_tokens: int
    parent: int | None = None
    """An earlier request that its prompt begins like."""
    shared_tokens: int = 0
    """So far it is the same as the parent's prompt."""
    answer_tokens: int = 0
    """So much of the parent's answer follows in it."""
    leaves_s: float | None = None
    """Its client left so long after asking."""
    status: str = "ok"
    """How it ended, in the ledger's word."""
    hash_ids: tuple[int, ...] = ()
    """Mooncake's blocks, instead of a parent."""
    body: dict[str, Any] | None = field(default=None, hash=False)
    """As it came, where texts were asked for."""

    @property
    def asked_tokens(self) -> int:
        """How long an answer is to be asked for."""
        if self.leaves_s is not None:
            return max(SHORTEST, LONGER * self.completion_tokens)
        return max(1, self.completion_tokens)

    @property
    def api(self) -> Api:
        """With a template or without."""
        found = routes.ROUTES.get(self.route)
        return "chat" if found is None or found.api in _WITH_TEMPLATE else "text"

    def as_dict(self) -> dict[str, Any]:
        """A line; what is as it mostly is isn't said."""
        return {each.name: value for each in _FIELDS if (value := getattr(self, each.name)) != each.default}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Shape:
        """From :meth:`as_dict`. Raises ValueError with what is wrong with it."""
        if missing := [name for name in ("at_s", "prompt_tokens", "completion_tokens") if name not in told]:
            raise ValueError(f"{missing[0]} is missing")
        for name, least in _LEAST.items():
            value = told.get(name)
            kinds = (int, float) if name.endswith("_s") else (int,)
            if value is not None and (type(value) not in kinds or not least <= value < math.inf):
                raise ValueError(f"{name} is {value!r}, and should be a number from {least} on")
        for name, kind in _KINDS.items():
            if type(told.get(name, kind())) is not kind:
                raise ValueError(f"{name} is {told[name]!r}, and should be of the kind of {kind()!r}")
        known = {each.name: told[each.name] for each in _FIELDS if each.name in told}
        return cls(**{**known, "hash_ids": tuple(told.get("hash_ids", ()))})


_FIELDS: Final = dataclasses.fields(Shape)
_LEAST: Final[Mapping[str, int]] = MappingProxyType(
    {
        "at_s": 0,
        "client": 0,
        "prompt_tokens": 1,
        "cached_tokens": 0,
        "completion_tokens": 0,
        "parent": 0,
        "shared_tokens": 0,
        "answer_tokens": 0,
        "leaves_s": 0,
    }
)
"""What each number is at least."""
_KINDS: Final[Mapping[str, type]] = MappingProxyType(
    {"preset": str, "route": str, "status": str, "stream": bool, "batch": bool, "body": dict}
)
"""And of what kind the rest is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A window of traffic."""

    requests: tuple[Shape, ...]
    window_s: float
    recorded_at: float = 0.0
    """Seconds since 1970; 0 is not known."""
    source: str = ""
    """Where it comes from: llmctl's version, or mooncake."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Requests of the window that aren't in it, by why."""

    @property
    def texts(self) -> bool:
        """Whether somebody's words are in it."""
        return any(each.body is not None for each in self.requests)

    @property
    def presets(self) -> tuple[str, ...]:
        """Whom it was for."""
        return tuple(sorted({each.preset for each in self.requests} - {""}))

    @property
    def digest(self) -> str:
        """Of its requests: two replays of equal digests ask the same."""
        return hashlib.sha256("".join(map(_line, self.requests)).encode()).hexdigest()[:16]

    @property
    def cached_tokens(self) -> int:
        """In all, of those where it is known."""
        return sum(each.cached_tokens or 0 for each in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """In all."""
        return sum(each.prompt_tokens for each in self.requests)

    def all_for(self, preset: str) -> Trace:
        """The same, asked of one preset; empty is whoever is asked."""
        return dataclasses.replace(self, requests=tuple(dataclasses.replace(each, preset=preset) for each in self.requests))

    def workload(self, name: str, repetitions: int) -> Workload:
        """Its lengths, as a result tells them."""
        prompts, answers = ([each.prompt_tokens for each in self.requests], [each.asked_tokens for each in self.requests])
        spans = (str(Span(min(each), max(each))) for each in (prompts, answers))
        return Workload(name=name, about="a replay", prompt=next(spans), answer=next(spans), repetitions=repetitions)

    def asks(self, speed: float = 1.0, salt: str = "") -> tuple[Ask, ...]:
        """What a replay asks from the first request on, ``speed`` times as fast as it was.

        Clients wait as long as they did: an answer takes what it takes. With another ``salt`` the words are others: a server may have those
        of an earlier replay in its cache.
        """
        seed = f"{salt} {self.digest}"
        made: list[tuple[Piece, ...]] = []
        asks = []
        for number, shape in enumerate(self.requests):
            pieces = () if shape.body is not None else self._pieces(shape, seed, number, made)
            made.append(pieces)
            asks.append(
                Ask(
                    number=number,
                    prompt=shape.prompt_tokens,
                    answer=shape.asked_tokens,
                    pieces=pieces,
                    api=shape.api,
                    at_s=(shape.at_s - self.requests[0].at_s) / speed,
                    leaves_s=shape.leaves_s,
                    preset=shape.preset,
                    stream=shape.stream,
                    body=shape.body,
                    path=shape.route if shape.body is not None else "",
                )
            )
        return tuple(asks)

    @staticmethod
    def _pieces(shape: Shape, seed: str, number: int, made: Sequence[tuple[Piece, ...]]) -> tuple[Piece, ...]:
        if shape.hash_ids:
            ends = [min(count * BLOCK, shape.prompt_tokens) for count in range(1, len(shape.hash_ids))]
            return tuple(
                Words(f"{seed} block {block}", end)
                for block, end in zip(shape.hash_ids, [*ends, shape.prompt_tokens], strict=True)
            )
        found: list[Piece] = []
        at = 0
        if shape.parent is not None:
            found, at = cut(made[shape.parent], shape.shared_tokens)
            if shape.answer_tokens:
                found.append(Answer(shape.parent, shape.answer_tokens))
                at += shape.answer_tokens
        if at < shape.prompt_tokens or not (found and isinstance(found[-1], Words)):
            found.append(Words(f"{seed} {number}", shape.prompt_tokens))
        return tuple(found)

    def told(self) -> str:
        """``212 requests in 58 min 3 s: 40,112 prompt tokens, 61% of them cached``."""
        share = f", {self.cached_tokens / self.prompt_tokens:.0%} of them cached" if self.prompt_tokens else ""
        return f"{len(self.requests):,} requests in {units.duration(self.window_s)}: {self.prompt_tokens:,} prompt tokens{share}"

    def told_left_out(self) -> str:
        """``12 of 340 left out: 10 of /v1/embeddings, 2 refused``; empty where none was."""
        count = sum(self.left_out.values())
        why = ", ".join(f"{number} {what}" for what, number in sorted(self.left_out.items(), key=lambda item: -item[1]))
        return f"{count} of {count + len(self.requests)} left out: {why}" if count else ""


def cut(pieces: Sequence[Piece], upto: int) -> tuple[list[Piece], int]:
    """A prompt's pieces up to a position, in tokens, and that position, or where they end if that is sooner."""
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        if at >= upto:
            break
        if isinstance(piece, Words):
            at = min(piece.upto, upto)
            found.append(Words(piece.seed, at))
        else:
            tokens = min(piece.tokens, upto - at)
            at += tokens
            found.append(Answer(piece.of, tokens))
    return found, at


def write(trace: Trace, path: Path) -> None:
    """Write it, whole or not at all; with texts only its owner may read it. Raises :class:`Error` (exit code 2) where it can't be."""
    header = {
        "schema": SCHEMA,
        "recorded_at": trace.recorded_at,
        "window_s": trace.window_s,
        "source": trace.source,
        "texts": trace.texts,
        "presets": list(trace.presets),
        "left_out": dict(trace.left_out),
    }
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        opened = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if trace.texts else 0o666)
        with open(opened, "w") as file:
            file.write(json.dumps(header, separators=(",", ":")) + "\n")
            file.writelines(map(_line, trace.requests))
        fresh.replace(path)
    except OSError as exc:
        raise Error(f"{path} can't be written: {exc.strerror or exc}", exit=Exit.USAGE, hint="--out FILE, elsewhere") from exc
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def _line(shape: Shape) -> str:
    return json.dumps(shape.as_dict(), separators=(",", ":")) + "\n"


def read(path: Path) -> Trace:
    """A trace, or one of Mooncake's. Raises :class:`Error` (exit code 2) with file and line."""
    lines = contents(path, _HINT).split("\n")  # U+2028 ends no line of JSON
    told = list(_objects(path, lines))
    if not told:
        raise Error(f"{path} is empty, and no trace", exit=Exit.USAGE, hint=_HINT)
    _, head = told[0]
    if head.get("schema") == SCHEMA:
        return _checked(path, _ours(path, head, told[1:]), [number for number, _ in told[1:]])
    if "schema" not in head and "input_length" in head:
        return _checked(path, _mooncake(path, told), [number for number, _ in told])
    what = f"{path} has the schema {head.get('schema')!r}, this llmctl reads {SCHEMA}, and Mooncake's lines"
    raise Error(what, exit=Exit.USAGE, hint=_HINT)


def _objects(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines that aren't empty, with their numbers."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise _bad(path, number, f"is no JSON: {exc}") from exc
        if not isinstance(found, dict):
            raise _bad(path, number, "is no JSON object")
        yield number, found


def _ours(path: Path, head: Mapping[str, Any], told: Sequence[tuple[int, Mapping[str, Any]]]) -> Trace:
    shapes = []
    for number, line in told:
        try:
            shapes.append(Shape.of(line))
        except (ValueError, TypeError) as exc:
            raise _bad(path, number, f"is no request: {exc}") from exc
    try:
        return Trace(
            requests=tuple(shapes),
            window_s=float(head["window_s"]),
            recorded_at=float(head["recorded_at"]),
            source=str(head["source"]),
            left_out={str(why): int(count) for why, count in head.get("left_out", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise _bad(path, 1, f"is no header: {exc!r}") from exc


def _mooncake(path: Path, told: Sequence[tuple[int, Mapping[str, Any]]]) -> Trace:
    shapes = []
    for number, line in told:
        try:
            blocks = tuple(int(block) for block in line.get("hash_ids", ()))
            length = int(line["input_length"])
            if blocks and len(blocks) != -(-length // BLOCK):
                raise ValueError(f"{length} tokens are {-(-length // BLOCK)} blocks of {BLOCK}, and it has {len(blocks)}")
            answer = int(line["output_length"])
            found = {"at_s": line["timestamp"] / 1e3, "prompt_tokens": length, "completion_tokens": answer, "hash_ids": blocks}
            shapes.append(Shape.of(found))
        except (KeyError, TypeError, ValueError) as exc:
            raise _bad(path, number, f"is no request of Mooncake's: {exc}") from exc
    first_s = min(each.at_s for each in shapes)
    shapes = [dataclasses.replace(each, at_s=round(each.at_s - first_s, 6)) for each in shapes]
    return Trace(requests=tuple(shapes), window_s=max(each.at_s for each in shapes), source="mooncake")


def _checked(path: Path, trace: Trace, lines: Sequence[int]) -> Trace:
    """The same, if its requests, which stand in these lines, go together."""
    before_s = 0.0
    for number, (shape, line) in enumerate(zip(trace.requests, lines, strict=True)):
        if shape.at_s < before_s:
            raise _bad(path, line, f"came after {shape.at_s} s, the one before it after {before_s} s")
        before_s = shape.at_s
        if shape.shared_tokens + shape.answer_tokens > shape.prompt_tokens:
            parts = f"{shape.shared_tokens} shared tokens and {shape.answer_tokens} of an answer"
            raise _bad(path, line, f"has {parts} in a prompt of {shape.prompt_tokens}")
        if shape.parent is None:
            continue
        if shape.parent >= number:
            raise _bad(path, line, f"is request {number}, and its parent {shape.parent} is none before it")
        if shape.shared_tokens > (most := trace.requests[shape.parent].prompt_tokens):
            raise _bad(path, line, f"shares {shape.shared_tokens} tokens with a prompt that has {most}")
    return trace


def _bad(path: Path, line: int, what: str) -> Error:
    return Error(f"{path}:{line} {what}", exit=Exit.USAGE, hint=_HINT)
