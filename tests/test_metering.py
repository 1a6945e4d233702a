"""The account of ``bench.proof.metering``, small: every record is what the engine did, in every figure."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.proof import metering_account


def test_every_request_has_one_record_and_its_figures_are_the_engines(tmp_path: Path) -> None:
    """Of every API, streamed and not; some are left, some are cut, and the engine dies in between. Real processes, real clients."""
    found = asyncio.run(metering_account.run(tmp_path, count=300, seed=3, deaths=1))
    assert found.missing == []
    assert found.surplus == []
    assert found.wrong == []
    assert found.wrong_sums == []
    assert found.statuses.keys() == {"ok", "cancelled", "truncated", "error", "refused"}
    assert found.deaths == 3  # and the two presets' at the end
    assert found.sums["ok"]["draft_accepted"] > 0
    assert found.sums["ok"]["cached_tokens"] > 0
