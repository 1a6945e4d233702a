"""Building: the key, the decisions, and a toy project in llama.cpp's place that is built, broken, killed and moved."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor import build, engine, hardware, paths, pip, recipe, toolchain, toolkit
from supervisor.engine import Engine
from supervisor.errors import Error, Exit
from supervisor.recipe import Recipe

ZEN3 = frozenset(["sse4_2", "avx", "avx2", "f16c", "fma", "bmi2"])
ICELAKE = ZEN3 | {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw", "avx512vbmi", "avx512_vnni"}
CARD = hardware.Card(0, "NVIDIA GeForce RTX 3070", "GPU-1", "86", 8 << 30, 7 << 30)
BOX = hardware.Hardware("cpu", ZEN3, "AuthenticAMD 25 33", 8, 32 << 30, 16 << 30, (CARD,), "580.95.05", "")
BARE = replace(BOX, cards=(), driver="", no_card="NVML Shared Library Not Found")

TOY = {
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.14)
        project(toy C)
        set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
        set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
        add_library(toy base.c)
        target_compile_definitions(toy PRIVATE BUILD=${LLAMA_BUILD_NUMBER})
        add_executable(llama-server server.c)
        target_link_libraries(llama-server toy)
        add_executable(llama-bench bench.c)
        add_executable(llama-not-wanted bench.c)
    """,
    "base.c": '#include <stdio.h>\nvoid version(void) { fprintf(stderr, "version: 0.5.0 (build %d, commit abc)\\n", BUILD); }\n',
    "server.c": "#include <stdio.h>\nvoid version(void);\nint main(void) { version(); puts(__FILE__); return 0; }\n",
    "bench.c": 'int puts(const char *); int main(void) { return puts("{\\"n_gen\\": 1, \\"avg_ns\\": 2e6, '
    '\\"model_type\\": \\"toy\\", \\"backends\\": \\"CPU\\"}") < 0; }\n',
}


def toy(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in TOY.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def toy_recipe() -> Recipe:
    """The shipped recipe with the toy's targets; shared libraries that find each other, as CUDA engines have."""
    whole = recipe.load()
    variants = {name: replace(one, targets=("llama-server", "llama-bench"), free_mib=1) for name, one in whole.variants.items()}
    shared = {"BUILD_SHARED_LIBS": "ON", "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON", "CMAKE_INSTALL_RPATH": "$ORIGIN"}
    # CMake need not try the compiler out in every test.
    quick = {"CMAKE_C_COMPILER_WORKS": "1", "CMAKE_C_ABI_COMPILED": "1"}
    return replace(whole, variants=variants, cpu_options=whole.cpu_options | shared | quick)


@pytest.fixture(scope="module")
def small() -> Recipe:
    return toy_recipe()


def run(home: Path, folder: Path, small: Recipe, **more: Any) -> build.Result:
    done: build.Result = build.build(
        paths.home({"LLMCTL_HOME": str(home)}),
        **{"variant": "cpu", "source_dir": folder, "recipe": small, "progress": lambda *_: None, "say": lambda _: None, **more},
    )
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, small: Recipe) -> tuple[Path, Path, build.Result]:
    """A toy engine, its home and its source."""
    place = tmp_path_factory.mktemp("built")
    folder = toy(place / "source")
    return place / "home", folder, run(place / "home", folder, small, smoke_model=lambda: folder / "CMakeLists.txt")


# The decisions


def options(flags: frozenset[str], arch: str = "", variant: str = "native") -> dict[str, str]:
    whole = recipe.load()
    return recipe.options(whole, whole.variant(variant), build=11312, commit=engine.pin().commit, cpu_flags=flags, arch=arch)


def test_cpu_options() -> None:
    found = options(ZEN3)
    assert (found["GGML_NATIVE"], found["BUILD_SHARED_LIBS"], found["CMAKE_BUILD_TYPE"]) == ("ON", "OFF", "Release")
    assert (found["LLAMA_BUILD_NUMBER"], found["LLAMA_BUILD_COMMIT"]) == ("11312", "0c1e57098")
    assert found["LLAMA_USE_PREBUILT_UI"] == "OFF"
    assert "GGML_CUDA" not in found


