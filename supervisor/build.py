"""Building an engine: CMake and Ninja over llama.cpp's tree, then one rename into the store.

1. A compiler is looked for first: without one nothing is fetched.
2. One build at a time holds a lock. Ninja inherits it, so it is free only when the last compiler of a killed build has ended.
3. The key is computed (``supervisor.recipe``). An engine of that key in the store is picked, and that is all.
4. Free space is checked, the source and the tools are fetched.
5. The tree ``home.cache/builds/KEY`` is compiled. It survives a failure or a kill, and the next try goes on from there.
6. The binaries are copied into a folder beside their place in the store, run there (the smoke test), and the folder is renamed.

So the store holds whole engines only. Nothing that a build prints is lost: it stands in ``home.cache/builds/KEY.log``, from which an
error takes its sentence. The environment's compiler flags, and git (an enclosing repository's commit would get in), are kept out, and
paths are mapped away: the same key gives the same bytes wherever it is built.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from supervisor import engine as engines
from supervisor import hardware, launcher, paths, source, toolchain, toolkit
from supervisor import recipe as recipes
from supervisor.engine import Engine
from supervisor.errors import Error, Exit
from supervisor.recipe import Recipe, Variant
from supervisor.source import Source
from supervisor.toolchain import Compiler
from supervisor.toolkit import Toolkit
from supervisor.units import GIB, MIB, Progress, size

WRAPPER: Final = "nvcc-wrapper.sh"
SOURCE_MIB: Final = 300
"""llama.cpp's tree (176 MB) and its archive (77 MB)."""
NVCC_BYTES: Final = 2 * GIB
"""Memory of one compilation of a flash-attention kernel, with a margin."""
ORPHANS_END_S: Final = 20.0
"""How long the last compilers of a killed build may hold the lock: the longest CPU file takes about this long on a busy core."""
SMOKE_TIMEOUT_S: Final = 300.0
_STEP: Final = re.compile(r"^\[(\d+)/(\d+)\]")
_ERROR_LINE: Final = re.compile(r"(?:\berror\b|\bError\b|^ld: |undefined reference)(?!.*-Werror)")
_FULL: Final = re.compile(r"No space left on device|Disk quota exceeded")
_STARVED: Final = re.compile(r"internal compiler error: Killed|fatal error: Killed signal|signal 9|^Killed", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Result:
    """What came out of :func:`build`."""

    engine: Engine
    built: bool
    """False where the store had it."""
    seconds: float
    smoke: str
    """What the smoke test saw, as a sentence; empty where nothing was built."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything decided before anything is compiled."""

    variant: Variant
    recipe: Recipe
    compiler: Compiler
    toolkit: Toolkit | None
    arch: str
    options: Mapping[str, str]
    key: str
    jobs: int
    tree: Path
    log: Path


def build(
    home: paths.Home,
    *,
    variant: str = "native",
    source_dir: Path | None = None,
    cuda_arch: str | None = None,
    toolkit_choice: toolkit.Choice = "auto",
    jobs: int | None = None,
    smoke_model: Callable[[], Path | None] = lambda: None,
    recipe: Recipe | None = None,
    checkout: Path | None = None,
    progress: Progress,
    say: Callable[[str], None],
) -> Result:
    """Build an engine, or find it in the store; either way it is the picked one afterwards.

    ``cuda_arch`` (``86``) asks for CUDA without a card. ``smoke_model`` is called once the engine is compiled, for a GGUF file from
    which it has to generate a token; without one only its ``--version`` is run. Raises Error, exit ENGINE or, while another build runs,
    BUSY. Call it from a thread that outlives it: the compilers die with the thread that started them.
    """
    began = time.monotonic()
    recipe = recipe or recipes.load()
    chosen = recipe.variant(variant)
    machine = hardware.detect()
    arch = architecture(recipe, chosen, machine, cuda_arch, toolkit_choice)
    compiler = toolchain.find_compiler()
    with _locked(home, f"variant {variant}") as lock:
        pin = engines.pin()
        tree = source.local(source_dir, checkout or Path(__file__).parent.parent, pin)
        commit, number, digest = (tree.commit, tree.build, tree.digest) if tree else (pin.commit, pin.build, "")
        cuda = toolkit.choose(home, toolkit_choice, driver_major=machine.driver_major, progress=progress) if arch else None
        options = recipes.options(recipe, chosen, build=number, commit=commit, cpu_flags=machine.cpu_flags, arch=arch)
        key = recipes.key(
            variant=chosen,
            options=options,
            commit=commit,
            digest=digest,
            compiler=compiler.title,
            cpu=f"{machine.cpu_model} {' '.join(sorted(machine.cpu_flags))}",
            cuda=f"{cuda.version} {cuda.detail} {engines.sha256(paths.data_folder('build') / WRAPPER)}" if cuda else "",
        )
        if have := _have(home, key):
            return Result(have, False, time.monotonic() - began, "")
        place = home.cache / "builds" / key
        workers = jobs or parallel(machine, cuda=bool(arch))
        plan = _Plan(chosen, recipe, compiler, cuda, arch, options, key, workers, place, place.with_name(f"{key}.log"))
        with _translated(plan):
            _check_space(home, plan, fetching=tree is None)
            cmake, ninja = (toolchain.find_tool(home, name, recipe.tools[name], progress) for name in ("cmake", "ninja"))
            tree = tree or source.fetch(home, pin, progress)
            _announce(plan, tree, say)
            _compile(plan, tree, cmake, ninja, lock, progress)
            made, smoke = _install(home, plan, tree, smoke_model)
        shutil.rmtree(plan.tree, ignore_errors=True)
    return Result(made, True, time.monotonic() - began, smoke)


def architecture(
    recipe: Recipe, variant: Variant, machine: hardware.Hardware, cuda_arch: str | None, choice: toolkit.Choice
) -> str:
    """The GPU architectures to compile for, joined by ``;``; empty for a CPU engine.

    (1) What the user names. (2) The cards that are there. (3) CUDA is asked for by a toolkit and no card is there: the recipe's own.
    """
    if not variant.cuda:
        if cuda_arch:
            raise Error(
                f"variant {variant.name} has no CUDA, --cuda-arch {cuda_arch} needs it", exit=Exit.USAGE, hint="--variant native"
            )
        return ""
    if cuda_arch:  # (1)
        named = cuda_arch.removesuffix("-real").replace(".", "")
        if not re.fullmatch(r"\d{2,3}[af]?", named):
            raise Error(f"{cuda_arch!r} is not a CUDA architecture", exit=Exit.USAGE, hint="--cuda-arch 86")
        return named
    if machine.cards:  # (2)
        return ";".join(sorted({card.arch for card in machine.cards}))
    return recipe.default_arch if choice != "auto" else ""  # (3)


def parallel(machine: hardware.Hardware, *, cuda: bool) -> int:
    """How many compilers at once: one a CPU we may use, and under CUDA no more than memory holds."""
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(cpus, machine.available_bytes // NVCC_BYTES)) if cuda else cpus


def smoke(engine: Engine, model: Path) -> str:
    """Generate one token with llama-bench; a sentence about it. Error if the engine can't."""
    command = [str(engine.tool("llama-bench")), "-m", str(model), "-p", "0", "-n", "1", "-r", "1", "--no-warmup", "-o", "jsonl"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=engines.clean_env(),
            timeout=SMOKE_TIMEOUT_S,
            errors="replace",
        )
    except subprocess.TimeoutExpired as exc:
        what = f"the engine {engine.key} made no token within {SMOKE_TIMEOUT_S:.0f} s"
        raise Error(what, exit=Exit.ENGINE, hint="llmctl engine test") from exc
    try:
        row = json.loads(done.stdout.splitlines()[-1])
        took_ms = row["avg_ns"] / 1e6
        return f"smoke test: {row['n_gen']} token of {row['model_type']} in {took_ms:.0f} ms on {row['backends']}"
    except (ValueError, IndexError, KeyError) as exc:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        what = f"the engine {engine.key} can't generate a token from {model} (exit {done.returncode}): {last}"
        raise Error(what, exit=Exit.ENGINE, hint=f"llmctl engine test --model {model}") from exc


def failure(plan_log: Path, text: str, free_bytes: int) -> Error:
    """What a failed build's output means, in one sentence."""
    if _FULL.search(text):
        what = f"the disk is full ({size(free_bytes)} free in {plan_log.parent}); what was compiled stays, nothing was installed"
        return Error(what, exit=Exit.ENGINE, hint="free some space and build again, or LLMCTL_HOME=/a/larger/disk llmctl build")
    if _STARVED.search(text):
        what = "a compiler was killed, most likely for want of memory; what was compiled stays"
        return Error(what, exit=Exit.ENGINE, hint="llmctl build --jobs 1")
    lines = [line.strip() for line in text.splitlines() if _ERROR_LINE.search(line) and not line.startswith("FAILED")]
    why = lines[0] if lines else (text.strip().splitlines() or ["no output"])[-1]
    return Error(f"the build failed: {why[:300]} (log: {plan_log})", exit=Exit.ENGINE, hint=f"tail -50 {plan_log}")


def _have(home: paths.Home, key: str) -> Engine | None:
    """The engine of this key, picked, if the store has it undamaged."""
    with contextlib.suppress(Error):
        if (home.engines / key).is_dir() and not engines.damaged(engines.find(home, key)):
            return engines.use(home, key)
    return None


def _announce(plan: _Plan, tree: Source, say: Callable[[str], None]) -> None:
    free, busy = plan.recipe.cuda_minutes if plan.arch else plan.variant.minutes
    what = f"CUDA {plan.toolkit.version} for sm_{plan.arch.replace(';', ', sm_')}" if plan.toolkit else "CPU"
    name = f"b{tree.build}" if tree.build else tree.commit[:9]
    say(f"building llama.cpp {name} from {tree.origin}, variant {plan.variant.name} ({what}), {plan.jobs} at a time")
    say(f"this takes about {free} minutes on two free cores, {busy} on busy ones; a broken-off build goes on where it was")


def _check_space(home: paths.Home, plan: _Plan, *, fetching: bool) -> None:
    need = (plan.recipe.cuda_free_mib if plan.arch else plan.variant.free_mib) + (SOURCE_MIB if fetching else 0)
    for folder in (home.cache, home.engines):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < need * MIB:
            what = f"a build needs {size(need * MIB)} of free disk, {folder} has {size(free)}"
            raise Error(what, exit=Exit.ENGINE, hint="LLMCTL_HOME=/a/larger/disk llmctl build")


def _compile(plan: _Plan, tree: Source, cmake: Path, ninja: Path, lock: int, progress: Progress) -> None:
    """Configure and compile ``plan.tree``, going on from what is there if it was made from the same folder."""
    mark = plan.tree / "source"
    if plan.tree.is_dir() and (not mark.is_file() or mark.read_text() != str(tree.folder)):
        shutil.rmtree(plan.tree)
    plan.tree.mkdir(parents=True, exist_ok=True)
    mark.write_text(str(tree.folder))
    env = toolchain.clean_env() | {"NINJA_STATUS": "[%f/%t] ", "LLMCTL_SOURCE": str(tree.folder)}
    with plan.log.open("w") as log:
        progress("configuring", 0, 0)
        _run([str(cmake), *arguments(plan, tree, ninja)], plan, log, env, lock, lambda line: None)

        def count(line: str) -> None:
            if step := _STEP.match(line):
                progress("compiling", int(step[1]), int(step[2]))

        _run([str(ninja), "-C", str(plan.tree / "cmake"), f"-j{plan.jobs}", *plan.variant.targets], plan, log, env, lock, count)


def arguments(plan: _Plan, tree: Source, ninja: Path) -> list[str]:
    """CMake's arguments: the key's options, and the paths that the key leaves out."""
    out = plan.tree / "cmake"
    maps = [f"-ffile-prefix-map={tree.folder}=.", f"-ffile-prefix-map={out}=./build"]
    flags = " ".join(shlex.quote(one) for one in maps)
    chosen = dict(plan.options) | {
        "CMAKE_MAKE_PROGRAM": str(ninja),
        "CMAKE_C_COMPILER": str(plan.compiler.cc),
        "CMAKE_CXX_COMPILER": str(plan.compiler.cxx),
        "CMAKE_C_FLAGS": flags,
        "CMAKE_CXX_FLAGS": flags,
    }
    if plan.toolkit:
        kit = plan.toolkit
        maps.append(f"-ffile-prefix-map={kit.root}=/cuda")
        rpath = ["$ORIGIN"] + ([str(kit.root / "lib64")] if kit.origin == "system" else [])
        chosen |= {
            "CUDAToolkit_ROOT": str(kit.root),
            "CMAKE_CUDA_COMPILER": str(kit.nvcc),
            "CMAKE_CUDA_HOST_COMPILER": str(toolchain.host_compiler(plan.compiler, kit)),
            "CMAKE_CUDA_FLAGS": " ".join(shlex.quote(f"-Xcompiler={one}") for one in maps),
            "CMAKE_CUDA_COMPILER_LAUNCHER": f"/bin/sh;{paths.data_folder('build') / WRAPPER}",
            # Libraries lie beside the binaries, and nothing else is known of where: the folder may move.
            "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
            "CMAKE_INSTALL_RPATH": ";".join(rpath),
        }
    return ["-S", str(tree.folder), "-B", str(out), "-G", "Ninja", *(f"-D{name}={value}" for name, value in chosen.items())]


def _run(
    command: Sequence[str], plan: _Plan, log: IO[str], env: Mapping[str, str], lock: int, each: Callable[[str], None]
) -> None:
    """Run a step with its output in the log; it ends when we do. ``each`` gets every line."""
    log.write(f"$ {shlex.join(command)}\n")
    started = log.tell()
    process = subprocess.Popen(
        launcher.command(*command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env),
        pass_fds=(lock,),
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                log.write(line)
                log.flush()
                each(line)
        code = process.wait()
    except BaseException:
        # Ctrl-C or a full disk: ninja ends its compilers and deletes their half-written files.
        process.terminate()
        process.wait()
        raise
    if code != 0:
        with plan.log.open(errors="replace") as text:
            text.seek(started)
            said = text.read()
        raise failure(plan.log, said, shutil.disk_usage(plan.log.parent).free)


def _install(home: paths.Home, plan: _Plan, tree: Source, smoke_model: Callable[[], Path | None]) -> tuple[Engine, str]:
    """Copy, try, rename, pick. A folder that isn't tried whole never gets the engine's name."""
    for stale in home.engines.glob(".new-*"):
        shutil.rmtree(stale, ignore_errors=True)
    stage = home.engines / f".new-{plan.key}"
    try:
        stage.mkdir()
        digests = _stage(plan, stage)
        made = Engine(
            server=stage / engines.SERVER,
            key=plan.key,
            variant=plan.variant.name,
            build=tree.build,
            commit=tree.commit,
            compiler=plan.compiler.title,
            cuda=plan.toolkit.version if plan.toolkit else "",
            arch=plan.arch,
            fa_pairs=plan.recipe.fa_pairs if plan.arch else (),
            source=tree.origin,
            options=plan.options,
            sha256=digests,
            built_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        said = _try(made, smoke_model())
        (stage / engines.MANIFEST).write_text(json.dumps(engines.manifest(made), indent=2) + "\n")
        place = home.engines / plan.key
        if place.exists():
            shutil.rmtree(place)
        stage.rename(place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    engines.use(home, plan.key)
    return replace(made, server=place / engines.SERVER), said


def _stage(plan: _Plan, stage: Path) -> dict[str, str]:
    """Copy the binaries and their libraries; the checksum of each. A private toolkit's libraries are linked in beside them."""
    digests = {}
    for path in sorted((plan.tree / "cmake" / "bin").iterdir()):
        if path.name not in plan.variant.targets and ".so" not in path.name:
            continue
        shutil.copy2(path, stage / path.name, follow_symlinks=False)
        if not path.is_symlink():
            digests[path.name] = engines.sha256(stage / path.name)
    for library in plan.toolkit.runtime if plan.toolkit else ():
        try:
            (stage / library.name).hardlink_to(library)
        except OSError:
            shutil.copy2(library, stage / library.name)
    return digests


def _try(made: Engine, model: Path | None) -> str:
    said = engines.parse_version(engines.ask(made.server, "--version"))
    if said is None or said.build != made.build:
        what = f"the new llama-server says it is build {said.build if said else 'unknown'}, b{made.build} was built"
        raise Error(what, exit=Exit.ENGINE, hint="llmctl build")
    if model is None:
        return "smoke test: it starts and names its version (no model at hand to generate a token from)"
    return smoke(made, model)


@contextlib.contextmanager
def _locked(home: paths.Home, what: str) -> Iterator[int]:
    """Hold the lock against a second build; yields the descriptor, for the compilers to hold it too."""
    path = home.cache / "builds" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + ORPHANS_END_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                holder = path.read_text().strip() or "unknown"
                pid = holder.partition(" ")[0]
                if Path("/proc", pid).exists() or time.monotonic() > deadline:
                    what = f"another build is running: process {holder}"
                    raise Error(what, exit=Exit.BUSY, hint=f"wait for it, or kill {pid}") from exc
                time.sleep(0.2)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} ({what}, since {time.strftime('%H:%M:%S')})\n".encode(), 0)
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def _translated(plan: _Plan) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            raise failure(plan.log, "No space left on device", 0) from exc
        raise Error(f"the build failed: {exc}", exit=Exit.ENGINE, hint="llmctl build") from exc
