"""Who is asked: a server by its address, what kind it is, what stands behind it, and how it counts tokens.

Kinds are told apart by what only one of them answers: llmctl signs its models, llama-server has ``/props``, Ollama ``/api/version``, vLLM
``/version``. A server of this machine is found among its processes by who listens on the port; then its engine's command line and model
file are known, too, whether or not it would tell. Nothing here is on the path of what is measured.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from bench import here
from bench.result import Kind, Subject
from supervisor import paths
from supervisor.errors import Error, Exit
from supervisor.units import Progress
from supervisor.value import nearest

ANSWER_S: Final = 30.0
"""For what no slot is needed for."""
LOAD_S: Final = 600.0
"""For what may wait for a model to be loaded, or for slots."""

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server that answered."""

    name: str
    url: str
    """Its root, without ``/v1``."""
    model: str
    """What requests name."""
    kind: Kind
    key: str = field(default="", repr=False)
    """API key; written nowhere."""
    subject: Subject
    pids: tuple[int, ...] = ()
    """Its processes, where it runs on this machine and they may be looked at."""

    async def encode(self, text: str, *, special: bool = False) -> list[int] | None:
        """Tokens of a text by its own tokenizer; None where it has no such route. ``special``: with what it sets around a whole prompt."""
        async with self._client() as client:
            return await self._encode(client, text, special=special)

    async def encode_chat(self, messages: Sequence[Message]) -> list[int] | None:
        """Tokens of a whole prompt, template included; None where it can't be had without an answer."""
        async with self._client() as client:
            if self.kind is Kind.VLLM:
                return await self._tokens(client, {"messages": messages, "add_generation_prompt": True})
            if self.kind not in (Kind.LLMCTL, Kind.LLAMA_CPP):
                return None
            told = await self._post(client, "/apply-template", {"messages": messages})
            prompt = told.get("prompt") if told else None
            return await self._encode(client, prompt, special=True) if isinstance(prompt, str) else None

    async def count(self, text: str) -> int | None:
        """Tokens of a bare text; None where it can't say."""
        found = await self.encode(text)
        return None if found is None else len(found)

    async def count_chat(self, messages: Sequence[Message]) -> int | None:
        """Tokens of a whole prompt, template included; None where it doesn't say even with an answer."""
        found = await self.encode_chat(messages)
        return len(found) if found is not None else await self.used("/v1/chat/completions", {"messages": messages})

    async def used(self, path: str, body: Mapping[str, object]) -> int | None:
        """Prompt tokens as a request with an answer of one token says them; None where it doesn't.

        Raises :class:`Error` (exit code 8) with what it says where it refuses.
        """
        async with self._client() as client:
            reply = await _ask(client, self.url, "POST", path, json={"model": self.model, "max_tokens": 1, **body})
        told = _object(reply)
        if reply.status_code != HTTPStatus.OK:
            said = _error(told) or reply.text[:200]
            what = f"{self.name} at {self.url} answers {path} with {reply.status_code}: {said}"
            raise Error(what, exit=Exit.CHILD, hint=f"curl {self.url}/v1/models")
        usage = told.get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return tokens if isinstance(tokens, int) else None

    async def _encode(self, client: httpx2.AsyncClient, text: str, *, special: bool) -> list[int] | None:
        if self.kind is Kind.VLLM:
            return await self._tokens(client, {"prompt": text, "add_special_tokens": special})
        if self.kind in (Kind.LLMCTL, Kind.LLAMA_CPP):
            return await self._tokens(client, {"content": text, "add_special": special})
        return None

    async def _tokens(self, client: httpx2.AsyncClient, body: Mapping[str, object]) -> list[int] | None:
        told = await self._post(client, "/tokenize", body)
        found = told.get("tokens") if told else None
        return found if isinstance(found, list) else None

    async def _post(self, client: httpx2.AsyncClient, path: str, body: Mapping[str, object]) -> Mapping[str, Any] | None:
        """The answer of a route that not every server has; None where this one doesn't."""
        reply = await _ask(client, self.url, "POST", path, json={"model": self.model, **body})
        return _object(reply) if reply.status_code == HTTPStatus.OK else None

    def _client(self) -> httpx2.AsyncClient:
        return _client(self.key)


async def find(
    url: str,
    *,
    model: str = "",
    key: str = "",
    name: str = "",
    home: paths.Home | None = None,
    progress: Progress = lambda *_: None,
) -> Target:
    """Who listens at ``url``, with or without a scheme and ``/v1``; ``model`` is what requests are to name, its first one if empty.

    ``home`` is whose running llmctl tells more, and where a model file's checksum is remembered; None is the user's. Raises
    :class:`Error`: with exit code 7 where nothing listens or nothing is loaded, else 2.
    """
    home = home or paths.home()
    url = _root(url)
    async with _client(key) as client:
        models = await _models(client, url)
        kind, told = await _kind(client, url, models)
        chosen = _choose(url, models, model)
        found = Target(
            name=name or (str(chosen["id"]) if kind is Kind.LLMCTL else f"{kind} {_plain(chosen)}"),
            url=url,
            model=model or str(chosen["id"]),
            kind=kind,
            key=key,
            subject=Subject(name="", kind=kind.value),
        )
    if kind in (Kind.LLMCTL, Kind.OLLAMA) and chosen.get("state") != "ready":
        await found.used("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})  # loads it
    mine = await asyncio.to_thread(here.processes, url)
    subject = await asyncio.to_thread(here.looked_at, _subject(found, chosen, told), mine, home, progress)
    return replace(found, subject=replace(subject, name=found.name), pids=tuple(each.pid for each in mine))


def _root(url: str) -> str:
    """``localhost:8080/v1/`` → ``http://localhost:8080``."""
    told = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(told)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise Error(f"{url!r} is no address of a server", exit=Exit.USAGE, hint="--url http://127.0.0.1:8080")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


@functools.cache
def _tls() -> ssl.SSLContext:
    """Made once: reading the machine's certificates takes longer than a request."""
    return ssl.create_default_context()


def _client(key: str) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(LOAD_S, connect=ANSWER_S), trust_env=False, verify=_tls())