def test_cuda_options_set_the_instruction_sets_one_by_one() -> None:
    found = options(ZEN3, "86")
    assert (found["GGML_NATIVE"], found["GGML_BACKEND_DL"], found["BUILD_SHARED_LIBS"]) == ("OFF", "ON", "ON")
    assert found["CMAKE_CUDA_ARCHITECTURES"] == "86-real"
    assert (found["GGML_AVX2"], found["GGML_AVX512"]) == ("ON", "OFF")
    assert found["GGML_CUDA_FA_QUANTS"] == "f16-f16;q8_0-q8_0;q4_0-q4_0"
    assert options(ICELAKE, "86;89")["CMAKE_CUDA_ARCHITECTURES"] == "86-real;89-real"
    assert [options(ICELAKE, "86")[name] for name in ("GGML_AVX512", "GGML_AVX512_VNNI", "GGML_AVX512_BF16")] == [
        "ON",
        "ON",
        "OFF",
    ]


def test_every_variant_keeps_ndebug() -> None:
    for name in recipe.load().variants:
        found = options(ZEN3, variant=name)
        assert found["CMAKE_BUILD_TYPE"] in ("Release", "RelWithDebInfo")
        assert "-DNDEBUG" in found.get("CMAKE_CXX_FLAGS_RELWITHDEBINFO", "-DNDEBUG")


def key(**changed: Any) -> str:
    whole = recipe.load()
    facts = {
        "options": options(ZEN3),
        "commit": "c",
        "digest": "",
        "compiler": "(Debian 12.2.0-14) 12.2.0",
        "cpu": "zen3",
        "cuda": "",
    }
    return recipe.key(**{"variant": whole.variant("native"), **facts, **changed})


def test_the_key_holds_what_decides_the_bytes() -> None:
    cuda = {"options": options(ZEN3, "86"), "cuda": "13.0 V13.0.88"}
    keys = [
        key(),
        key(commit="d"),
        key(digest="d"),
        key(compiler="13"),
        key(cpu="zen4"),
        key(variant=recipe.load().variant("dev")),
        key(options=options(ZEN3) | {"GGML_LLAMAFILE": "OFF"}),
        key(**cuda),
        key(**cuda | {"cuda": "13.0 V13.0.48"}),
        key(**cuda | {"options": options(ZEN3, "89")}),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert key(**cuda, cpu="zen4") == key(**cuda), "without GGML_NATIVE the instruction sets in the options say it all"


@pytest.mark.parametrize(
    ("variant", "machine", "asked", "choice", "arch"),
    [
        ("native", BOX, None, "auto", "86"),
        ("native", BARE, None, "auto", ""),
        ("native", BARE, None, "wheels", "86"),
        ("native", BARE, "8.9", "auto", "89"),
        ("native", replace(BOX, cards=(CARD, replace(CARD, arch="89"), CARD)), None, "auto", "86;89"),
        ("cpu", BOX, None, "auto", ""),
        ("dev", BOX, None, "auto", ""),
    ],
)
def test_architecture(variant: str, machine: hardware.Hardware, asked: str | None, choice: toolkit.Choice, arch: str) -> None:
    whole = recipe.load()
    assert build.architecture(whole, whole.variant(variant), machine, asked, choice) == arch


@pytest.mark.parametrize(("variant", "asked"), [("cpu", "86"), ("native", "ampere")])
def test_a_wrong_architecture(variant: str, asked: str) -> None:
    whole = recipe.load()
    with pytest.raises(Error) as caught:
        build.architecture(whole, whole.variant(variant), BARE, asked, "auto")
    assert caught.value.exit is Exit.USAGE


def test_nvcc_is_given_memory() -> None:
    assert build.parallel(replace(BOX, available_bytes=3 << 30), cuda=True) == 1
    assert build.parallel(replace(BOX, available_bytes=1 << 30), cuda=True) == 1
    assert build.parallel(BOX, cuda=False) == len(os.sched_getaffinity(0))


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"there is no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+ in PATH\)") as caught:
        toolchain.find_compiler({"PATH": str(tmp_path)})
    assert (caught.value.exit, caught.value.hint) == (Exit.ENGINE, "apt install g++")
    program(tmp_path / "g++", "")
    with pytest.raises(Error, match=r"there is no C compiler"):
        toolchain.find_compiler({"PATH": str(tmp_path)})


