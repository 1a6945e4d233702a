"""The memory estimate against the engine: ``python -m bench.proof.memory``, or with ``--drawn 20 --seed 7`` cases nobody chose.

Each case is one start of llama-server on a phantom (a true header over a sparse, empty body, see ``supervisor.phantom``), with the flags
that llmctl gives it and one short request (``supervisor.trial``). Its log says what it allocated; ``/proc`` says how much of its memory is
no file's. Both stand beside the estimate. Starts are one after the other, and one that the machine has no room for is left out and named.

``--save FILE`` keeps what was measured, for ``tests/test_estimate.py``. ``--recorded`` compares what was kept, and starts nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor import architecture, engine, estimate, gguf, hardware, paths, phantom, render, trial
from supervisor import memory as host
from supervisor.allocation import Allocation
from supervisor.estimate import Estimate, Settings
from supervisor.gguf import Header
from supervisor.option import Speculation
from supervisor.units import KIB, MIB

RECORDED: Final = Path(__file__).parents[2] / "tests" / "data" / "allocations"
HEADERS: Final = RECORDED / "headers"
TERMS: Final = ("weights", "kv", "state", "compute", "draft", "repacked", "output")
"""What the engine's log names of a plan without a card."""
EXACT: Final = ("weights", "kv", "state")
SPARE_BYTES: Final = 2048 * MIB
"""Left to others on this machine."""
SIZES: Final = ("0.8b", "2b", "4b", "9b")


@dataclass(frozen=True, slots=True)
class Case:
    """One start."""

    model: str
    """A header's name in :data:`HEADERS`."""
    settings: Settings

    @property
    def name(self) -> str:
        """``qwen3.5-4b-mtp 32k q8_0 np 4 unified ub 1024 mtp 2``."""
        s = self.settings
        kv = s.cache_type_k if s.cache_type_k == s.cache_type_v else f"{s.cache_type_k}/{s.cache_type_v}"
        context = str(s.context) if s.context % KIB else f"{s.context // KIB}k"
        words = [self.model, context, kv, f"np {s.slots}" + (" unified" if s.unified else ""), f"ub {s.ubatch}"]
        words += [] if s.speculative == "off" else [s.speculative + (f" {s.draft_length}" if s.draft_length else "")]
        return " ".join(words + ([] if s.flash_attention else ["fa off"]))


@dataclass(frozen=True, slots=True)
class Row:
    """A case and what the engine took, in MiB a term."""

    case: Case
    mib: Mapping[str, float]
    anonymous_mib: float
    """``RssAnon`` of the server after its first answer."""


