"""The bundle's script: build the engine for this box, run cases and sprints, print their memory and their speed as one JSON.

A case is planned against measured memory (``supervisor.trial``), a sprint is speed (``supervisor.speed``). They are run in turns, each kind
in its order of worth, so that a run that has to end early has seen the most useful ones of both.

Runs on the box, in its own Python, with the wheels of the bundle on ``sys.path``: unpacked and not installed, which needs no pip, no
venv module and no network. A hard deadline hangs over all of it. What it cuts off or forbids is listed under ``skipped``, and the result
file is written anew after each case, so that a run that is killed from outside has left what it saw. Sizes in the result are MiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import signal
import sys
import tarfile
import time
import traceback
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supervisor import hardware, paths, trial
    from supervisor.engine import Engine
    from supervisor.estimate import Estimate, Settings
    from supervisor.speed import Sprint

HERE = Path(__file__).resolve().parent
SPARE_S = 6.0
"""Of the limit, for stopping what runs and for writing the result."""
TARGETS = ("llama-server", "llama-bench")
"""Of the recipe's six, what cases and sprints need. The second is one file to compile and one to link more, of some 200."""


class LateError(BaseException):
    """The deadline, or a signal that asks for an end. No Exception, so that nothing on the way takes it for a failure of its own."""


class Voice:
    """What is said to a person, on stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.work = ""
        """What a long work said last: ``compiling 21/206``."""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        """A line; none for an empty text."""
        sys.stderr.write(f"[{self.seconds:5.0f} s] {text}\n" if text else "")
        sys.stderr.flush()

    def progress(self, what: str, done: int, total: int) -> None:
        """A line at each twentieth of a long work."""
        before, self.work = self.work, f"{what} {done}/{total}" if total else what
        step = 20 * done // total if total else 0
        if not before.startswith(what) or step > 20 * (done - 1) // (total or 1):
            self.say(self.work)


def main() -> int:
    """0: every case and sprint was measured. 1: some were not; the result says which and why. 2: nothing could be measured."""
    options = arguments()
    voice = Voice()
    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGTERM, late)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, options.minutes * 60 - SPARE_S))
    text = (HERE / "manifest.json").read_bytes()
    manifest = json.loads(text)
    if wrong := damage(manifest):
        print_error(wrong, "copy the bundle again")
        return 2
    os.environ["LLMCTL_HOME"] = str(options.home)
    site = options.home / f"site-{sys.version_info.major}.{sys.version_info.minor}-{hashlib.sha256(text).hexdigest()[:12]}"
    unpack_wheels(site)
    sys.path[:0] = [str(HERE), str(site)]
    return measure(options, manifest, voice)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="run.sh", description="Measure planned against real memory, and speed. Exit code 1: not all of it."
    )
    parser.add_argument("--variant", choices=("native", "cpu"), default="native", help="native: for the card, where there is one")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together [default: 8]")
    parser.add_argument("--out", type=Path, help="also write the result here, after each case")
    parser.add_argument(
        "--home", type=Path, default=HERE / "home", help="where everything is written [default: home/ in the bundle]"
    )
    parser.add_argument("--engine", type=Path, metavar="PATH", help="a llama-server that is there, instead of building one")
    parser.add_argument("--jobs", type=int, help="compilers at once [default: one a CPU]")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="cases and sprints whose name has all of these words ('4B np1')"
    )
    options = parser.parse_args()
    options.home = options.home.absolute()
    return options


def late(number: int, _: object) -> None:
    """A signal's handler."""
    raise LateError("the time was up" if number == signal.SIGALRM else f"it was ended by {signal.Signals(number).name}")


def damage(manifest: Mapping[str, Any]) -> str:
    """What is wrong with the bundle, on this box; empty if nothing is."""
    for name, digest in manifest["sha256"].items():
        path = HERE / name
        if not path.is_file():
            return f"the bundle lacks {name}"
        with path.open("rb") as file:
            if (found := hashlib.file_digest(file, "sha256").hexdigest()) != digest:
                return f"{name} has sha256 {found}, {digest} was packed"
    if platform.machine() != manifest["machine"]:
        return f"the bundle was made for {manifest['machine']}, and this is {platform.machine()}"
    return ""


def unpack_wheels(site: Path) -> None:
    """Unpack the wheels that fit this Python into a folder, whole or not at all, if it isn't there."""
    if not site.is_dir():
        fresh = site.with_name(f".new-{site.name}-{os.getpid()}")
        for wheel in sorted((HERE / "wheels").glob("*.whl")):
            if fits(wheel.name):
                with zipfile.ZipFile(wheel) as packed:
                    packed.extractall(fresh)
        fresh.rename(site)


def fits(wheel: str, version: tuple[int, int] = (sys.version_info.major, sys.version_info.minor)) -> bool:
    """Whether a wheel's tags (``NAME-VERSION-PYTHON-ABI-PLATFORM.whl``) name this Python; the platform is the packing machine's."""
    pythons, abi = wheel.removesuffix(".whl").split("-")[-3:-1]
    ours = f"cp{version[0]}{version[1]}"
    if abi == "abi3":
        return any(tag[:3] == "cp3" and int(tag[3:]) <= version[1] for tag in pythons.split("."))
    return bool({"py3", f"py{version[0]}{version[1]}", ours} & set(pythons.split("."))) and abi in ("none", ours)