def test_one_compiler_under_two_names(tmp_path: Path) -> None:
    program(tmp_path / "cc", "")
    program(tmp_path / "c++", "echo 'c++ (Debian 12.2.0-14) 12.2.0'")
    program(tmp_path / "g++", "echo 'g++ (Debian 12.2.0-14) 12.2.0'")
    found = [toolchain.find_compiler({"PATH": str(tmp_path), "CXX": name}) for name in ("c++", "g++")]
    assert found[0].title == found[1].title == "(Debian 12.2.0-14) 12.2.0"
    assert found[0].gcc_major == 12


def test_the_environment_decides_nothing() -> None:
    noise = {
        "CFLAGS": "1",
        "CUDAFLAGS": "1",
        "NVCC_APPEND_FLAGS": "1",
        "SOURCE_DATE_EPOCH": "1",
        "CMAKE_BUILD_TYPE": "Debug",
        "GIT_DIR": "/x",
    }
    assert toolchain.clean_env(noise | {"PATH": "/bin"}) == {"PATH": "/bin", "GIT_DIR": "/nonexistent", "LC_ALL": "C"}


def test_cmake_and_ninja_come_from_wheels_where_the_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def install(packages: list[pip.Pinned], target: Path) -> None:
        fetched.extend(f"{package.name} {package.version}" for package in packages)
        for name in ("cmake/data/bin/cmake", "bin/cmake", "bin/ninja"):
            program(target / name, "")

    monkeypatch.setattr(pip, "install", install)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    home, tools = paths.home({"LLMCTL_HOME": str(tmp_path / "home")}), recipe.load().tools
    program(tmp_path / "bin" / "cmake", "echo cmake version 3.5.1")
    for _ in range(2):
        assert toolchain.find_tool(home, "cmake", tools["cmake"], lambda *_: None).parts[-3:] == ("data", "bin", "cmake")
        assert toolchain.find_tool(home, "ninja", tools["ninja"], lambda *_: None).parts[-2:] == ("bin", "ninja")
    assert fetched == ["cmake 3.31.10", "ninja 1.13.0"]
    program(tmp_path / "bin" / "cmake", "echo cmake version 3.25.1")
    assert toolchain.find_tool(home, "cmake", tools["cmake"], lambda *_: None) == tmp_path / "bin" / "cmake"


def test_a_compiler_too_new_for_nvcc(tmp_path: Path) -> None:
    header = tmp_path / "include/crt/host_config.h"
    header.parent.mkdir(parents=True)
    header.write_text("#if __GNUC__ > 13\n")
    kit = toolkit.Toolkit(tmp_path, tmp_path / "bin/nvcc", "12.4", "", "system")
    old, new = (toolchain.Compiler(Path("/usr/bin/cc"), Path("/usr/bin/c++"), f"(Debian) {major}.2.0") for major in (13, 15))
    assert toolchain.host_compiler(old, kit) == old.cxx
    with pytest.raises(Error, match=r"CUDA 12\.4 takes GCC up to 13, and this is GCC 15") as caught:
        toolchain.host_compiler(new, kit, {"PATH": "/nonexistent"})
    assert caught.value.hint == "apt install g++-13"
    other = program(tmp_path / "bin" / "g++-12", "")
    assert toolchain.host_compiler(new, kit, {"PATH": str(other.parent)}) == other


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("FAILED: a.o\ncc1plus: error writing to /tmp/x.s: No space left on device\n", "the disk is full"),
        ("g++: fatal error: Killed signal terminated program cc1plus\n", "for want of memory"),
        (
            "[1/2] x\nFAILED: a.o \n/usr/bin/c++ -Werror=x\na.cpp:3:1: error: expected ';'\na.cpp:9: error: more\n",
            "a.cpp:3:1: error: expected",
        ),
        ("CMake Error at CMakeLists.txt:5 (message):\n  no\n", "CMake Error at CMakeLists.txt:5"),
        ("something odd\n", "something odd"),
    ],
)
def test_a_failure_is_one_sentence(output: str, message: str) -> None:
    found = build.failure(Path("/home/builds/k.log"), output, 1 << 20)
    assert message in found.message
    assert "\n" not in found.message
    assert found.exit is Exit.ENGINE