async def _ask(client: httpx2.AsyncClient, url: str, method: str, path: str, **more: Any) -> httpx2.Response:  # noqa: ANN401
    """What it answers, whatever its status, but for a key that it doesn't take."""
    try:
        reply = await client.request(method, f"{url}{path}", **more)
    except httpx2.ConnectError as exc:
        raise Error(f"nothing listens at {url}: {exc}", exit=Exit.BUSY, hint="llmctl up tiny --detach") from exc
    except httpx2.TimeoutException as exc:
        said = f"{url} gives no answer to {path} within {LOAD_S:.0f} s"
        raise Error(said, exit=Exit.BUSY, hint=f"curl {url}{path}") from exc
    except httpx2.HTTPError as exc:
        raise Error(f"{url} doesn't speak HTTP: {exc}", exit=Exit.USAGE, hint="--url http://127.0.0.1:8080") from exc
    if reply.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        given = "refuses the key it was given" if "authorization" in client.headers else "wants an API key"
        raise Error(f"{url} {given} ({reply.status_code})", exit=Exit.USAGE, hint="--key-env NAME")
    return reply


def _object(reply: httpx2.Response) -> Mapping[str, Any]:
    """Its JSON object, or an empty one."""
    try:
        found = reply.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _error(told: Mapping[str, Any]) -> str:
    found = told.get("error")
    return str(found.get("message", found) if isinstance(found, dict) else found or "")[:200]


async def _models(client: httpx2.AsyncClient, url: str) -> Sequence[Mapping[str, Any]]:
    reply = await _ask(client, url, "GET", "/v1/models")
    told = _object(reply)
    if reply.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
        raise Error(f"{url} isn't ready: {_error(told) or 503}", exit=Exit.BUSY, hint=f"curl {url}/health")
    data = told.get("data")
    if reply.status_code != HTTPStatus.OK or not isinstance(data, list):
        said = f"{url} answers /v1/models with {reply.status_code} and no list of models: it doesn't speak OpenAI's API"
        raise Error(said, exit=Exit.USAGE, hint="--url http://127.0.0.1:8080")
    found = [each for each in data if isinstance(each, dict) and each.get("id")]
    if not found:
        raise Error(f"{url} has no model", exit=Exit.USAGE, hint="llmctl pull tiny")
    return found


async def _kind(client: httpx2.AsyncClient, url: str, models: Sequence[Mapping[str, Any]]) -> tuple[Kind, Mapping[str, Any]]:
    """Which it is, and what it said of itself."""
    if models[0].get("owned_by") == "llmctl":
        return Kind.LLMCTL, {}
    for kind, path, word in (
        (Kind.LLAMA_CPP, "/props", "default_generation_settings"),
        (Kind.OLLAMA, "/api/version", "version"),
        (Kind.VLLM, "/version", "version"),
    ):
        reply = await _ask(client, url, "GET", path)
        if reply.status_code == HTTPStatus.OK and word in (told := _object(reply)):
            return kind, told
    return Kind.OPENAI, {}


def _choose(url: str, models: Sequence[Mapping[str, Any]], asked: str) -> Mapping[str, Any]:
    """The model that is asked for, else the first that is up, else the first."""
    if not asked:
        return next((each for each in models if each.get("state") == "ready"), models[0])
    for each in models:
        if asked in (each["id"], *_aliases(each)) or each["id"] == f"{asked}:latest":  # as Ollama completes a name
            return each
    ids = [str(each["id"]) for each in models]
    said = f"{url} has no model {asked!r}; it has: {', '.join(ids[:20])}"
    raise Error(said, exit=Exit.USAGE, hint=f"--url {url}#{nearest(asked, ids) or ids[0]}")


def _aliases(model: Mapping[str, Any]) -> tuple[str, ...]:
    meta = model.get("meta")
    found = model.get("aliases") or (meta.get("aliases") if isinstance(meta, dict) else None)
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _plain(model: Mapping[str, Any]) -> str:
    """A model's name, where it is a path its last part."""
    return Path(str(model["id"])).name


def _subject(found: Target, model: Mapping[str, Any], told: Mapping[str, Any]) -> Subject:
    """What it says of itself."""
    meta = model.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    subject = found.subject
    match found.kind:
        case Kind.LLMCTL:
            subject = replace(
                subject, preset=str(model["id"]), file=meta.get("file") or "", slots=meta.get("slots"), context=meta.get("n_ctx")
            )
        case Kind.LLAMA_CPP:
            build = str(told.get("build_info", ""))
            subject = replace(
                subject,
                version=build,
                engine=build,
                slots=told.get("total_slots"),
                context=told["default_generation_settings"].get("n_ctx"),
                file=Path(str(told.get("model_path", ""))).name,
            )
        case Kind.VLLM:
            subject = replace(subject, version=str(told["version"]), context=model.get("max_model_len"))
        case Kind.OLLAMA:
            subject = replace(subject, version=str(told["version"]))
    return replace(subject, url=found.url, model=found.model)
