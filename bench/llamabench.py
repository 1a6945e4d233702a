"""llama-bench's rows as a result: what ``llama-bench -o jsonl`` (or ``json``) says of a model without a server around it. Pure.

A row is a test with its repetitions (tools/llama-bench/llama-bench.cpp, ``struct test``, b11312). Rows with the same settings are one
subject, a test is a level with llama-bench's own name for it. Its clock runs over decoding alone: no tokenizer, sampling, template or
HTTP, so its tokens a second are compared with llama-bench's only. The rows' fields are made at run time and differ from build to build:
they are read by name, and those that nobody knows here are settings like the rest.
"""

from __future__ import annotations

import calendar
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from bench import figures
from bench.ask import Level
from bench.result import Machine, Manifest, Point, Repetition, Result, Subject
from bench.workload import Span, Workload
from supervisor.errors import Error, Exit

KIND: Final = "llama-bench"
PREFILL: Final = "computed_prefill_throughput_per_user"
DECODE: Final = "output_token_throughput_per_user"
BOTH: Final = "total_token_throughput"
TAGS: Final = (PREFILL, DECODE, BOTH)
"""What is known of a test: one of them."""

_TEST: Final = (
    "n_prompt",
    "n_gen",
    "n_depth",
    "test_time",
    "avg_ns",
    "stddev_ns",
    "avg_ts",
    "stddev_ts",
    "samples_ns",
    "samples_ts",
)
"""Fields that are of a test; the others are settings, or one of these:"""
_OTHERS: Final = ("build_commit", "build_number", "cpu_info", "gpu_info", "backends")
_MODEL: Final = ("model_filename", "model_type", "model_size", "model_n_params")
_HINT: Final = "llama-bench -m MODEL.gguf -o jsonl > FILE"

Row = Mapping[str, Any]


def told_in(text: str) -> bool:
    """Whether a file holds llama-bench's rows, or the beginning of them."""
    head = text.lstrip()
    return head.startswith("[") or ('"build_commit"' in head.partition("\n")[0] and not head.startswith("{\n"))


def read(text: str, path: str) -> Result:
    """Its rows as a result; ``path`` is for messages. Raises :class:`Error` (exit code 2) for what holds none or a broken one."""
    rows = _rows(text, path)
    subjects = _subjects(rows)
    began_s = min(_seconds(row) for row in rows)
    try:
        points = tuple(_points(subjects, rows, began_s))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
        raise Error(f"{path} has a row of llama-bench's that lacks something: {exc!r}", exit=Exit.USAGE, hint=_HINT) from exc
    return Result(
        manifest=Manifest(
            created_at=began_s,
            llmctl="",
            workload=_workload(rows),
            seed=0,
            salt="",
            subjects=tuple(subjects.values()),
            machine=_machine(rows[0]),
        ),
        points=points,
    )


def _rows(text: str, path: str) -> list[Row]:
    if text.strip() == "[":
        what = f"{path} ends after its first bracket: llama-bench failed, and its JSON says no more"
        raise Error(what, exit=Exit.USAGE, hint=f"{_HINT}, and read what it says on stderr")
    rows: list[object] = []
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            for line in text.splitlines():
                rows += [json.loads(line)] if line.strip() else []
    except (ValueError, RecursionError) as exc:
        raise Error(f"{path} has rows of llama-bench's that end too soon: {exc}", exit=Exit.USAGE, hint=_HINT) from exc
    found: list[Row] = [row for row in rows if isinstance(row, dict)]
    if not found or len(found) < len(rows):
        raise Error(f"{path} has no rows of llama-bench's", exit=Exit.USAGE, hint=_HINT)
    return found


def _settings(row: Row) -> tuple[str, ...]:
    """``n_batch=2048``, in the row's order."""
    return tuple(f"{name}={_word(value)}" for name, value in row.items() if name not in {*_TEST, *_OTHERS, *_MODEL})


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _key(row: Row) -> tuple[str, ...]:
    return (*(str(row.get(name, "")) for name in (*_OTHERS, *_MODEL)), *_settings(row))


