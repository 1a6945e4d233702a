"""From a repository of the hub to an answer, in one command: plan, download, MTP on a recurrent model, warm prompt, what it allocated.

The model is a made-up Qwen3.5 of some MB with an MTP head, in the real engine; the hub is a stand-in on loopback.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from supervisor import phantom
from supervisor.engine import Engine
from supervisor.errors import Exit
from tests import console
from tests.conftest import WAIT_S, Box
from tests.fakes import gguf
from tests.fakes.hub import Site, serve

SYSTEM = "a careful librarian who never forgets to be polite " * 4
PRESET = """\
about: made up
model:
  file: small.gguf
  bytes: {bytes}
  sha256: {sha256}
  mtp: {mtp}
  hub: {{repository: some/small, revision: r1}}
context: 2048
speculative: mtp
draft_length: 2
warm_prompt: {warm}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    phantom.write(gguf.qwen35(), path)
    return path.read_bytes()


@pytest.fixture
def site(model: bytes) -> Iterator[Site]:
    made = Site()
    made.files["/some/small/resolve/r1/small.gguf"] = model
    server = serve(made)
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def box(tmp_path: Path, site: Site, real_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.setenv("HF_ENDPOINT", site.address)
    made = Box(tmp_path / "home", real_engine.server, tmp_path / "unused")
    yield made
    made.close()


def write(box: Box, model: bytes, **more: str) -> Path:
    folder = box.home.presets
    folder.mkdir(parents=True)
    facts = {"bytes": str(len(model)), "sha256": hashlib.sha256(model).hexdigest(), "mtp": "yes", "warm": SYSTEM} | more
    (folder / "small.yaml").write_text(PRESET.format(**facts))
    return folder / "small.yaml"


def here(box: Box) -> dict[str, str]:
    """The box's variables, for a command that needs no process of its own."""
    return {"LLMCTL_HOME": str(box.root), "LLMCTL_ENGINE": str(box.engine)}


def ask(address: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM.strip()}, {"role": "user", "content": "Which book?"}]
    body = {"model": "small", "max_tokens": 8, "messages": messages}
    found = httpx2.post(f"{address}/v1/chat/completions", json=body, timeout=WAIT_S).json()
    assert isinstance(found, dict)
    return found


def test_one_command_from_the_hub_to_an_answer(box: Box, site: Site, model: bytes) -> None:
    write(box, model)
    assert "isn't known here" in console.llmctl(here(box), "plan", "small").stderr
    planned = json.loads(box.llmctl("plan", "small", "--online", "--json").stdout)
    assert planned["device"]["terms"]["draft"] > 0
    assert not list(box.home.models.rglob("*.gguf"))  # a header, not the file

    done = box.llmctl("up", "small", "--port", "0", "--detach", "--json")
    assert done.returncode == 0, done.stderr
    timings = ask(json.loads(done.stdout)["address"])["timings"]
    assert timings["cache_n"] > len(SYSTEM) // 2  # a byte a token here: the whole system message, by the checkpoint at its end
    assert timings["prompt_n"] < timings["cache_n"]
    assert timings["draft_n"] > 0
    (file,) = box.home.models.rglob("*.gguf")
    assert file.read_bytes() == model

    (running,) = json.loads(box.llmctl("status", "--json").stdout)["presets"]
    memory = running["memory"]
    for place in ("device", "host"):
        for term, seen in memory["allocated_mib"][place].items():
            assert memory["planned_mib"][place][term] == pytest.approx(seen, abs=0.02), term
    shown = console.llmctl(here(box), "status").stdout
    assert "draft" in shown
    assert "+0.0" in shown
    assert box.llmctl("down").returncode == 0
    again = json.loads(console.llmctl(here(box), "plan", "small", "--json").stdout)
    assert "the memory is what the engine allocated before, with the same flags" in again["reasons"]


def test_the_file_of_the_other_repository_is_refused_before_a_start(box: Box, model: bytes) -> None:
    write(box, model, mtp="no")
    done = console.llmctl(here(box), "up", "small", "--port", "0", "--detach")
    assert done.returncode == Exit.CONFIG  # speculative: mtp on a file that has no head, by the preset's own word
    (box.home.presets / "small.yaml").write_text(
        (box.home.presets / "small.yaml").read_text().replace("speculative: mtp", "speculative: off")
    )
    done = box.llmctl("up", "small", "--port", "0", "--detach")
    assert done.returncode == Exit.MODEL
    assert done.stderr.splitlines()[-2].endswith("small.gguf has an MTP head, and small takes it for a file with none")


def test_a_wrong_file_is_not_kept(box: Box, model: bytes) -> None:
    write(box, model, sha256="0" * 64)
    done = box.llmctl("up", "small", "--port", "0", "--detach")
    assert done.returncode == Exit.MODEL
    assert not list(box.home.models.rglob("small.gguf"))
