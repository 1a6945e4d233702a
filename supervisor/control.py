"""llmctl's own routes: is it well, what can it serve, what runs. They read state for display and change nothing."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from supervisor import __version__
from supervisor.arbiter import Arbiter, Ward
from supervisor.errors import Error, Exit
from supervisor.ledger import Ledger
from supervisor.lifecycle import State
from supervisor.reply import envelope
from supervisor.units import MIB


class Control:
    """The handlers. ``token`` is the run folder's, so that only its owner reads ``/llmctl/…``."""

    def __init__(self, arbiter: Arbiter, ledger: Ledger, *, engine: str, address: str, token: str) -> None:
        self._arbiter = arbiter
        self._ledger = ledger
        self._engine = engine
        self._address = address
        self._token = token
        self._since = int(time.time())

    async def health(self, _: Request) -> Response:
        """200 when every preset can answer, else 503 and the states."""
        states = {name: ward.state.value for name, ward in self._arbiter.wards.items()}
        well = all(ward.state is State.READY for ward in self._arbiter.wards.values())
        return JSONResponse({"status": "ok" if well else "unavailable", "presets": states}, 200 if well else 503)

    async def models(self, _: Request) -> Response:
        """OpenAI's list, with what a client wants to know before it sends a prompt."""
        return JSONResponse({"object": "list", "data": [self._model(ward) for ward in self._arbiter.wards.values()]})

    def _model(self, ward: Ward) -> dict[str, Any]:
        preset = ward.launch.preset
        return {
            "id": ward.name,
            "object": "model",
            "created": self._since,
            "owned_by": "llmctl",
            "state": ward.state.value,
            "meta": {"about": preset.about, "file": preset.model.file, "n_ctx": ward.slot_context, "slots": preset.slots},
        }

    async def status(self, request: Request) -> Response:
        """What ``llmctl status --json`` prints."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            error = Error(
                "this route needs the admin right of this start",
                exit=Exit.USAGE,
                hint="llmctl status",
                status=401,
                code="invalid_api_key",
            )
            return JSONResponse(envelope(error), error.status)
        return JSONResponse(
            {
                "address": self._address,
                "pid": os.getpid(),
                "version": __version__,
                "engine": self._engine,
                "records_lost": self._ledger.lost,
                "presets": [describe(ward) for ward in self._arbiter.wards.values()],
            }
        )


def describe(ward: Ward) -> dict[str, Any]:
    """One preset as ``status --json`` shows it; scripts rely on these names (spec §3)."""
    return {
        "name": ward.name,
        "state": ward.state.value,
        "pid": ward.child.pid if ward.child else None,
        "slots": {"busy": ward.admission.busy, "total": ward.admission.places},
        "waiting": ward.admission.waiting,
        "restarts": ward.restarts,
        "cause": ward.cause.text if ward.cause else None,
        "memory": _memory(ward),
    }


def _memory(ward: Ward) -> dict[str, Any]:
    """MiB a term: what the plan said, and what the engine said at its last start, None for what its log doesn't name."""
    planned, seen = ward.launch.plan.predicted, ward.allocated
    return {
        "device": ward.launch.plan.budget.device,
        "planned_mib": {"device": _mib(planned.device), "host": _mib(planned.host)},
        "allocated_mib": {"device": _mib(seen.device), "host": _mib(seen.host)} if seen else None,
        "given_up": list(ward.launch.plan.given_up),
    }


def _mib(terms: Mapping[str, int]) -> dict[str, float]:
    return {term: round(count / MIB, 2) for term, count in terms.items()}