def measure(options: argparse.Namespace, manifest: Mapping[str, Any], voice: Voice) -> int:
    """Everything after the wheels are there."""
    import paced
    import told

    from supervisor import hardware, paths, trial
    from supervisor.errors import Error

    home, machine = paths.home(), hardware.detect()
    waiting, left_out = chosen(options, machine)
    if not waiting:
        print_error(f"no case has the words {options.only!r}", f"--only '{trial.CASES[0].name}'")
        return 2
    result: dict[str, Any] = {
        "llmctl": manifest["llmctl"],
        "machine": told.of_machine(machine),
        "bandwidth_gb_s": None,
        "engine": None,
        "error": "",
        "cases": [],
        "speeds": [],
        "speculation": [],
        "cannot_tell": paced.CANNOT_TELL,
        "skipped": left_out,
        "seconds": 0.0,
    }

    def keep() -> None:
        result["seconds"] = round(voice.seconds, 1)
        result["speculation"] = paced.speculation(result["speeds"])
        if options.out:
            fresh = options.out.with_name(f".{options.out.name}.new")
            fresh.write_text(json.dumps(result, indent=1) + "\n")
            fresh.replace(options.out)

    def skip(case: trial.Case | Sprint, why: str) -> None:
        result["skipped"].append({"case" if isinstance(case, trial.Case) else "speed": case.name, "why": why})

    engine: Engine | None = None
    try:
        keep()
        engine, result["engine"] = find_engine(options, home, machine, manifest, voice)
        device = find_device(engine)
        bandwidth = None if device == "none" else paced.bandwidth_bytes_s()
        result["bandwidth_gb_s"] = bandwidth and round(bandwidth / 1e9, 1)
        keep()
        while waiting:
            case = waiting[0]
            try:
                one(case, engine, device, bandwidth, home, machine, voice, result)
            except Error as error:
                skip(case, error.message)
                voice.say(f"{case.name}: {error.message}")
            except Exception as exc:
                # A card is lent for minutes: what nobody thought of costs one case and not the others.
                skip(case, repr(exc))
                voice.say(f"{case.name}: {''.join(traceback.format_exception(exc))}")
            waiting.pop(0)
            keep()
    except LateError as why:
        result["error"] = f"{why}, {voice.work}" if engine is None and voice.work else str(why)
    except KeyboardInterrupt:
        result["error"] = "it was ended by Ctrl-C"
    except Error as error:
        result["error"] = error.message
        hint = "install a CUDA toolkit with cuBLAS, or sh run.sh --variant cpu" if "toolkit" in error.message else error.hint
        print_error(error.message, hint)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for case in waiting:
        skip(case, f"not reached: {result['error']}")
    keep()
    voice.say(paced.summary(result["speculation"]))
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0 if not result["skipped"] else 1 if result["cases"] or result["speeds"] else 2


def find_engine(
    options: argparse.Namespace, home: paths.Home, machine: hardware.Hardware, manifest: Mapping[str, Any], voice: Voice
) -> tuple[Engine, dict[str, Any]]:
    """The engine, built if there is none, and what the result says of it."""
    import told

    from supervisor import build, engine, recipe

    if options.engine:
        given = engine.external(options.engine.expanduser().absolute())
        return given, told.of_engine(given, built=False, seconds=0.0)
    unpack("tools.tar.xz", home.cache / "tools")
    source = unpack_source(home, manifest["source"])
    whole = recipe.load()
    slim = {name: dataclasses.replace(one, targets=TARGETS) for name, one in whole.variants.items()}
    card = options.variant == "native" and bool(machine.cards)
    done = build.build(
        home,
        variant=options.variant,
        source_dir=source,
        toolkit_choice="system" if card else "auto",
        jobs=options.jobs,
        recipe=dataclasses.replace(whole, variants=slim),
        progress=voice.progress,
        say=voice.say,
    )
    voice.say(f"engine {done.engine.title}, {done.seconds:.0f} s")
    return done.engine, told.of_engine(done.engine, built=done.built, seconds=round(done.seconds, 1))


def unpack_source(home: paths.Home, source: Mapping[str, Any]) -> Path | None:
    """Llama.cpp's tree: where a fetched one would lie, if it is the pinned commit's, else apart; then its folder is returned."""
    from supervisor import engine

    if source["digest"]:
        return unpack("source.tar.xz", home.cache / "sources" / source["digest"][:12])
    unpack("source.tar.xz", home.cache / "sources" / f"llama.cpp-{engine.pin().commit[:9]}" / "sdist")
    return None


def unpack(name: str, place: Path) -> Path:
    """Unpack an archive of the bundle into a folder, whole or not at all, if it isn't there."""
    if not place.is_dir():
        fresh = place.with_name(f".new-{place.name}-{os.getpid()}")
        fresh.mkdir(parents=True)
        with tarfile.open(HERE / name) as packed:
            # The manifest vouches for the content; Pythons that know filters want one named.
            packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            packed.extractall(fresh)
        fresh.rename(place)
    return place