# The toy


def test_the_engine_is_whole(built: tuple[Path, Path, build.Result]) -> None:
    _, folder, done = built
    made = done.engine
    assert done.built
    assert done.smoke == "smoke test: 1 token of toy in 2 ms on CPU"
    assert {path.name for path in made.folder.iterdir()} == {"llama-server", "llama-bench", "libtoy.so", "manifest.json"}
    assert set(made.sha256) == {"llama-server", "llama-bench", "libtoy.so"}
    assert (made.variant, made.source, made.cuda, engine.damaged(made)) == ("cpu", str(folder), "", [])
    assert engine.read(made.folder) == made


def test_the_same_again_does_nothing(built: tuple[Path, Path, build.Result], small: Recipe) -> None:
    home, folder, done = built
    again = run(home, folder, small)
    assert (again.built, again.engine) == (False, done.engine)
    assert engine.current(paths.home({"LLMCTL_HOME": str(home)})) == done.engine.key


def test_a_damaged_engine_is_built_again(small: Recipe, tmp_path: Path) -> None:
    folder = toy(tmp_path / "source")
    first = run(tmp_path / "home", folder, small).engine
    first.server.write_text("something else")
    second = run(tmp_path / "home", folder, small)
    assert (second.built, second.engine.sha256, engine.damaged(first)) == (True, first.sha256, [])


