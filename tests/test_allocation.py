"""What is read out of the engine's log.

``cpu-mtp-np2.log`` was written by b11312. ``cuda-mtp-q8_0.log`` is composed: its figures are those logged on an RTX 4060 Laptop (a
Qwen3.5-4B with its MTP head at 128k), its lines follow the format strings of b11312.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import allocation
from supervisor.allocation import Allocation
from supervisor.units import MIB

LOGS = Path(__file__).parent / "data" / "allocations"
CPU = (LOGS / "cpu-mtp-np2.log").read_text()
CUDA = (LOGS / "cuda-mtp-q8_0.log").read_text()


def mib(found: Allocation | None) -> tuple[dict[str, float], dict[str, float]]:
    """Device and host terms in MiB, as the log writes them."""
    assert found is not None
    return ({k: round(v / MIB, 2) for k, v in found.device.items()}, {k: round(v / MIB, 2) for k, v in found.host.items()})


def test_a_cpu_start_with_an_mtp_head() -> None:
    device, host = mib(allocation.parse(CPU))
    assert device == {"weights": 501.32, "kv": 96.0, "state": 115.59, "compute": 46.3, "draft": 43.02}
    assert host == {"repacked": 228.69, "output": 3.78}


def test_a_card_is_the_device_and_the_rest_is_the_host() -> None:
    found = allocation.parse(CUDA)
    device, host = mib(found)
    assert device == {"weights": 3141.27, "kv": 2176.0, "state": 201.0, "compute": 690.28, "draft": 682.02}
    assert host == {"embedding": 497.31, "output": 1.9, "compute": 276.3}
    assert found is not None
    assert found.cuda


def test_layers_left_on_the_cpu_are_the_hosts() -> None:
    partial = CUDA.replace(
        "llama_kv_cache:      CUDA0 KV buffer size =  2176.00 MiB",
        "llama_kv_cache:        CPU KV buffer size =   272.00 MiB\n"
        "0.02.714.861 I llama_kv_cache:      CUDA0 KV buffer size =  1904.00 MiB",
    )
    device, host = mib(allocation.parse(partial))
    assert device["kv"] == 1904.0
    assert host["layers"] == 272.0


def test_two_caches_of_one_context_are_added() -> None:
    window = "llama_kv_cache:        CPU KV buffer size =    48.00 MiB"
    log = CPU.replace("llama_memory_recurrent:        CPU RS buffer size =   115.59 MiB", window)
    device, _ = mib(allocation.parse(log))
    assert device["kv"] == 144.0


def test_a_compute_buffer_that_is_reserved_again_counts_once() -> None:
    assert CPU.count("compute buffer size =    27.02 MiB") == 2
    grown = CPU[::-1].replace("27.02"[::-1], "28.02"[::-1], 1)[::-1]
    device, _ = mib(allocation.parse(grown))
    assert device["draft"] == 44.02


def test_only_the_last_start_counts() -> None:
    assert mib(allocation.parse(CUDA + CPU)) == mib(allocation.parse(CPU))
    assert mib(allocation.parse(CPU + CUDA)) == mib(allocation.parse(CUDA))


def test_a_draft_models_own_weights_are_drafting() -> None:
    second = "\n0.03.000.000 I load_tensors:   CPU_Mapped model buffer size =   100.00 MiB\n"
    device, _ = mib(allocation.parse(CPU + second))
    assert device["draft"] == 143.02
    assert device["weights"] == 501.32


@pytest.mark.parametrize(
    "log", ["", "error: invalid argument", "0.00 I srv  llama_server: initializing ...\n", CPU.split("load_tensors")[0]]
)
def test_a_log_without_buffers_tells_nothing(log: str) -> None:
    assert allocation.parse(log) is None


def test_a_start_that_broke_off_tells_nothing_of_the_one_before() -> None:
    assert allocation.parse(CPU + "0.00.001.826 I srv  llama_server: initializing ...\n") is None


def test_a_prompt_that_looks_like_a_line_but_is_none() -> None:
    assert allocation.parse("the CPU model buffer size = about 5 MiB") is None
