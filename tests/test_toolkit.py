"""The CUDA toolkit: which one, why not, and what the wheels leave out."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from supervisor import paths, pip, toolkit
from supervisor.errors import Error, Exit
from supervisor.toolkit import Toolkit

CUDA_H = """
#define cuMemAlloc                          cuMemAlloc_v2
#define cuStreamSync __CUDA_API_PTSZ(cuStreamSync)
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
CUresult CUDAAPI cuGetErrorString(CUresult error, const char **pStr);
typedef CUresult (CUDAAPI *CUfunc)(int);
"""


def quiet(*_: object) -> None:
    pass


@pytest.fixture
def home(tmp_path: Path) -> paths.Home:
    return paths.home({"LLMCTL_HOME": str(tmp_path / "home")})


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A pip that lays out a small toolkit. The list has one entry for each time it was asked."""
    asked: list[int] = []

    def install(packages: tuple[pip.Pinned, ...], target: Path) -> None:
        asked.append(len(packages))
        root = target / "nvidia/cu13"
        for name in ("bin/nvcc", "include/cuda.h", "lib/libcudart.so.13", "lib/libcublas.so.13", "lib/libcublasLt.so.13"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(CUDA_H if name.endswith(".h") else "")

    monkeypatch.setattr(pip, "install", install)
    return asked


def fake_nvcc(root: Path, release: str = "12.4", *, cublas: bool) -> Path:
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f'#!/bin/sh\ncase $1 in --version) echo "Cuda compilation tools, release {release}, V{release}.99";;\n'
        f'-dryrun) echo "#$ TOP={root}/bin/.." >&2;; esac\n'
    )
    nvcc.chmod(0o755)
    if cublas:
        (root / "lib64").mkdir()
        (root / "lib64" / "libcublas.so").touch()
    return nvcc


def test_a_system_toolkit_needs_cublas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolkit, "SYSTEM_LIBRARIES", ())
    nvcc = fake_nvcc(tmp_path / "whole", cublas=True)
    assert toolkit.system({"CUDACXX": str(nvcc)}) == Toolkit(tmp_path / "whole", nvcc, "12.4", "V12.4.99", "system")
    fake_nvcc(tmp_path / "half", cublas=False)
    assert (
        toolkit.system({"CUDA_HOME": str(tmp_path / "half")}) == f"{tmp_path}/half/bin/nvcc (CUDA 12.4) has no cuBLAS beside it"
    )


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, home: paths.Home) -> None:
    monkeypatch.setattr(toolkit, "SYSTEM_PLACES", ())
    with pytest.raises(Error, match=r"no usable CUDA toolkit: there is no nvcc") as caught:
        toolkit.choose(home, "system", driver_major=0, progress=quiet, env={"PATH": "/nonexistent"})
    assert (caught.value.exit, caught.value.hint) == (Exit.ENGINE, "llmctl build --toolkit wheels")


def test_the_wheels_are_completed_once(home: paths.Home, wheels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "SYSTEM_PLACES", ())
    kit = toolkit.choose(home, "auto", driver_major=0, progress=quiet, env={"PATH": "/nonexistent"})
    assert (kit.version, kit.origin, kit.nvcc.is_file()) == ("13.0", "wheels", True)
    assert [path.name for path in kit.runtime] == ["libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"]
    lib = kit.root / "lib"
    assert {(path.name, path.readlink().name) for path in lib.iterdir() if path.is_symlink()} == {
        ("libcudart.so", "libcudart.so.13"),
        ("libcublas.so", "libcublas.so.13"),
        ("libcublasLt.so", "libcublasLt.so.13"),
    }
    assert (kit.root / "lib64").resolve() == lib.resolve()
    stub = ctypes.CDLL(str(lib / "stubs" / "libcuda.so"))
    assert all(hasattr(stub, name) for name in ("cuMemAlloc", "cuMemAlloc_v2", "cuGetErrorString", "cuStreamSync"))
    described = subprocess.run(["readelf", "-d", lib / "stubs" / "libcuda.so"], capture_output=True, text=True, check=True).stdout
    assert "[libcuda.so.1]" in described
    assert toolkit.choose(home, "wheels", driver_major=580, progress=quiet) == kit
    assert wheels == [6]


def test_a_failed_assembly_leaves_nothing(home: paths.Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(packages: tuple[pip.Pinned, ...], target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pip, "install", install)
    with pytest.raises(Error, match="the disk is full"):
        toolkit.choose(home, "wheels", driver_major=0, progress=quiet)
    assert list(home.toolkits.iterdir()) == []


def test_an_old_driver(home: paths.Home, tmp_path: Path, wheels: list[int]) -> None:
    message = "the NVIDIA driver is 550, but CUDA 13.0 of the PyPI wheels needs 580 or later, and NVIDIA's CUDA 12 wheel"
    with pytest.raises(Error, match=message) as caught:
        toolkit.choose(home, "wheels", driver_major=550, progress=quiet)
    assert "--toolkit system" in caught.value.hint
    env = {"CUDACXX": str(fake_nvcc(tmp_path / "new", "13.1", cublas=True))}
    with pytest.raises(Error, match=message):
        toolkit.choose(home, "auto", driver_major=550, progress=quiet, env=env)
    env = {"CUDACXX": str(fake_nvcc(tmp_path / "old", "12.4", cublas=True))}
    assert toolkit.choose(home, "auto", driver_major=550, progress=quiet, env=env).version == "12.4"
    assert wheels == []


def test_versions_are_exact() -> None:
    wanted = toolkit.wheels()
    assert {package.name for package in wanted.packages} == {
        *("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "nvidia-cublas"),
    }
    assert all(package.version.startswith("13.0.") and len(package.sha256[0]) == 64 for package in wanted.packages)


def test_host_limit(tmp_path: Path) -> None:
    kit = Toolkit(tmp_path, tmp_path / "bin/nvcc", "13.0", "", "system")
    assert kit.host_limit is None
    (tmp_path / "include/crt").mkdir(parents=True)
    (tmp_path / "include/crt/host_config.h").write_text("#if __GNUC__ > 15\n#error -- unsupported GNU version!\n")
    assert kit.host_limit == 15