def test_another_folder_gives_the_same_bytes(
    built: tuple[Path, Path, build.Result], small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    monkeypatch.setenv("CFLAGS", "-O0 -DNOT_IN_THE_KEY")
    other = run(tmp_path / "a home elsewhere", toy(tmp_path / "another-place" / "source"), small)
    assert other.engine.key == built[2].engine.key
    assert other.engine.sha256 == built[2].engine.sha256


def test_a_moved_engine_starts(built: tuple[Path, Path, build.Result], tmp_path: Path) -> None:
    shutil.copytree(built[2].engine.folder, tmp_path / "moved", symlinks=True)
    moved = engine.external(tmp_path / "moved" / engine.SERVER)
    assert moved.build == 0
    linked = subprocess.run(["ldd", moved.server], capture_output=True, text=True, check=True).stdout
    assert f"libtoy.so => {tmp_path}/moved/" in linked


def test_a_changed_source_is_another_engine(small: Recipe, built: tuple[Path, Path, build.Result], tmp_path: Path) -> None:
    folder = toy(tmp_path / "source")
    (folder / "server.c").write_text("int main(void) { return broken; }\n")
    with pytest.raises(Error, match=r"the build failed: .*server\.c.*error: .*undeclared") as caught:
        run(tmp_path / "home", folder, small)
    assert list((tmp_path / "home/data/engines").iterdir()) == []
    log = Path(caught.value.hint.removeprefix("tail -50 "))
    assert log.stem != built[2].engine.key
    assert "FAILED" in log.read_text()


def test_an_engine_that_does_not_run_is_not_installed(small: Recipe, tmp_path: Path) -> None:
    folder = toy(tmp_path / "source")
    (folder / "server.c").write_text("int main(void) { return 3; }\n")
    with pytest.raises(Error, match="ended with 3"):
        run(tmp_path / "home", folder, small)
    assert list((tmp_path / "home/data/engines").iterdir()) == []


def compiler(place: Path, condition: str) -> Path:
    """A C compiler that does something else while a file named ``on`` lies beside it and it compiles ``server.c``."""
    return program(place / "cc", f'case "$*" in *server.c*) while [ -e {place}/on ]; do {condition}; done;; esac\nexec cc "$@"')


def test_a_full_disk_installs_nothing_and_the_next_try_goes_on(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, on = toy(tmp_path / "source"), tmp_path / "on"
    cc = compiler(tmp_path, "echo 'fatal error: error writing to x.s: No space left on device'; exit 1")
    monkeypatch.setenv("CC", str(cc))
    on.touch()
    with pytest.raises(
        Error, match=r"the disk is full \(.* free in .*\); what was compiled stays, nothing was installed"
    ) as caught:
        run(tmp_path / "home", folder, small, jobs=1)
    assert caught.value.exit is Exit.ENGINE
    assert list((tmp_path / "home/data/engines").iterdir()) == []
    on.unlink()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copy2", full)
        with pytest.raises(Error, match="the disk is full"):
            run(tmp_path / "home", folder, small)
    assert list((tmp_path / "home/data/engines").iterdir()) == []
    done = run(tmp_path / "home", folder, small)
    assert done.built
    log = tmp_path / "home/cache/builds" / f"{done.engine.key}.log"
    assert "no work to do" in log.read_text()
    assert not log.with_suffix("").exists()


def test_too_little_space_is_said_before(small: Recipe, tmp_path: Path) -> None:
    variants = {"cpu": replace(small.variants["cpu"], free_mib=1 << 40)}
    with pytest.raises(Error, match=r"a build needs .* of free disk, .* has "):
        run(tmp_path / "home", toy(tmp_path / "source"), replace(small, variants=variants))
    assert not list((tmp_path / "home/cache/builds").glob("*/*"))


CHILD = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
import tests.test_build as t
t.run(Path({home!r}), Path({folder!r}), t.toy_recipe())
"""


def wait_for(told: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not told():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_build_leaves_nothing_and_the_next_goes_on(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, on, home = toy(tmp_path / "source"), tmp_path / "on", tmp_path / "home"
    monkeypatch.setenv("CC", str(compiler(tmp_path, f"touch {tmp_path}/compiling; sleep 0.02")))
    on.touch()
    code = CHILD.format(root=str(Path(__file__).parent.parent), home=str(home), folder=str(folder))
    first = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for((tmp_path / "compiling").exists)
        with pytest.raises(
            Error, match=rf"another build is running: process {first.pid} \(variant cpu, since \d\d:\d\d:\d\d\)"
        ) as caught:
            run(home, folder, small)
        assert (caught.value.exit, caught.value.hint) == (Exit.BUSY, f"wait for it, or kill {first.pid}")
        ours = [
            int(pid) for pid in subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True).stdout.split()
        ]
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert ours
    wait_for(lambda: not any(alive(pid) for pid in ours))
    assert list((home / "data/engines").iterdir()) == []
    on.unlink()
    done = run(home, folder, small)
    assert done.built
    assert engine.damaged(done.engine) == []


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_the_compilers(small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, on = toy(tmp_path / "source"), tmp_path / "on"
    monkeypatch.setenv("CC", str(compiler(tmp_path, f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 0.02")))
    on.touch()

    def after_the_first(what: str, done: int, total: int) -> None:
        if what == "compiling":
            wait_for((tmp_path / "pid").exists)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "home", folder, small, jobs=2, progress=after_the_first)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))


@pytest.mark.slow
def test_the_real_engine_moved(tmp_path: Path) -> None:
    """Engines in the store, CUDA ones too: copied elsewhere, each starts and lists its devices."""
    for one in engine.installed(paths.home()):
        shutil.copytree(one.folder, tmp_path / one.key, symlinks=True)
        moved: Engine = engine.external(tmp_path / one.key / engine.SERVER)
        assert moved.build == one.build
        assert engine.ask(moved.server, "--list-devices").startswith("Available devices:")
        assert json.loads((tmp_path / one.key / engine.MANIFEST).read_text())["key"] == one.key
