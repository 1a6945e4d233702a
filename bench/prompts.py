"""Prompts of a length, as the server counts it, and requests of them.

Text is made of words that are one token each, so its length is their number; what a template sets before, behind and between turns is
measured once, by comparing the tokens of prompts that differ in one place. Where the server shows no tokens, two or three requests say
what a word and the rest come to on the mean, and lengths are approximate.

Every turn begins with a capital word, as a first word has no blank before it and may be another token than elsewhere: one of those that are
a token there, by the text's seed. So two prompts that have nothing in common mostly differ from their first word on.
"""

from __future__ import annotations

import functools
import itertools
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench import text
from bench.ask import Answer, Ask, Words
from bench.result import Kind
from bench.target import Target
from bench.workload import Api
from supervisor.errors import Error, Exit

FIRST: Final = "Text"
"""What the turns begin with by which a template is measured."""
PATHS: Final[Mapping[Api, str]] = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
CALIBRATING: Final = (64, 192)
"""Words of the requests that say what a word is, where no tokenizer does."""
REMEMBERED: Final = 256
"""Texts that are kept: a dialogue's next turn has those of the turns before it."""

Turn = Sequence[str]
"""A dialogue's texts: the user's, an answer, the user's."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What is in a prompt beside words, in tokens. The first word of a turn is counted in where the turn begins."""

    head: int
    """Before the first user's words."""
    tail: int
    """Behind the last user's words."""
    before: int
    """From a user's last word to the answer that follows."""
    after: int
    """From that to the next user's words."""
    per_word: float = 1.0
    is_exact: bool = True
    """Whether it was measured by tokens; else by what requests were counted as, and where that isn't told, not at all."""