@dataclass(frozen=True, slots=True)
class Error:
    """Predicted over measured, in MiB and, of the measured, in percent."""

    predicted_mib: float
    measured_mib: float

    @property
    def mib(self) -> float:
        """Positive where too much was predicted."""
        return self.predicted_mib - self.measured_mib

    @property
    def percent(self) -> float:
        """Of the measured; 0 where there was none."""
        return 100 * self.mib / self.measured_mib if self.measured_mib else 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of recorded rows."""

    engine: str
    drawn: str
    """Seed and moment of a drawn set; empty for the chosen one."""
    cpu_flags: frozenset[str] = field(default_factory=frozenset)
    rows: tuple[Row, ...] = ()


def chosen() -> Iterator[Case]:
    """The fixed list: every model, and each thing that decides about memory varied alone and with what it interacts with."""
    for size in SIZES:
        yield _case(f"qwen3.5-{size}", 8192)
        yield _case(f"qwen3.5-{size}-mtp", 16384, speculative="mtp", draft_length=2)
        yield _case(f"qwen3.5-{size}", 32768, slots=4, unified=True)
        yield _case(f"qwen3.5-{size}", 32768, kv="q8_0")
    for context in (32768, 65536, 131072):
        yield _case("qwen3.5-4b", context)
        yield _case("qwen3.5-4b-mtp", context, speculative="mtp", draft_length=2)
    for kv in ("q8_0", "q4_0"):
        yield _case("qwen3.5-4b", 131072, kv=kv)
        yield _case("qwen3.5-0.8b-mtp", 131072, kv=kv, speculative="mtp", draft_length=1)
    for ubatch in (256, 1024):
        yield _case("qwen3.5-4b", 65536, ubatch=ubatch)
        yield _case("qwen3.5-2b-mtp", 65536, ubatch=ubatch, speculative="mtp", draft_length=3)
        yield _case("qwen3.5-9b", 16384, ubatch=ubatch)
    for slots, unified in ((2, False), (2, True), (4, False)):
        yield _case("qwen3.5-4b", 65536, slots=slots, unified=unified)
        yield _case("qwen3.5-2b-mtp", 65536, slots=slots, unified=unified, speculative="mtp", draft_length=3)
    yield _case("qwen3.5-4b-mtp", 32768)  # the head is there and not used
    yield _case("qwen3.5-4b", 32768, speculative="ngram")
    yield _case("qwen3.5-4b", 8192, flash_attention=False)
    yield _case("qwen3.5-0.8b", 20000, slots=3)
    for model in ("made-llama", "made-qwen2", "made-qwen3", "made-smollm3"):  # invented shapes, to see each family's graph
        yield _case(model, 16384)
        yield _case(model, 16384, slots=2, unified=True, kv="q8_0", ubatch=256)
        yield _case(model, 4096, flash_attention=False, speculative="ngram")
    for model in ("smollm2-135m", "gemma3-270m"):
        yield _case(model, 8192)
        yield _case(model, 8192, slots=4)
        yield _case(model, 8192, slots=4, unified=True, kv="q8_0")
        yield _case(model, 32768, ubatch=1024)
        yield _case(model, 8192, flash_attention=False)


def drawn(count: int, seed: int) -> Iterator[Case]:
    """``count`` cases by chance, the same for the same seed."""
    draw = random.Random(seed)
    models = [*(f"qwen3.5-{size}{head}" for size in SIZES for head in ("", "-mtp")), "smollm2-135m", "gemma3-270m"]
    for _ in range(count):
        model = draw.choice(models)
        context = draw.randrange(8 * KIB, 128 * KIB + 1, 512)
        ways: list[Speculation] = ["off", "off", "ngram"]
        ways += ["mtp", "mtp", "mtp"] if model.endswith("-mtp") else []
        speculative = draw.choice(ways)
        yield _case(
            model,
            context,
            kv=draw.choice(["f16", "q8_0", "q4_0"]),
            slots=draw.choice([1, 2, 4]),
            unified=draw.random() < 0.5,
            ubatch=draw.randrange(256, 1025, 64),
            speculative=speculative,
            draft_length=draw.randint(1, 4) if speculative == "mtp" else 0,
        )


def _case(
    model: str,
    context: int,
    *,
    kv: str = "f16",
    slots: int = 1,
    unified: bool = False,
    ubatch: int = 512,
    flash_attention: bool = True,
    speculative: Speculation = "off",
    draft_length: int = 0,
) -> Case:
    settings = Settings(
        context=context,
        slots=slots,
        unified=unified,
        ubatch=ubatch,
        cache_type_k=kv,
        cache_type_v=kv,
        flash_attention=flash_attention,
        speculative=speculative,
        draft_length=draft_length,
    )
    return Case(model, settings)


def header(model: str) -> Header:
    """The condensed header of a case's model."""
    return gguf.expand(json.loads((HEADERS / f"{model}.json").read_text()))


def predict(case: Case, cpu_flags: frozenset[str]) -> Estimate:
    """The estimate for a machine with these flags."""
    found = header(case.model)
    return estimate.make(architecture.read(found), found, dataclasses.replace(case.settings, cpu_flags=cpu_flags))


def predicted(found: Estimate) -> dict[str, float]:
    """The terms that the engine's log has too, in MiB; scratch is in its compute buffer."""
    terms = {**found.host, **found.device, "compute": found.device["compute"] + found.device["scratch"]}
    return {term: terms[term] / MIB for term in TERMS}


def measured(found: Allocation) -> dict[str, float]:
    """The same of an allocation without a card."""
    terms = {**found.device, **found.host}
    return {term: round(terms.get(term, 0) / MIB, 2) for term in TERMS}


def errors(row: Row, cpu_flags: frozenset[str]) -> dict[str, Error]:
    """By term, and ``total``."""
    wanted = predicted(predict(row.case, cpu_flags))
    found = {term: Error(wanted[term], row.mib[term]) for term in TERMS}
    return found | {"total": Error(sum(wanted.values()), sum(row.mib.values()))}


def run(server: Path, model: Path, case: Case) -> Row:
    """Start the case, read what it took, stop it. The server dies with this thread."""
    found = trial.run(server, model, case.settings, device="none", threads=hardware.physical_cores())
    return Row(case, measured(found.allocation), found.anonymous_bytes / MIB)


def measure(server: Path, models: Path | None, cases: Iterable[Case], cpu_flags: frozenset[str]) -> Iterator[Row]:
    """Start the cases that there is room for, one after the other. ``models`` may hold true files, ``NAME.gguf``."""
    with tempfile.TemporaryDirectory(prefix="llmctl-phantoms-") as scratch:
        for case in cases:
            model = models / f"{case.model}.gguf" if models else Path()
            if not model.is_file():
                model = Path(scratch, f"{case.model}.gguf")
                if not model.exists():
                    phantom.write(header(case.model), model)
            need = round(sum(predicted(predict(case, cpu_flags)).values()) * MIB)
            if need + SPARE_BYTES > host.read().available_bytes:
                print(f"left out, no room for {need // MIB} MiB: {case.name}", file=sys.stderr)
                continue
            yield run(server, model, case)


