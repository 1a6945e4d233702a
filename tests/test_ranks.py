"""The package's order, read off its source: a module imports only what stands above it here. ``supervisor`` says what a rank is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bench
import supervisor

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "supervisor"

RANKS: tuple[tuple[str, ...], ...] = (
    # 0 words
    ("errors", "units", "paths"),
    # 1 nouns, a frozen value and its one reader
    (
        *("words", "value", "option", "model", "passthrough", "profile", "rules", "sampling", "preset"),
        *("memory", "hardware", "cards", "ggml", "cursor", "gguf", "architecture", "engine", "recipe", "config", "record"),
    ),
    # 2 decisions, pure
    (
        *("layout", "graph", "estimate", "step", "allocation", "budget", "derive", "plan", "argv", "warmup"),
        *(
            "symptoms",
            "causes",
            "stepdown",
            "lifecycle",
            "progress",
            "suspects",
            "admission",
            "placement",
            "routes",
            "routing",
            "gate",
            "openapi",
        ),
        *("ask", "fault", "sse", "pace", "meter", "assemble", "choices", "messages", "responses", "native", "shorten"),
        *("energy", "speculation", "likeness", "why", "glance", "row"),
    ),
    # 3 effects, one outside thing each
    (
        *("pip", "source", "toolkit", "toolchain", "launcher", "build", "kept", "hub", "store", "headers", "measured", "phantom"),
        *("conceded", "logfile", "child", "scene", "vram", "power", "trial", "speed", "pack", "upstream", "rundir", "running"),
        *("schema", "ledgerfile", "ledger", "accounts", "metrics", "logs"),
    ),
    # 4 wiring
    (
        *("connection", "line", "order", "catalog", "ward", "watch", "keeper", "arbiter"),
        *("reply", "length", "proxy", "live", "control", "app", "serve"),
    ),
    # 5 edge
    ("render", "following", "planning", "measuring", "spendlog", "dashboard", "screen", "commands", "cli", "docs", "__main__"),
)
ORDER = [name for rank in RANKS for name in rank]
RANK = {name: number for number, rank in enumerate(RANKS) for name in rank}

TESTED_IN = {
    "profile": "test_preset",
    "ggml": "test_gguf",
    "cursor": "test_gguf",
    "derive": "test_plan",
    "recipe": "test_build",
    "trial": "test_pack",
    "kept": "test_headers",
    "planning": "test_order",
    "step": "test_speed",
    "measuring": "test_bench",
    "toolchain": "test_build",
    "pip": "test_store",
    "upstream": "test_proxy",
    "choices": "test_assemble",
    "messages": "test_assemble",
    "responses": "test_assemble",
    "native": "test_assemble",
    "ward": "test_arbiter",
    "watch": "test_keeper",
    "symptoms": "test_causes",
    "running": "test_control",
    "catalog": "test_arbiter",
    "length": "test_shorten",
    "openapi": "test_control",
    "following": "test_steering",
    "app": "test_control",
    "live": "test_control",
    "record": "test_ledger",
    "spendlog": "test_usage",
    "glance": "test_top",
    "dashboard": "test_top",
    "screen": "test_top",
    "schema": "test_ledger",
    "ledgerfile": "test_ledger",
    "row": "test_ledger",
    "serve": "test_rounds",
    "__main__": "test_commands",
}
"""Modules without a test file of their own name, and where they are tested instead."""

IO_MODULES = frozenset(
    [
        "os",
        "socket",
        "subprocess",
        "sqlite3",
        "httpx2",
        "asyncio",
        "threading",
        "shutil",
        "tempfile",
        "fcntl",
        "select",
        "time",
        "datetime",
        "random",
        "selectors",
        "ssl",
        "multiprocessing",
        "concurrent",
        "io",
        "urllib",
        "http",
        "psutil",
        "huggingface_hub",
        "uvicorn",
        "starlette",
    ]
)

SOURCES = {
    path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if "data" not in path.relative_to(PACKAGE).parts
}
MODULES = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES} - {"__init__"}


def module_of(path: Path) -> str:
    """``supervisor/commands/up.py`` is of ``commands``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every dotted name that is imported, anywhere in the file, with its line; ``from a import b`` is ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def of_ours(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The modules of the package that are imported."""
    for name, line in imports(tree):
        parts = name.split(".")
        if parts[0] == "supervisor" and len(parts) > 1 and not parts[1].startswith("__"):
            yield parts[1], line


def test_every_module_has_its_one_place() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) == MODULES


def test_a_module_imports_only_what_stands_above_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, tree in SOURCES.items()
        for name, line in of_ours(tree)
        if module_of(path) != "__init__" and ORDER.index(name) >= ORDER.index(module_of(path))
    ]
    assert wrong == []


def test_the_package_itself_imports_nothing() -> None:
    assert list(imports(SOURCES[PACKAGE / "__init__.py"])) == []


@pytest.mark.parametrize("name", [name for name in ORDER if RANK[name] <= 2])
def test_ranks_0_to_2_hold_no_async(name: str) -> None:
    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
    found = [node.lineno for node in ast.walk(SOURCES[PACKAGE / f"{name}.py"]) if isinstance(node, kinds)]
    assert found == []


@pytest.mark.parametrize("name", RANKS[2])
def test_rank_2_does_no_io_and_reads_no_clock(name: str) -> None:
    tree = SOURCES[PACKAGE / f"{name}.py"]
    assert [(module, line) for module, line in imports(tree) if module.split(".")[0] in IO_MODULES] == []
    methods = {"read_text", "read_bytes", "write_text", "write_bytes", "exists", "is_file", "stat", "iterdir", "unlink", "mkdir"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("open", "print", "input")] == []
    assert [call.lineno for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in methods] == []


def test_the_control_plane_never_imports_bench_but_inside_a_function_of_its_edge() -> None:
    for path, tree in SOURCES.items():
        found = [line for name, line in imports(tree) if name.split(".")[0] == "bench"]
        if module_of(path) in ("commands", "measuring", "docs"):
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) or is_for_types(node)]
            inside = [line for node in nodes for _, line in imports(node)]
            found = [line for line in found if line not in inside]
        assert found == [], path


def is_for_types(node: ast.AST) -> bool:
    """Whether it is ``if TYPE_CHECKING``."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_only_the_edge_prints() -> None:
    for path, tree in SOURCES.items():
        if RANK.get(module_of(path), 0) == 5:
            continue
        assert [line for name, line in imports(tree) if name.split(".")[0] in ("rich", "click")] == [], path
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        assert [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"] == [], path


def test_only_the_data_files_readers_parse_yaml() -> None:
    """A preset's words would become booleans anywhere else."""
    users = {module_of(path) for path, tree in SOURCES.items() for name, _ in imports(tree) if name.split(".")[0] == "yaml"}
    assert users <= {"words", "engine", "recipe", "toolkit"}


def test_the_launcher_stands_alone() -> None:
    """It runs before every child, without site-packages."""
    assert {name for name, _ in imports(SOURCES[PACKAGE / "launcher.py"])} <= {"ctypes", "os", "signal", "sys"}


def test_every_module_has_its_tests() -> None:
    for name in MODULES:
        own = ROOT / "tests" / f"test_{name}.py"
        if name in TESTED_IN:
            assert not own.exists(), f"{name} has tests of its own: take it off the list"
            own = ROOT / "tests" / f"{TESTED_IN[name]}.py"
        assert own.is_file(), f"{name} has no tests"
    assert set(TESTED_IN) <= MODULES


def test_the_packages_docstring_tells_the_same_ranks() -> None:
    """Every module stands in it, at its rank."""
    _, *parts = re.split(r"^(\d)\. ", supervisor.__doc__ or "", flags=re.MULTILINE)
    told = {int(rank): set(re.findall(r"``(\w+)/?``", text)) for rank, text in zip(parts[::2], parts[1::2], strict=True)}
    assert told == {rank: {name for name in RANK if RANK[name] == rank} - {"__main__"} for rank in range(len(RANKS))}


BENCH_RANKS: tuple[tuple[str, ...], ...] = (
    # 1 nouns
    ("workload", "ask", "sample", "figures", "result", "llamabench", "trace"),
    # 2 decisions
    ("intervals", "sides", "compare", "flags", "traffic", "text"),
    # 3 effects
    ("exchange", "here", "target", "prompts", "nvml", "gauges", "load", "tap"),
    # 4 all of it, and how it is shown
    ("run", "columns", "show", "chart", "plots", "page"),
)
BENCH = ROOT / "bench"
BENCH_ORDER = [name for rank in BENCH_RANKS for name in rank]
BENCH_TESTED_IN = {
    "ask": "test_asks",
    "sample": "test_result",
    "sides": "test_compare",
    "here": "test_target",
    "nvml": "test_gauges",
    "run": "test_bench",
    "columns": "test_show",
    "chart": "test_page",
    "plots": "test_page",
}


def test_bench_lies_in_ranks_too() -> None:
    """Each module imports only what stands before it; ranks 1 and 2 are pure, but for a noun's own file."""
    assert {path.stem for path in BENCH.glob("*.py")} - {"__init__"} == set(BENCH_ORDER)
    wrong = []
    for number, rank in enumerate(BENCH_RANKS, 1):
        for name in rank:
            tree = ast.parse((BENCH / f"{name}.py").read_text())
            for module, line in imports(tree):
                parts = module.split(".")
                if parts[0] == "bench" and BENCH_ORDER.index(parts[1]) >= BENCH_ORDER.index(name):
                    wrong.append(f"bench/{name}.py:{line} imports {module}")
                if number < 3 and parts[0] in IO_MODULES - {"os", "random"}:
                    wrong.append(f"bench/{name}.py:{line} imports {module}")
                if parts[:2] == ["bench", "proof"]:
                    wrong.append(f"bench/{name}.py:{line} imports {module}")
            if number < 3:
                wrong += [
                    f"bench/{name}.py:{node.lineno} is async" for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
                ]
            own = BENCH_TESTED_IN.get(name, f"test_{name}")
            assert (ROOT / "tests" / f"{own}.py").is_file(), name
    assert wrong == []


def test_benchs_docstring_tells_the_same_ranks() -> None:
    _, *parts = re.split(r"^(\d)\. ", bench.__doc__ or "", flags=re.MULTILINE)
    told = {int(rank): set(re.findall(r"``(\w+)``", text)) for rank, text in zip(parts[::2], parts[1::2], strict=True)}
    assert told == {number: set(rank) for number, rank in enumerate(BENCH_RANKS, 1)}


WALL_CLOCK = {"ledger", "ledgerfile", "control", "connection"}
"""Records, the age of a model, the Date header: what people read. Everything that waits or compares uses a clock that nobody can set."""


def test_nothing_that_runs_for_long_depends_on_the_wall_clock() -> None:
    serving = {name for rank in RANKS[2:5] for name in rank} - {"build", "source", "toolkit", "pack", "hub", "store", "kept"}
    for path, tree in SOURCES.items():
        if module_of(path) not in serving - WALL_CLOCK:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                named = f"{node.value.id}.{node.attr}"
                assert named not in ("time.time", "datetime.now", "datetime.utcnow", "date.today"), f"{path.name}:{node.lineno}"
