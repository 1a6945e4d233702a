"""AIPerf (NVIDIA's load generator) as a process, with an environment of its own, and the file that it leaves.

It is given whole payloads, and told to take the server's count of tokens. It loads a tokenizer all the same, and never asks it anything;
so it gets one that knows no word, as Hugging Face's aren't to be had without a network.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import figures
from supervisor import render

PINNED: Final = "aiperf==0.13.0"
RUN_S: Final = 600.0
"""One run; most of a short one is its start."""
TOKENIZER: Final[Mapping[str, Mapping[str, object]]] = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"},
}
"""Hugging Face's files of the least tokenizer that loads."""


def installed(folder: Path) -> Path:
    """AIPerf in a new environment; its command. It brings about a hundred packages."""
    render.say(f"installing {PINNED} into an environment of its own …")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", PINNED], check=True)
    return folder / "bin" / "aiperf"


@dataclass(frozen=True, slots=True)
class Export:
    """What a run left: ``profile_export_aiperf.json``, and a line of JSON a request."""

    told: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    """Metrics of each request that was measured, by tag."""
    cpu_s: float
    """Of all its processes, from its start to its end."""

    def value(self, tag: str, statistic: str = "avg") -> float:
        """One of a metric's statistics; of a whole run's metrics there is but ``avg``."""
        return float(self.told[tag][statistic])

    def unlike(self) -> tuple[str, ...]:
        """Where a metric object isn't what ``bench.figures`` makes of the same records: in its fields, its statistics, its unit."""
        return tuple(line for figure in figures.FIGURES if figure.tag in self.told for line in self._unlike(figure))

    def _unlike(self, figure: figures.Figure) -> Iterator[str]:
        tag, theirs = figure.tag, self.told[figure.tag]
        if theirs["unit"] != figure.unit:
            yield f"{tag} is in {theirs['unit']} there, and in {figure.unit} here"
        if figure.of is None:
            return
        values = [record[tag]["value"] for record in self.records if tag in record]
        flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
        spread = figures.Spread.over(theirs["unit"], flat)
        ours = spread.as_dict() if spread else {}
        if fields := set(ours) ^ set(theirs):
            yield f"{tag} differs in its fields {', '.join(sorted(fields))}"
        for name in sorted(ours.keys() & theirs.keys() - {"unit"}):
            if not math.isclose(ours[name], theirs[name], rel_tol=1e-4, abs_tol=1e-3):
                yield f"{tag}'s {name} is {theirs[name]} there, and {ours[name]} here"


def run(
    command: Path,
    folder: Path,
    url: str,
    model: str,
    users: int,
    warm_up: Sequence[Mapping[str, Any]],
    bodies: Sequence[Mapping[str, Any]],
) -> Export:
    """Ask with so many users at once, with as few processes as AIPerf has. Raises RuntimeError where it or a request failed."""
    folder.mkdir()
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name, content in TOKENIZER.items():
        (tokenizer / name).write_text(json.dumps(content))
    payloads = folder / "payloads.jsonl"
    payloads.write_text("".join(json.dumps(body) + "\n" for body in (*warm_up, *bodies)))
    out = folder / "out"
    options = {
        "model": model,
        "url": url,
        "endpoint-type": "chat",
        "custom-dataset-type": "raw-payload",
        "input-file": payloads,
        "dataset-sampling-strategy": "sequential",  # the warm-up takes the first, and what is measured goes on from there
        "tokenizer": tokenizer,
        "concurrency": users,
        "warmup-request-count": len(warm_up),
        "request-count": len(bodies),
        "workers-max": 1,
        "record-processors": 1,
        "ui": "none",
        "artifact-dir": out,
    }
    words = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    words += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    cpu_s = _children_s()
    _call([str(command), "profile", *words], folder)
    cpu_s = _children_s() - cpu_s
    told = json.loads((out / "profile_export_aiperf.json").read_bytes())
    if told["error_summary"] or told["request_count"]["avg"] != len(bodies):
        raise RuntimeError(f"AIPerf had {told['request_count']['avg']} of {len(bodies)} answers: {told['error_summary']}")
    lines = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    return Export(told, [line["metrics"] for line in lines if line["metadata"]["benchmark_phase"] == "profiling"], cpu_s)


def _call(words: Sequence[str], folder: Path) -> None:
    """In a session of its own, of which nothing is left. RuntimeError with the log's end where it fails."""
    log = folder / "log"
    env = os.environ | {"HOME": str(folder)}  # where it would keep a cache
    with log.open("wb") as out:
        running = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        code = running.wait(RUN_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    if code:
        raise RuntimeError(f"AIPerf ended with {code}; its log ends:\n{log.read_text()[-2000:]}")


def _children_s() -> float:
    """CPU time of processes that this one started and that have ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
