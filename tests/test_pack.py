"""The offline bundle: what is in it and what isn't, its scripts on a machine without network, and what they say of the fake and a toy.

The wheels come from a local folder: those of llmctl's requirements are packed again out of this environment, so that the bundle's script
runs with them as it would on the box.
"""

from __future__ import annotations

import base64
import csv
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from supervisor import engine, pack, paths, recipe, speed, trial
from supervisor.commands.pack import command
from supervisor.errors import Error, Exit
from supervisor.recipe import Recipe, Tool
from tests import fakes
from tests.test_build import TOY

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
TREE = {
    **TOY,
    "LICENSE": "MIT",
    "ggml/src/ggml.c": "",
    "ggml/src/ggml-impl.h": "",
    "ggml/src/ggml-cpu/ops.cpp": "",
    "ggml/src/ggml-cuda/mmq.cu": "",
    "ggml/src/ggml-vulkan/ggml-vulkan.cpp": "",
    "ggml/src/ggml-metal/ggml-metal.m": "",
    "src/models/qwen35.cpp": "",
    "models/ggml-vocab-gpt-2.gguf": "",
    "tests/test-grammar.cpp": "",
    "docs/build.md": "",
    "examples/simple/simple.cpp": "",
    "scripts/ui-assets.cmake": "",
    "tools/server/server.cpp": "",
    "tools/server/tests/test.py": "",
    "tools/ui/CMakeLists.txt": "",
    "tools/ui/src/app.svelte": "",
    ".git": "gitdir: elsewhere",
}
LEFT = {name for name in TREE if re.search(r"vulkan|metal|^models/|^tests/|^docs/|^examples/|server/tests|ui/src|^\.git", name)}
LOG = """\
0.00.1 I load_tensors:   CPU_Mapped model buffer size =  2643.00 MiB
0.00.2 I llama_kv_cache:        CPU KV buffer size =   512.00 MiB
0.00.3 I sched_reserve:        CPU compute buffer size =   219.06 MiB
"""
BENCH = "".join(
    json.dumps({"n_prompt": prompt, "n_gen": answer, "n_depth": depth, "avg_ts": tps, "stddev_ts": 0.5}) + "\n"
    for prompt, answer, depth, tps in ((64, 0, 0, 400.0), (0, 16, 0, 50.0), (64, 0, 256, 300.0), (0, 16, 256, 25.0))
)