def find_device(engine: Engine) -> str:
    """``CUDA0``, or ``none`` where the engine has no CUDA; Error where it has and finds no card."""
    from supervisor import engine as engines
    from supervisor.errors import Error, Exit

    if "CUDA0:" in engines.ask(engine.server, "--list-devices"):
        return "CUDA0"
    if engine.cuda:
        raise Error(f"the engine {engine.title} finds no card", exit=Exit.ENGINE, hint="nvidia-smi, or sh run.sh --variant cpu")
    return "none"


def chosen(options: argparse.Namespace, machine: hardware.Hardware) -> tuple[list[trial.Case | Sprint], list[dict[str, str]]]:
    """What is run, in order, and as ``skipped`` has it what this machine is too slow for."""
    from supervisor import speed, trial

    sprints = speed.SPRINTS if options.variant == "native" and machine.cards else speed.SPRINTS_WITHOUT_A_CARD
    left_out = [each.name for each in speed.SPRINTS if each not in sprints and is_wanted(each.name, options.only)]
    wanted = [each for each in in_turns(trial.CASES, sprints) if is_wanted(each.name, options.only)]
    return wanted, [{"speed": name, "why": speed.WHY_NOT} for name in left_out]


def in_turns(cases: Sequence[trial.Case], sprints: Sequence[Sprint]) -> list[trial.Case | Sprint]:
    """One of each, as long as there are."""
    pairs = itertools.zip_longest(cases, sprints)
    return [each for pair in pairs for each in pair if each is not None]


def is_wanted(name: str, words: str) -> bool:
    """Whether a name has all of the words; ``4B`` is one of ``4B-MTP`` too."""
    return set(words.split()) <= set(name.replace("-", " ").split()) | set(name.split())


def one(
    case: trial.Case | Sprint,
    engine: Engine,
    device: str,
    bandwidth: float | None,
    home: paths.Home,
    machine: hardware.Hardware,
    voice: Voice,
    result: dict[str, Any],
) -> None:
    """Plan, write and run one case or sprint, and add it to the result. ``bandwidth`` is that of the card's memory, in bytes a second."""
    import paced
    import told

    from supervisor import trial

    model, plan, settings = planned(case, device, home, machine)
    if isinstance(case, trial.Case):
        found = trial.run(engine.server, model, settings, device=device, threads=machine.cores)
        row = told.of_case(case, plan, found)
        result["cases"].append(row)
        voice.say(told.line(row))
        return
    more: dict[str, Any] = {"device": device, "threads": machine.cores, "bandwidth": bandwidth}
    voice.say(paced.line(paced.run(case, engine, model, plan, settings, into=result["speeds"], **more)))


def planned(
    case: trial.Case | Sprint, device: str, home: paths.Home, machine: hardware.Hardware
) -> tuple[Path, Estimate, Settings]:
    """The model's phantom, and the plan with its settings. Raises Error, exit NO_FIT, where there isn't as much free."""
    import told

    from supervisor import architecture, estimate, gguf, hardware, speed, trial
    from supervisor.errors import Error, Exit

    shaped = case if isinstance(case, trial.Case) else case.case
    model = find_model(home, shaped)
    # By the file's own header: it holds the stock recipe's types, and the published file keeps some tensors at higher ones.
    header = gguf.read(model)
    shape = architecture.read(header)
    chosen = trial.settings(shaped, shape, cuda=device != "none", cpu_flags=machine.cpu_flags)
    if isinstance(case, speed.Streams):
        chosen = speed.settings(case, chosen)
    plan = estimate.make(shape, header, chosen)
    wanted = sum(plan.device.values()) + (sum(plan.host.values()) if device == "none" else 0)
    now = hardware.detect()
    free = now.available_bytes if device == "none" else now.cards[0].free_bytes if now.cards else 0
    if wanted > free:
        what = f"{told.mib(wanted)} MiB are planned, {told.mib(free)} MiB are free"
        raise Error(what, exit=Exit.NO_FIT)
    return model, plan, chosen


def find_model(home: paths.Home, case: trial.Case) -> Path:
    """The case's phantom, written if it isn't there, from the condensed header that llmctl ships."""
    from supervisor import gguf, paths, phantom, trial

    model = home.cache / "phantoms" / f"{case.file}.gguf"
    if not model.is_file():
        shipped = paths.data_folder("presets") / "headers" / trial.HEADERS[case.model, case.mtp]
        model.parent.mkdir(parents=True, exist_ok=True)
        fresh = model.with_suffix(".new")
        phantom.write(gguf.expand(json.loads(shipped.read_text())), fresh)
        fresh.rename(model)
    return model


def print_error(what: str, hint: str) -> None:
    """One sentence and what to try."""
    sys.stderr.write(f"error: {what}\n" + (f"try: {hint}\n" if hint else ""))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LateError as why:
        print_error(f"{why} before anything was begun", "a longer --minutes")
        sys.exit(2)