def save(path: Path, kept: Kept) -> None:
    """Write recorded rows, one a line."""
    rows = ",\n".join("  " + json.dumps(_plain(row)) for row in kept.rows)
    flags = json.dumps(sorted(kept.cpu_flags))
    start = f'"engine": {json.dumps(kept.engine)},\n "drawn": {json.dumps(kept.drawn)},\n "cpu_flags": {flags}'
    path.write_text(f'{{{start},\n "cases": [\n{rows}\n ]}}\n')


def load(path: Path) -> Kept:
    """Read them back."""
    data = json.loads(path.read_text())
    rows = tuple(Row(Case(row["model"], Settings(**row["settings"])), row["mib"], row["anonymous_mib"]) for row in data["cases"])
    return Kept(data["engine"], data["drawn"], frozenset(data["cpu_flags"]), rows)


def recorded() -> list[Kept]:
    """All that was ever kept."""
    return [load(path) for path in sorted(RECORDED.glob("*.json"))]


def _plain(row: Row) -> dict[str, Any]:
    default = Settings(context=0)
    settings = {
        field.name: value
        for field in dataclasses.fields(Settings)
        if (value := getattr(row.case.settings, field.name)) != getattr(default, field.name)
    }
    return {"model": row.case.model, "settings": settings, "mib": row.mib, "anonymous_mib": round(row.anonymous_mib, 1)}


def summary(kept: Iterable[Kept]) -> list[tuple[str, int, str, str, str]]:
    """A line a term: cases, most over, most under, and the two in percent."""
    found = [errors(row, each.cpu_flags) for each in kept for row in each.rows]
    lines = []
    for term in (*TERMS, "total"):
        of_term = [each[term] for each in found if each[term].measured_mib or each[term].predicted_mib]
        if not of_term:
            continue
        over, under = max(of_term, key=lambda e: e.percent), min(of_term, key=lambda e: e.percent)
        spread = f"{over.percent:+.2f} % to {under.percent:+.2f} %"
        lines.append((term, len(of_term), f"{max(e.mib for e in of_term):+.2f}", f"{min(e.mib for e in of_term):+.2f}", spread))
    return lines


def main() -> None:
    """Measure, or compare what was measured, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.proof.memory", description="The memory estimate against the engine.")
    parser.add_argument("--server", type=Path, help="this llama-server and not the picked engine")
    parser.add_argument("--models", type=Path, help="a folder of true files, NAME.gguf, where a phantom isn't wanted")
    parser.add_argument("--drawn", type=int, metavar="N", help="N cases by chance, not the fixed list")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--frozen", default="", metavar="TEXT", help="what the formulas were when the cases were drawn, kept with them"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--recorded", action="store_true", help="compare the recorded cases, start nothing")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    if told.recorded:
        kept = recorded()
    else:
        built = engine.external(told.server) if told.server else engine.locate(paths.home())
        flags = hardware.cpu_flags() & estimate.REPACK_FLAGS
        cases = [case for case in (drawn(told.drawn, told.seed) if told.drawn else chosen()) if told.only in case.name]
        rows = []
        for row in measure(built.server, told.models, cases, flags):
            rows.append(row)
            total = errors(row, flags)["total"]
            print(f"{len(rows):3} of {len(cases)}  {total.percent:+.2f} %  {row.case.name}", file=sys.stderr, flush=True)
        by = f"{told.drawn} cases drawn with seed {told.seed}; {told.frozen}".rstrip("; ") if told.drawn else ""
        kept = [Kept(f"b{built.build} ({built.commit[:9]})", by, flags, tuple(rows))]
        if told.save:
            save(told.save, kept[0])
    if told.json:
        named = [(row.case.name, errors(row, each.cpu_flags)) for each in kept for row in each.rows]
        print(
            json.dumps([{"case": name, "terms": {t: dataclasses.asdict(e) for t, e in found.items()}} for name, found in named])
        )
        return
    pairs = itertools.chain.from_iterable(((row, each.cpu_flags) for row in each.rows) for each in kept)
    table = []
    for row, flags in pairs:
        found = errors(row, flags)
        off = ", ".join(f"{term} {e.mib:+.2f}" for term, e in found.items() if term != "total" and abs(e.mib) >= 0.01)
        total = found["total"]
        table.append(
            (row.case.name, f"{total.predicted_mib:.0f}", f"{total.measured_mib:.0f}", f"{total.percent:+.2f} %", off or "-")
        )
    render.table(("case", "planned MiB", "allocated MiB", "error", "where, MiB"), table)
    render.table(("term", "cases", "most over, MiB", "most under, MiB", "in percent"), summary(kept))


if __name__ == "__main__":
    main()