def tree(folder: Path) -> Path:
    for name, text in TREE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def wheel(into: Path, name: str, version: str, tag: str, files: dict[str, bytes], metadata: str = "") -> Path:
    """A wheel of these files; pip asks for nothing but METADATA and WHEEL."""
    escaped = name.replace("-", "_")
    info = f"{escaped}-{version}.dist-info"
    named = {"METADATA": metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    named |= {"WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"}
    contents = {f"{info}/{key}": text.encode() for key, text in named.items()} | files
    record = "".join(f"{one},,\n" for one in [*contents, f"{info}/RECORD"])
    path = into / f"{escaped}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for one, data in {**contents, f"{info}/RECORD": record.encode()}.items():
            out.writestr(one, data)
    return path


def repacked(into: Path) -> None:
    """The wheels of llmctl's requirements and of theirs, out of this environment."""
    waiting, seen = list(pack.requirements()), set()
    while waiting:
        found = re.match(r"[\w.-]+", waiting.pop())
        assert found
        name = re.sub(r"[-_.]+", "-", found[0]).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            told = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of another Python or platform
        waiting += [line for line in told.requires or () if "extra" not in line]
        tag = next(line.partition(": ")[2] for line in (told.read_text("WHEEL") or "").splitlines() if line.startswith("Tag"))
        skipped = (".pyc", "/RECORD", "/METADATA", "/WHEEL")
        files = {
            str(file): file.read_binary()
            for file in told.files or ()
            if ".." not in file.parts and not str(file).endswith(skipped) and Path(str(file.locate())).is_file()
        }
        wheel(into, name, told.version, tag, files, told.read_text("METADATA") or "")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels in the registry's place."""
    folder = tmp_path_factory.mktemp("shelf")
    repacked(folder)
    layout = {
        "cmake": [
            "cmake/data/bin/cmake",
            "cmake/data/bin/ctest",
            "cmake/data/doc/a",
            "cmake/data/share/cmake-3.31/Modules/A.cmake",
        ],
        "ninja": ["bin/ninja"],
    }
    layout["cmake"] += ["cmake/data/share/cmake-3.31/Help/a.rst", "cmake/data/share/vim/a.vim"]
    for name, files in layout.items():
        wheel(folder, name, "9.9.9", "py3-none-any", dict.fromkeys(files, b"x"))
    return folder


@pytest.fixture(scope="module")
def small(shelf: Path) -> Recipe:
    """The recipe, with tools that are on the shelf."""
    whole = recipe.load()
    digests = {name: engine.sha256(shelf / f"{name}-9.9.9-py3-none-any.whl") for name in whole.tools}
    return replace(whole, tools={name: Tool("9.9.9", (9,), (digest,)) for name, digest in digests.items()})


@pytest.fixture(autouse=True)
def _no_registry(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def make(folder: Path, small: Recipe, **more: Any) -> pack.Bundle:
    home = paths.home({"LLMCTL_HOME": str(folder.parent / "home")})
    source = tree(folder.parent / "llama.cpp")
    chosen: dict[str, Any] = {"pythons": [HERE], "source_dir": source, "recipe": small, "progress": lambda *_: None, **more}
    return pack.make(home, folder, **chosen)


def by_command(folder: Path, small: Recipe, *words: str) -> Result:
    """``llmctl pack FOLDER`` of the toy."""
    source = folder.parent / "llama.cpp"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCTL_HOME", str(folder.parent / "home"))
        patch.setattr("supervisor.recipe.load", lambda: small)
        words = (str(folder), "--python", HERE, "--source", str(source if source.exists() else tree(source)), *words)
        return CliRunner().invoke(command, words)


def lighten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wheel and no tools, where it doesn't matter what is packed: pip is run once instead of three times."""
    monkeypatch.setattr(pack, "requirements", lambda: ("click",))
    monkeypatch.setattr(pack, "_pack_tools", lambda *_: None)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, shelf: Path, small: Recipe) -> tuple[Path, Result]:
    """A whole bundle of the toy, and what the command said."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(shelf)), ("PIP_CONFIG_FILE", os.devnull)):
            patch.setenv(name, value)
        folder = tmp_path_factory.mktemp("made") / "bundle"
        return folder, by_command(folder, small, "--json")


@pytest.fixture
def bundle(packed: tuple[Path, Result]) -> Path:
    """A whole bundle of the toy."""
    return packed[0]


# What is in it


def test_the_source_travels_without_what_is_never_compiled(tmp_path: Path) -> None:
    assert set(pack.source_files(tree(tmp_path / "tree"))) == set(TREE) - LEFT


def test_an_archive_tells_no_times_and_no_owners(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("#!")
    (tmp_path / "run").chmod(0o700)
    pack.archive({"a/run": tmp_path / "run"}, tmp_path / "1.tar.xz")
    os.utime(tmp_path / "run", (1, 1))
    pack.archive({"a/run": tmp_path / "run"}, tmp_path / "2.tar.xz")
    assert (tmp_path / "1.tar.xz").read_bytes() == (tmp_path / "2.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "1.tar.xz") as tar:
        (member,) = tar.getmembers()
    assert (member.name, member.mode, member.mtime, member.uid) == ("a/run", 0o755, 0, 0)


def test_the_manifest_sums_up_every_other_file(bundle: Path) -> None:
    told = json.loads((bundle / pack.MANIFEST).read_text())
    files = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert set(told["sha256"]) == files - {pack.MANIFEST}
    assert {name for name, digest in told["sha256"].items() if engine.sha256(bundle / name) != digest} == set()
    assert (told["pythons"], told["llmctl"]) == ([HERE], importlib.metadata.version("llmctl"))
    assert {name for name in files if "/" not in name} >= {
        "run.sh",
        "measure.py",
        "told.py",
        "paced.py",
        "README.txt",
        "source.tar.xz",
    }


def test_the_tools_travel_without_manual_and_menus(bundle: Path) -> None:
    with tarfile.open(bundle / "tools.tar.xz") as tar:
        names = set(tar.getnames())
    kept = {
        "cmake-9.9.9/cmake/data/bin/cmake",
        "cmake-9.9.9/cmake/data/share/cmake-3.31/Modules/A.cmake",
        "ninja-9.9.9/bin/ninja",
    }
    assert names == kept


def test_no_folder_of_half_a_bundle_is_left(bundle: Path) -> None:
    assert {path.name for path in bundle.parent.iterdir()} <= {"bundle", "llama.cpp", "home"}


def test_llmctls_own_wheel(tmp_path: Path) -> None:
    made = pack.own_wheel(tmp_path)
    with zipfile.ZipFile(made) as packed:
        contents = {name: packed.read(name) for name in packed.namelist()}
    record = next(name for name in contents if name.endswith("/RECORD"))
    rows = {name: digest for name, digest, _ in csv.reader(contents[record].decode().splitlines())}
    assert set(rows) == set(contents)
    for name, digest in rows.items():
        want = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).rstrip(b"=").decode()
        assert digest in (f"sha256={want}", "" if name == record else "?"), name
    assert {"supervisor/cli.py", "supervisor/commands/up.py", "supervisor/data/presets/tiny.yaml"} <= set(contents)
    assert {"supervisor/data/build/recipe.yaml", "supervisor/data/build/pack/measure.py"} <= set(contents)
    script = f"import sys; sys.path.insert(0, {str(made)!r}); import supervisor; print(supervisor.__version__)"
    ran = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == made.name.split("-")[1]


def test_the_wheel_holds_what_hatchling_would_put_in(tmp_path: Path) -> None:
    """Which is what git doesn't ignore in the packages and the data folders that pyproject.toml names, without what it excludes."""
    import tomllib

    root = Path(__file__).parent.parent
    told = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    moved = {**{name: name for name in told["packages"]}, **told["force-include"]}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *moved]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    wanted = {
        f"{moved[name.split('/')[0]]}/{name.split('/', 1)[1]}"
        for name in listed
        if (root / name).is_file() and not name.startswith(tuple(f"{each}/" for each in told["exclude"]))
    }
    assert {"supervisor/grafana.json", "bench/run.py", "bench/workloads/chat.yaml"} <= wanted
    with zipfile.ZipFile(pack.own_wheel(tmp_path)) as made:
        assert {name for name in made.namelist() if ".dist-info/" not in name} == wanted


