"""One sprint of ``measure.py``: it is run, watched, and put in the words of the result."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.nvml import Cards, Stretch
from supervisor import speed, step
from supervisor.engine import Engine
from supervisor.estimate import Estimate, Settings
from supervisor.speed import AtDepth, Depths, Sprint, Streams, Together

LOOK_S = 0.25
ACCEPTANCES = (0.5, 0.7, 0.9)
"""For which a result says what guessing comes to."""
CANNOT_TELL = (
    "acceptance: the models have no weights, so which guesses are right is drawn; break_even says what a real model has to reach",
    "power and clocks under real weights: multiplying zeros takes less power, so that a card at its power limit is slower with real ones",
    "what an answer's text decides: its length, stops, grammars, a cache's hits",
)
"""In the result, for those who read nothing else."""


class Watch:
    """What the cards show while a block runs; :attr:`seen` afterwards, empty without a card. Loading is in it."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self._cards = Cards()
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        self._cards.open()
        self._began = time.monotonic()
        self._stretch = self._cards.begin()
        self._thread = threading.Thread(target=self._look, args=(self._stretch,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        told = self._stretch.told(time.monotonic() - self._began)
        self.seen = {name: round(value, 2) for name, value in told}
        self._cards.close()

    def _look(self, stretch: Stretch) -> None:
        while not self._over.wait(LOOK_S):
            stretch.look(())


def bandwidth_bytes_s(index: int = 0) -> float | None:
    """Of a card's memory: bus width × highest memory clock × 2, as it moves data twice a clock. None where the driver doesn't say."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            card = pynvml.nvmlDeviceGetHandleByIndex(index)
            bits, mhz = pynvml.nvmlDeviceGetMemoryBusWidth(card), pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_MEM)
            return bits / 8 * mhz * 1e6 * 2 or None
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def run(
    sprint: Sprint,
    engine: Engine,
    model: Path,
    plan: Estimate,
    chosen: Settings,
    *,
    device: str,
    threads: int,
    bandwidth: float | None,
    into: list[dict[str, Any]],
) -> dict[str, Any]:
    """Run it; its entry, which is in ``into`` from its first row on, so that what cuts it off leaves what was seen."""
    entry: dict[str, Any] = {"speed": sprint.name} | _about(sprint) | {"rows": [], "cut": "", "seconds": 0.0, "cards": {}}
    began = time.monotonic()
    watch = Watch()
    found: Generator[AtDepth | Together, None, None]
    if isinstance(sprint, Depths):
        found = speed.at_depths(engine.tool("llama-bench"), model, sprint, device=device, threads=threads)
    else:
        found = speed.together(engine.server, model, sprint, chosen, device=device, threads=threads)
    try:
        with contextlib.closing(found), watch:
            for each in found:
                if not entry["rows"]:
                    into.append(entry)
                entry["rows"].append(_row(each, sprint, plan, chosen, bandwidth))
    except BaseException as exc:
        entry["cut"] = str(exc)
        raise
    finally:
        entry["seconds"] = round(time.monotonic() - began, 1)
        entry["cards"] = watch.seen
    return entry


def line(entry: Mapping[str, Any]) -> str:
    """What was seen, for a person."""
    words = []
    for row in entry["rows"]:
        place = f"at {row['depth']}" if "depth" in row else f"of {row['streams']}"
        share = f" ({row['share_of_bandwidth']:.0%} of the bandwidth)" if row.get("share_of_bandwidth") else ""
        words.append(f"{row.get('phase', 'decode')} {row['tps']:.1f} t/s {place}{share}")
    return f"{entry['speed']}: {', '.join(words)}"


def speculation(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What guessing costs, by model, slots, streams and guesses a round, beside the same without: what each acceptance comes to.

    ``cost`` is a round's time in plain steps; ``break_even`` the acceptance of each guess at which it is worth that (null: none is);
    ``tps_at`` tokens a second of a stream, reckoned from the time of a round for each of :data:`ACCEPTANCES`.
    """
    took: dict[tuple[str, int, int, int], list[float]] = {}
    for entry in entries:
        for row in entry["rows"]:
            if "streams" in row:
                key = (entry["model"], entry["slots"], row["streams"], entry["draft"])
                took.setdefault(key, []).append(row["step_ms"])
    found = []
    for (model, slots, streams, draft), rounds in sorted(took.items()):
        plain, round_ms = statistics.fmean(took.get((model, slots, streams, 0), [0.0])), statistics.fmean(rounds)
        if draft and plain > 0 and round_ms > 0:
            even = step.break_even(round_ms / plain, draft)
            rates = {str(each): round(step.tokens_a_round(each, draft) / round_ms * 1e3, 2) for each in ACCEPTANCES}
            told: dict[str, Any] = {
                "model": model,
                "slots": slots,
                "streams": streams,
                "draft": draft,
                "plain_ms": round(plain, 3),
            }
            told |= {"round_ms": round(round_ms, 3), "cost": round(round_ms / plain, 3), "plain_tps": round(1e3 / plain, 2)}
            found.append(told | {"break_even": None if even is None else round(even, 3), "tps_at": rates})
    return found


def summary(found: Iterable[Mapping[str, Any]]) -> str:
    """:func:`speculation` for a person; empty where there is none."""
    lines = []
    for each in found:
        even = "never pays" if each["break_even"] is None else f"pays from an acceptance of {each['break_even']:.2f} on"
        what = f"{each['model']} guessing {each['draft']}, {each['streams']} of {each['slots']} slots"
        lines.append(f"{what}: a round costs {each['cost']:.2f} steps, {even}")
    return "\n          ".join(lines)


def _about(sprint: Sprint) -> dict[str, Any]:
    told = {"model": sprint.case.model, "kv": sprint.case.kv, "ubatch": sprint.case.ubatch, "context": sprint.case.context}
    if isinstance(sprint, Streams):
        told |= {
            "slots": sprint.case.slots,
            "unified": sprint.case.unified,
            "draft": sprint.draft,
            "acceptance": sprint.acceptance,
        }
    return told


def _row(found: AtDepth | Together, sprint: Sprint, plan: Estimate, chosen: Settings, bandwidth: float | None) -> dict[str, Any]:
    if isinstance(found, AtDepth):
        told: dict[str, Any] = {"depth": found.depth, "phase": "prefill" if found.prefill else "decode", "tokens": found.tokens}
        told |= {"tps": round(found.tps, 2), "tps_stddev": round(found.tps_stddev, 2)}
        if found.prefill:
            return told
        return told | _roofline(step.read_bytes(plan, chosen, found.depth + (found.tokens - 1) / 2), found.tps, bandwidth)
    told = {"streams": found.streams, "tokens": found.tokens, "tps": round(found.decode_tps, 2)}
    told |= {"total_tps": round(found.total_tps, 2), "step_ms": round(found.step_s * 1e3, 3), "wall_s": round(found.wall_s, 3)}
    if found.draft_tokens:
        return told | {"draft_tokens": found.draft_tokens, "draft_accepted": found.draft_accepted}
    depth = speed.PROMPT_TOKENS + found.tokens / found.streams / 2
    return told | _roofline(step.read_bytes(plan, chosen, depth, found.streams), found.decode_tps, bandwidth)


def _roofline(read_bytes: float, tps: float, bandwidth: float | None) -> dict[str, Any]:
    """What a step reads, how many there could be a second at the bandwidth, and which part of it was reached."""
    told: dict[str, Any] = {"read_mib": round(read_bytes / (1 << 20), 1)}
    if bandwidth:
        told |= {"roofline_tps": round(bandwidth / read_bytes, 1), "share_of_bandwidth": round(tps * read_bytes / bandwidth, 3)}
    return told