class Writer:
    """Makes requests to one server, for one API."""

    def __init__(
        self,
        target: Target,
        api: Api,
        known: Sequence[str],
        frame: Frame,
        instructions: Mapping[str, int],
        openings: Sequence[str] = (FIRST,),
    ) -> None:
        """``instructions`` are those that may be asked for, with their tokens at a turn's end; ``openings`` begin a turn."""
        self.target = target
        self.api = api
        self.known = known
        self.frame = frame
        self.instructions = instructions
        self.openings = openings
        self._text = functools.lru_cache(maxsize=REMEMBERED)(self._made)

    @classmethod
    async def of(cls, target: Target, api: Api, say: Callable[[str], None], instructions: Sequence[str] = ()) -> Writer:
        """One for a server, which is asked some ten times what its tokens are. ``say`` is told what can't be as it should.

        ``instructions`` are those that requests are going to end with. Raises :class:`Error` where the server refuses to be asked.
        """
        if not target.kind.ignores_eos:
            say(f"{target.name} can't be made to ignore an answer's end: answers may be shorter than they are to be")
        known = await _known(target)
        whole = functools.partial(_whole, target, api)
        frame = await _frame(whole, known, api) if known else None
        if frame is None:
            say(f"{target.name} shows no tokens: the lengths of prompts are approximate")
            frame = await _calibrated(target, api)
            counted = {each: round(len(each.split()) * frame.per_word) for each in instructions}
            return cls(target, api, text.WORDS, frame, counted)
        counted = {}
        for each in instructions:
            tokens = await whole([f"{FIRST} {known[0]}{_joined(each)}"])
            counted[each] = len(tokens or ()) - frame.head - 1 - frame.tail
        return cls(target, api, known, frame, counted, await _openings(target, known))

    def body(self, ask: Ask, answers: Mapping[int, Sequence[str]]) -> tuple[str, dict[str, Any]]:
        """Path and body of a request. ``answers`` are the texts of events of earlier ones, a token each for the most part.

        An answer that isn't there yet is as long as it is so far. Raises :class:`Error` (exit code 2) for a prompt that is shorter than
        its template, and KeyError for an instruction that :meth:`of` was not told.
        """
        if ask.body is not None:
            path, body = ask.path, dict(ask.body)
        else:
            path, body = PATHS[self.api], self._asked(ask, answers)
        body["model"] = ask.preset or self.target.model
        body["stream"] = ask.stream
        body.pop("stream_options", None)
        if ask.stream and path in PATHS.values():
            body["stream_options"] = {"include_usage": True}
        return path, body

    def _asked(self, ask: Ask, answers: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        turns = self.turns(ask, answers)
        body: dict[str, Any] = {"max_tokens": ask.answer, "temperature": 0, "seed": 0}
        if self.api == "chat":
            roles = itertools.cycle(("user", "assistant"))
            body["messages"] = [{"role": role, "content": said} for role, said in zip(roles, turns, strict=False)]
        else:
            body["prompt"] = "".join(turns)
        if self.target.kind.ignores_eos:
            body["ignore_eos"] = True
        if self.target.kind is Kind.VLLM:
            body["min_tokens"] = ask.answer
        return body

    def turns(self, ask: Ask, answers: Mapping[int, Sequence[str]]) -> list[str]:
        """A prompt's texts, the user's and answers in turn. Errors as in :meth:`body`."""
        frame, turns = self.frame, [""]
        at = frame.head
        for piece, following in itertools.pairwise((*ask.pieces, None)):
            if isinstance(piece, Answer):
                said = answers.get(piece.of, ())[: piece.tokens]
                turns += ["".join(said), ""]
                at += len(said) + frame.before + frame.after
            elif isinstance(piece, Words):
                room = piece.upto - at
                if not turns[-1] and (self.api == "chat" or len(turns) == 1):
                    turns[-1] = random.Random(f"opening {piece.seed}").choice(self.openings)
                if following is None:
                    turns[-1] += self._last(ask, piece.seed, room - frame.tail, len(turns) == 1)
                else:
                    count = self._count(room - frame.tail if isinstance(following, Answer) else room)
                    turns[-1] += self._text(piece.seed, count)
                    at += round(count * frame.per_word)
        return turns

    def _last(self, ask: Ask, seed: str, room: int, alone: bool) -> str:
        """The end of the last turn, with the instruction if there is room for both. ``alone``: there is no turn before it."""
        instruction = ask.instruction
        tokens = self.instructions[instruction] if instruction else 0
        if tokens > room:
            instruction, tokens = "", 0
        if room < 0 and alone and self.frame.is_exact:
            least = self.frame.head + self.frame.tail
            raise Error(
                f"{self.target.name} makes {least} tokens of an empty prompt, and one of {ask.prompt} is to be made",
                exit=Exit.USAGE,
                hint=f"--prompt {least + 16}",
            )
        return self._text(seed, self._count(room - tokens)) + _joined(instruction)

    def _count(self, room: float) -> int:
        return max(0, round(room / self.frame.per_word))

    def _made(self, seed: str, count: int) -> str:
        return "".join(f" {word}" for word in itertools.islice(text.words(seed, self.known), count))


def _joined(instruction: str) -> str:
    return f"\n\n{instruction}" if instruction else ""


def _messages(turns: Turn) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": said} for number, said in enumerate(turns)]


async def _whole(target: Target, api: Api, turns: Turn) -> list[int] | None:
    """The tokens of a whole prompt."""
    if api == "chat":
        return await target.encode_chat(_messages(turns))
    return await target.encode("".join(turns), special=True)


async def _known(target: Target) -> tuple[str, ...]:
    """The words that are a token each, wherever they stand in a row; none where the server shows no tokens."""
    first = await target.count(FIRST)
    if first is None:
        return ()

    async def of_a_token(words: Sequence[str]) -> tuple[str, ...]:
        count = await target.count(FIRST + "".join(f" {word}" for word in words))
        if count == first + len(words):
            return tuple(words)
        if len(words) == 1 or count is None:
            return ()
        half = len(words) // 2
        return await of_a_token(words[:half]) + await of_a_token(words[half:])

    return await of_a_token(text.WORDS)


async def _openings(target: Target, known: Sequence[str]) -> tuple[str, ...]:
    """The words that are a token each, too, where a line begins with them as a capital."""
    lines = [FIRST, *(word.capitalize() for word in known)]
    tokens, pair = await target.encode("\n".join(lines)), await target.encode(f"{FIRST}\n{FIRST}")
    if tokens is None or pair is None or len(pair) != 3:
        return (FIRST,)
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == pair[1]:
            found.append([])
        else:
            found[-1].append(token)
    if len(found) != len(lines):
        return (FIRST,)
    return tuple(line for line, part in zip(lines, found, strict=True) if len(part) == 1)


async def _frame(whole: Callable[[Turn], Awaitable[list[int] | None]], known: Sequence[str], api: Api) -> Frame | None:
    """Measured by prompts that differ in one turn; None where that doesn't come to what words come to."""
    one, two = known[0], known[-1]
    ones, twos = f"{FIRST} {one} {two}", f"{FIRST} {two} {one}"
    a, b = await whole([ones]), await whole([twos])
    if a is None or b is None:
        return None
    head, tail = _alike(a, b), _alike(a[::-1], b[::-1])
    if head + 2 + tail != len(a):
        return None
    if api == "text":
        return Frame(head, tail, 0, 0)
    there, back = f"{one} {two}", f"{two} {one}"
    a, b, c = await whole([ones, there, ones]), await whole([ones, back, ones]), await whole([ones, there, twos])
    if a is None or b is None or c is None:  # its template has no such dialogue
        return Frame(head, tail, tail, head)
    answer, words = _alike(a, b), _alike(a, c)
    answered = len(a) - answer - _alike(a[::-1], b[::-1])
    return Frame(head, tail, answer - head - 2, words - answer - answered)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


async def _calibrated(target: Target, api: Api) -> Frame:
    """By what requests of few and of many words are counted as; words are new each time, as some servers don't count what they remember."""
    counts = []
    for words in CALIBRATING:
        said = " ".join((FIRST, *itertools.islice(text.words(secrets.token_hex(8), text.WORDS), words)))
        body: dict[str, object] = {"messages": _messages([said])} if api == "chat" else {"prompt": said}
        counts.append(await target.used(PATHS[api], body))
    few, many = counts
    if few is None or many is None or few >= many:
        return Frame(0, 0, 0, 0, is_exact=False)
    per_word = (many - few) / (CALIBRATING[1] - CALIBRATING[0])
    rest = max(0, round(few - per_word * CALIBRATING[0]))
    return Frame(rest, 0, 0, rest if api == "chat" else 0, per_word, is_exact=False)