@pytest.mark.slow
def test_pip_takes_llmctls_own_wheel(tmp_path: Path) -> None:
    made = pack.own_wheel(tmp_path)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(tmp_path / "site"), str(made)]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "site" / "bin" / "llmctl").is_file()


def test_what_llmctl_needs_is_what_the_project_says() -> None:
    import tomllib

    told = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["dependencies"]

    def names(lines: list[str]) -> set[str]:
        return {re.split(r"[<>=\s;]", line)[0].replace("_", "-") for line in lines}

    assert names(list(pack.requirements())) == names(told)


# What goes wrong while it is made


def refusal(folder: Path, small: Recipe, **more: Any) -> Error:
    with pytest.raises(Error) as caught:
        make(folder, small, **more)
    left = {path.name for path in folder.parent.iterdir()} - {"llama.cpp", "home", folder.name, "full", "file"}
    assert left == set()
    return caught.value


def test_a_folder_that_is_in_use(tmp_path: Path, small: Recipe) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    error = refusal(tmp_path / "full", small)
    assert (error.exit, error.message) == (Exit.USAGE, f"{tmp_path / 'full'} is not empty, and a bundle is made new")
    assert (tmp_path / "full" / "x").exists()
    (tmp_path / "file").touch()
    assert "is not a folder" in refusal(tmp_path / "file", small).message


@pytest.mark.slow
def test_an_empty_folder_is_taken(tmp_path: Path, small: Recipe) -> None:
    (tmp_path / "bundle").mkdir()
    made = make(tmp_path / "bundle", small)
    assert (made.folder / "run.sh").is_file()
    assert made.bytes == sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
    assert [part.bytes for part in made.parts] == sorted((part.bytes for part in made.parts), reverse=True)


@pytest.mark.parametrize("version", ["3", "2.7", "3.10", "three", "3.12.1"])
def test_a_python_that_is_none(tmp_path: Path, small: Recipe, version: str) -> None:
    error = refusal(tmp_path / "bundle", small, pythons=[version])
    assert (error.exit, version in error.message, error.hint) == (Exit.USAGE, True, "--python 3.12")