def _subjects(rows: Sequence[Row]) -> dict[tuple[str, ...], Subject]:
    """By what makes two rows' settings the same; each is named by the model's file, and by what it has of its own."""
    first = {_key(row): row for row in reversed(rows)}
    first = {key: first[key] for key in dict.fromkeys(map(_key, rows))}
    common = set.intersection(*(set(_settings(row)) for row in first.values()))
    found = {}
    names = dict[str, int]()
    for key, row in first.items():
        own = [word for word in _settings(row) if word not in common]
        file = PurePath(str(row.get("model_filename", ""))).name
        name = " ".join([file or "model", *own])
        names[name] = names.get(name, 0) + 1
        number, commit = row.get("build_number"), row.get("build_commit", "")
        found[key] = Subject(
            name=name if names[name] == 1 else f"{name} ({names[name]})",
            kind=KIND,
            model=str(row.get("model_type", "")),
            version=str(row.get("backends", "")),
            file=file,
            engine=f"b{number} ({commit})" if number else str(commit),
            argv=_settings(row),
        )
    return found


def _machine(row: Row) -> Machine:
    """As far as a row tells: 0 and empty are not known."""
    cards = tuple(card.strip() for card in str(row.get("gpu_info", "")).split(",") if card.strip())
    return Machine(host="", cpu=str(row.get("cpu_info", "")), cores=0, memory_mib=0, kernel="", cards=cards)


def _workload(rows: Iterable[Row]) -> Workload:
    """All tests together; each of them is its level's name."""
    prompts, answers = ({int(row.get(name, 0)) for row in rows} - {0} or {1} for name in ("n_prompt", "n_gen"))
    return Workload(
        name=KIND,
        about="tests of llama-bench's, one a level",
        api="text",
        prompt=str(Span(min(prompts), max(prompts))),
        answer=str(Span(min(answers), max(answers))),
    )


def _points(subjects: Mapping[tuple[str, ...], Subject], rows: Iterable[Row], began_s: float) -> Iterable[Point]:
    """One a subject and test; what was measured twice has the repetitions of both."""
    cells = dict[tuple[str, str], list[Row]]()
    for row in rows:
        cells.setdefault((subjects[_key(row)].name, _test(row)), []).append(row)
    for (name, test), mine in cells.items():
        repetitions = list[Repetition]()
        for row in mine:
            repetitions += _repetitions(row, len(repetitions), _seconds(row) - began_s)
        tag = _tag(mine[0])
        spread = figures.Spread.over(figures.BY_TAG[tag].unit, [each.values[tag] for each in repetitions])
        if spread is None:
            raise ValueError(f"{test} has no samples_ns")
        yield Point(
            target=name,
            level=Level(users=1, name=test),
            counts=figures.Counts(ok=len(repetitions), error=0, left=0, short=0),
            metrics={tag: spread.as_dict()},
            repetitions=tuple(repetitions),
        )


def _test(row: Row) -> str:
    """``pp512 @ d8192``, as llama-bench's tables have it (llama-bench.cpp:2087)."""
    prompt, answer, depth = (int(row.get(name, 0)) for name in ("n_prompt", "n_gen", "n_depth"))
    parts = [f"pp{prompt}"] * bool(prompt) + [f"tg{answer}"] * bool(answer)
    return "+".join(parts) + (f" @ d{depth}" if depth else "")


def _tag(row: Row) -> str:
    if not row.get("n_gen"):
        return PREFILL
    return BOTH if row.get("n_prompt") else DECODE


def _repetitions(row: Row, first: int, began_s: float) -> Iterable[Repetition]:
    """When each began is as if nothing had been between them: warm-ups and the filling of a depth aren't in the rows."""
    tokens = int(row["n_prompt"]) + int(row["n_gen"])
    for number, lasted_ns in enumerate(row["samples_ns"], first):
        yield Repetition(
            number=number,
            began_s=round(began_s, 3),
            duration_s=round(lasted_ns / 1e9, 6),
            values={_tag(row): round(1e9 * tokens / lasted_ns, 6)},
        )
        began_s += lasted_ns / 1e9


def _seconds(row: Row) -> float:
    """``test_time``, ``2026-12-01T04:51:27Z``, in seconds since 1970; 0 where it isn't told."""
    parts = re.match(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)Z", str(row.get("test_time", "")))
    return float(calendar.timegm(tuple(map(int, parts.groups())))) if parts else 0.0