@pytest.mark.slow
def test_a_python_whose_wheels_are_not_to_be_had(tmp_path: Path, small: Recipe) -> None:
    error = refusal(tmp_path / "bundle", small, pythons=["3.99"])
    assert error.exit == Exit.ENGINE
    assert "pip can't fetch llmctl's requirements for Python 3.99" in error.message


def test_no_registry(tmp_path: Path, small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "home"))
    error = refusal(tmp_path / "bundle", small)
    assert error.exit == Exit.ENGINE
    assert "pip can't fetch cmake 9.9.9" in error.message
    assert "network" in error.hint


def test_a_bundle_over_the_limit_names_its_largest_parts(tmp_path: Path, small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    lighten(monkeypatch)
    monkeypatch.setattr(pack, "LIMIT_BYTES", 1 << 15)
    error = refusal(tmp_path / "bundle", small)
    assert error.exit == Exit.USAGE
    assert re.search(r"would have [\d.]+ KiB, 32.0 KiB is the limit \(wheels [\d.]+ KiB, ", error.message)


def test_a_full_disk(tmp_path: Path, small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack, "archive", full)
    error = refusal(tmp_path / "bundle", small)
    assert error.message == f"{tmp_path / 'bundle'} can't be made: the disk is full"


def test_a_tree_that_is_no_llama_cpp(tmp_path: Path, small: Recipe) -> None:
    assert "has no CMakeLists.txt" in refusal(tmp_path / "bundle", small, source_dir=tmp_path / "none").message


def test_the_command(packed: tuple[Path, Result], tmp_path: Path, small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, done = packed
    told = json.loads(done.stdout)
    assert told["bytes"] == sum(told["parts"].values())
    assert told["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert (told["folder"], told["pythons"]) == (str(folder), [HERE])
    again = by_command(folder, small)
    assert isinstance(again.exception, Error)
    lighten(monkeypatch)
    assert "there: sh bundle/run.sh" in by_command(tmp_path / "bundle", small).stdout


# On the box


def ran(folder: Path, *words: str, home: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``sh run.sh`` in an environment that holds nothing of ours."""
    python = home.parent / "bin"
    python.mkdir(exist_ok=True)
    if not (python / "python3").exists():
        (python / "python3").symlink_to(Path(sys.executable).resolve())
    bare = {"PATH": f"{python}:{os.defpath}", "HOME": str(home.parent)}
    command = ["sh", str(folder / "run.sh"), "--home", str(home), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=bare | (env or {}), timeout=300)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """The fake, saying first what a real one says of its buffers."""

    def install(**knobs: Any) -> Path:
        fake = fakes.install(tmp_path / "engine" / "fake", **knobs)
        (tmp_path / "engine" / "log").write_text(LOG)
        script = tmp_path / "engine" / "llama-server"
        script.write_text(
            '#!/bin/sh\ncase "$*" in\n*--list-devices*) echo "Available devices:"; exit ;;\n'
            f'*--model*) cat {tmp_path}/engine/log ;;\nesac\nexec {fake} "$@"\n'
        )
        script.chmod(0o755)
        bench = tmp_path / "engine" / "llama-bench"
        bench.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/engine/asked\ncat <<'EOF'\n{BENCH}EOF\n")
        bench.chmod(0o755)
        return script

    yield install
    for start in fakes.events(tmp_path / "engine" / "fake", "start"):
        assert not Path("/proc", str(start["pid"])).exists()


def test_the_script_is_posix_shell(bundle: Path) -> None:
    for shell in ("sh", "dash"):
        if shutil.which(shell):
            subprocess.run([shell, "-n", str(bundle / "run.sh")], check=True)


@pytest.mark.parametrize(
    ("version", "hint"), [(HERE, f"where it was made, llmctl pack DIR --python {HERE}"), ("", "install Python 3.98 3.99")]
)
def test_a_box_without_a_fitting_python(bundle: Path, tmp_path: Path, version: str, hint: str) -> None:
    if not version:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python3").write_text(
            '#!/bin/sh\ncase "$1" in -c) echo 3.8 ;; -) exit 1 ;; *) echo "Python 3.8.10" ;; esac\n'
        )
        (tmp_path / "bin" / "python3").chmod(0o755)
    shutil.copytree(bundle, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / pack.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"{HERE}"', '"3.98",\n    "3.99"'))
    done = ran(tmp_path / "bundle", home=tmp_path / "home")
    here = platform.python_version() if version else "3.8.10"
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: this bundle is for Python 3.98 3.99, and Python {here} is here", f"try: {hint}"]


def test_a_damaged_bundle(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "bundle")
    with (tmp_path / "bundle" / "source.tar.xz").open("ab") as file:
        file.write(b"x")
    done = ran(tmp_path / "bundle", home=tmp_path / "home")
    assert done.returncode == 2
    assert re.match(r"error: source.tar.xz has sha256 \w{64}, \w{64} was packed\ntry: copy the bundle again\n$", done.stderr)
    (tmp_path / "bundle" / "source.tar.xz").unlink()
    assert ran(tmp_path / "bundle", home=tmp_path / "home").stderr.startswith("error: the bundle lacks source.tar.xz\n")


def test_planned_against_measured(bundle: Path, tmp_path: Path, server: Callable[..., Path]) -> None:
    out = tmp_path / "result.json"
    done = ran(bundle, "--engine", str(server()), "--only", "4B 16k np1", "--out", str(out), home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    assert (result["error"], result["skipped"], result["speeds"]) == ("", [], [])
    assert result["engine"]["build"] == engine.pin().build
    assert [case["case"] for case in result["cases"]] == ["4B-MTP 16k f16 np1", "4B 16k f16 np1"]
    for case in result["cases"]:
        assert case["measured"]["device"]["kv"] == pytest.approx(512.0)
        assert case["planned"]["device"]["kv"] == pytest.approx(512.0)
        buffers = case["buffers"]
        assert buffers["measured_mib"] == pytest.approx(sum(case["measured"]["device"].values()), abs=0.1)
        assert buffers["error_percent"] == pytest.approx(100 * (buffers["planned_mib"] / buffers["measured_mib"] - 1), abs=0.1)
        assert case["card"] is None
        assert case["anonymous_mib"] > 1
    (first, second) = fakes.events(tmp_path / "engine" / "fake", "start")
    assert "draft-mtp" in first["argv"]
    assert "draft-mtp" not in second["argv"]
    phantoms = sorted((tmp_path / "home").rglob("*.gguf"))
    assert [path.name for path in phantoms] == ["4B-MTP.gguf", "4B.gguf"]
    assert all(path.stat().st_blocks * 512 < 32 << 20 < 2 << 30 < path.stat().st_size for path in phantoms)


def test_speed(bundle: Path, tmp_path: Path, server: Callable[..., Path]) -> None:
    """Without a card: the small model's sprints are run, the others named, and no bandwidth is made up."""
    out = tmp_path / "result.json"
    words = ("--engine", str(server(tokens=64, pace_s=0.001)), "--only", "depth", "--out", str(out))
    done = ran(bundle, *words, home=tmp_path / "home")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    (entry,) = result["speeds"]
    assert entry["speed"] == "135M f16 depth 0 256"
    assert [(row["phase"], row["depth"], row["tps"]) for row in entry["rows"]] == [
        ("prefill", 0, 400.0),
        ("decode", 0, 50.0),
        ("prefill", 256, 300.0),
        ("decode", 256, 25.0),
    ]
    shallow, deep = (row["read_mib"] for row in entry["rows"] if row["phase"] == "decode")
    assert deep - shallow == pytest.approx(
        256 * 2 * 30 * 3 * 64 * 2 / (1 << 20), abs=0.1
    )  # two caches of 30 layers, 3 heads of 64
    assert "share_of_bandwidth" not in entry["rows"][1]
    assert (entry["cut"], result["bandwidth_gb_s"], result["cases"]) == ("", None, [])
    assert {one["speed"] for one in result["skipped"]} == {one.name for one in speed.SPRINTS if isinstance(one, speed.Depths)}
    assert {one["why"] for one in result["skipped"]} == {speed.WHY_NOT}
    assert "decode 25.0 t/s at 256" in done.stderr
    asked = (tmp_path / "engine" / "asked").read_text()
    assert "-p 64 -n 16 -d 0,256 -r 2 " in asked
    assert "-dev none -ngl 0" in asked
    done = ran(bundle, *words[:2], "--only", "135M np4", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["speeds"]
    assert (entry["slots"], entry["draft"]) == (4, 0)
    assert [(row["streams"], row["tokens"]) for row in entry["rows"]] == [(1, 16), (4, 64)]
    answered = fakes.events(tmp_path / "engine" / "fake", "finished")
    assert len(answered) == 1 + 2 * (1 + 4)  # its warm-up; of each row one more that isn't counted


@pytest.mark.slow
def test_a_start_that_fails_costs_its_case_alone(bundle: Path, tmp_path: Path, server: Callable[..., Path]) -> None:
    done = ran(bundle, "--engine", str(server(oom_above_ctx=16384)), "--only", "4B np1 f16", home=tmp_path / "home")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert {case["context"] for case in result["cases"]} == {16384}
    failed = [one["why"] for one in result["skipped"] if "64k" in one.get("case", "")]
    assert failed
    assert all("llama-server ended: the card's memory ran out" in why for why in failed)


@pytest.mark.slow
def test_the_deadline_cuts_off_and_says_so(bundle: Path, tmp_path: Path, server: Callable[..., Path]) -> None:
    words = ("--engine", str(server(never_healthy=True)), "--only", "4B 16k np1", "--minutes", "0.35")
    done = ran(bundle, *words, home=tmp_path / "home")
    assert done.returncode == 2
    result = json.loads(done.stdout)
    assert (result["cases"], result["error"]) == ([], "the time was up")
    assert [one["why"] for one in result["skipped"]] == ["not reached: the time was up"] * 2


def test_a_word_that_no_case_has(bundle: Path, tmp_path: Path) -> None:
    done = ran(bundle, "--only", "70B", home=tmp_path / "home")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: no case has the words '70B'\ntry: --only '{trial.CASES[0].name}'\n"


@pytest.mark.slow
def test_the_engine_is_built_once(bundle: Path, tmp_path: Path) -> None:
    """The toy compiles and is no server: what is built, and that its failure is told."""
    results = []
    for _ in range(2):
        done = ran(bundle, "--variant", "cpu", "--only", "4B 16k np1", home=tmp_path / "home")
        assert done.returncode == 2, done.stderr
        results.append(json.loads(done.stdout))
    assert [result["engine"]["built"] for result in results] == [True, False]
    assert results[0]["engine"]["commit"] == "unknown"
    assert all(one["why"].startswith("llama-server ended") for one in results[0]["skipped"])
    tools = {path.name for path in (tmp_path / "home").rglob("llama-*") if path.is_file()}
    assert tools == {"llama-server", "llama-bench"}


@pytest.mark.slow
def test_a_box_without_a_compiler(bundle: Path, tmp_path: Path) -> None:
    done = ran(bundle, "--variant", "cpu", home=tmp_path / "home", env={"CXX": "/nonexistent"})
    assert done.returncode == 2
    result = json.loads(done.stdout)
    assert result["error"].startswith("there is no C++ compiler (/nonexistent in PATH)")
    assert len(result["skipped"]) == len(trial.CASES) + len(speed.SPRINTS) + len(speed.SPRINTS_WITHOUT_A_CARD)
    assert done.stderr.splitlines()[-2:] == [f"error: {result['error']}", "try: apt install g++"]


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    """The bundle's script as a module."""
    path = paths.data_folder("build") / "pack" / "measure.py"
    spec = importlib.util.spec_from_file_location("measure", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("click-8.5.1-py3-none-any.whl", True),
        ("uvloop-0.23.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("uvloop-0.23.0-cp311-cp311-manylinux2014_x86_64.whl", False),
        ("psutil-7.2.2-cp36-abi3-manylinux2010_x86_64.whl", True),
        ("hf_xet-1.8.0-cp313-abi3-manylinux2014_x86_64.whl", False),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("x-1-cp312-cp312t-linux_x86_64.whl", False),
    ],
)
def test_the_wheels_of_another_python_stay_packed(measure: ModuleType, name: str, fits: bool) -> None:
    assert measure.fits(name, (3, 12)) is fits


def test_the_cases_are_those_that_were_asked_for() -> None:
    """4B and 9B with and without MTP, 1, 2 and 4 slots, 16k to 128k; every one has a header, no two are one."""
    assert {(case.model, case.mtp) for case in trial.CASES} == {("4B", False), ("4B", True), ("9B", False), ("9B", True)}
    assert {case.slots for case in trial.CASES} == {1, 2, 4}
    assert {one.case.slots for one in speed.SPRINTS} == {1, 2, 4}
    assert {case.context for case in trial.CASES} == {16384, 32768, 65536, 131072}
    assert len({case.name for case in trial.CASES}) == len(trial.CASES)
    for name in trial.HEADERS.values():
        assert (paths.data_folder("presets") / "headers" / name).is_file()


@pytest.mark.slow
def test_the_true_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer_home: paths.Home, real_engine: engine.Engine
) -> None:
    """From the registry, under the limit; it measures one case with the engine at hand, without a network."""
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name)
    made = pack.make(outer_home, tmp_path / "bundle", progress=lambda *_: None)
    assert made.bytes < pack.LIMIT_BYTES
    words = ("--engine", str(real_engine.server), "--minutes", "10", "--only", "4B-MTP 16k np1")
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        ["sh", str(made.folder / "run.sh"), *words], capture_output=True, text=True, check=False, env=bare, timeout=900
    )
    result = json.loads(done.stdout)
    assert (done.returncode, result["error"]) == (0, ""), done.stderr
    (case,) = result["cases"]
    assert -1 <= case["buffers"]["error_percent"] <= 3


@pytest.fixture(scope="module")
def paced() -> ModuleType:
    """What the bundle's script imports for speed."""
    path = paths.data_folder("build") / "pack" / "paced.py"
    spec = importlib.util.spec_from_file_location("paced", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(draft: int, *steps_ms: float, slots: int = 1, streams: int = 1) -> dict[str, Any]:
    """Of ``speeds``."""
    rows = [{"streams": streams, "step_ms": each} for each in steps_ms]
    return {"model": "4B", "slots": slots, "draft": draft, "rows": rows}


def test_what_guessing_costs_and_from_where_on_it_pays(paced: ModuleType) -> None:
    """A round of 15 ms beside steps of 10 has to make 1.5 tokens."""
    depth = {"model": "4B", "rows": [{"depth": 0, "phase": "decode", "tps": 1.0}]}
    (found,) = paced.speculation([depth, entry(0, 9.0, 11.0), entry(1, 14.0), entry(1, 16.0), entry(1, 90.0, slots=4, streams=4)])
    assert (found["plain_ms"], found["round_ms"], found["cost"], found["break_even"]) == (10.0, 15.0, 1.5, 0.5)
    assert found["tps_at"]["0.5"] == found["plain_tps"] == 100.0
    assert paced.summary([found]) == "4B guessing 1, 1 of 1 slots: a round costs 1.50 steps, pays from an acceptance of 0.50 on"
    (never,) = paced.speculation([entry(0, 10.0), entry(1, 21.0)])
    assert never["break_even"] is None
    assert "never pays" in paced.summary([never])


def test_the_share_of_the_bandwidth(paced: ModuleType) -> None:
    """64 tokens after 1000: at 448 GB/s, the RTX 3070's, a step that reads 4.48 GB could be made 100 times a second."""
    from supervisor.estimate import Estimate, Settings

    chosen = Settings(context=1024)
    plan = Estimate({"weights": 4_480_000_000 - 1000 * 1024, "kv": 1024 * 1024}, {}, 0)
    seen = speed.AtDepth(1000, False, 1, 80.0, 0.0)
    row = paced._row(seen, speed.Depths("4B", (1000,)), plan, chosen, 448e9)
    assert (row["roofline_tps"], row["share_of_bandwidth"]) == (100.0, 0.8)
    assert "share_of_bandwidth" not in paced._row(seen, speed.Depths("4B", (1000,)), plan, chosen, None)


def test_what_cuts_a_sprint_off_leaves_what_was_seen(paced: ModuleType, tmp_path: Path) -> None:
    from supervisor.estimate import Estimate, Settings

    (tmp_path / "llama-bench").write_text(f"#!/bin/sh\ncat <<'EOF'\n{BENCH.splitlines()[0]}\nEOF\nexit 1\n")
    (tmp_path / "llama-bench").chmod(0o755)
    there = engine.Engine(tmp_path / "llama-server", "k", "native", 1, "c")
    into: list[dict[str, Any]] = []
    more = {"device": "none", "threads": 1, "bandwidth": None, "into": into}
    with pytest.raises(Error, match="llama-bench ended"):
        paced.run(speed.Depths("4B", (0,)), there, tmp_path, Estimate({"weights": 1}, {}, 0), Settings(context=256), **more)
    (kept,) = into
    assert [row["tps"] for row in kept["rows"]] == [400.0]
    assert kept["cut"].startswith("llama-bench ended")
