"""Servers that aren't llama-server, as far as ``bench`` asks them: real HTTP on loopback, a tokenizer that has some words as two tokens.

A token is a word with the blank before it; :data:`SPLIT` are two. A template sets tokens before, behind and between turns.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
"""Status, and what is written as JSON, or a text as it is."""

SPLIT = frozenset({"about", "machine", "quite"})
HEAD, USER, END, ANSWER = [1, 2, 3], [4, 5], [6, 7], [8, 9, 10]
"""What the template sets before all, before a user's turn, behind a turn, before an answer."""


def tokens(said: str) -> list[int]:
    """A text's."""
    found = []
    for word in re.findall(r" ?\w+|[^\w ]| (?!\w)", said):
        found += [_number(word)] if word.strip() not in SPLIT else [_number(word[:2]), _number(word[2:])]
    return found


def chat_tokens(messages: list[dict[str, str]]) -> list[int]:
    """A dialogue's."""
    found = list(HEAD)
    for message in messages:
        found += (USER if message["role"] == "user" else ANSWER) + tokens(message["content"]) + END
    return found + ANSWER


def _number(word: str) -> int:
    return 100 + int.from_bytes(word.encode(), "big")


def prompt_tokens(body: dict[str, Any]) -> list[int]:
    """A request's."""
    return chat_tokens(body["messages"]) if "messages" in body else [0, *tokens(body["prompt"])]


@dataclass
class Peer:
    """A server. ``routes`` are by path, each from a body to an answer; ``asked`` is what it was asked."""

    routes: dict[str, Callable[[dict[str, Any]], Answer]]
    key: str = ""
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def answer(self, path: str, key: str, body: dict[str, Any]) -> Answer:
        self.asked.append((path, body))
        if self.key and key != f"Bearer {self.key}":
            return 401, {"error": {"message": "no key"}}
        route = self.routes.get(path)
        return route(body) if route else (404, "not found")

    @contextlib.contextmanager
    def served(self) -> Iterator[Peer]:
        """While the block runs."""
        peer = self

        class Asked(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                status, told = peer.answer(self.path, self.headers.get("authorization", ""), body)
                data = (told if isinstance(told, str) else json.dumps(told)).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


def used(body: dict[str, Any]) -> Answer:
    """A completion of which only the usage matters."""
    return 200, {"choices": [], "usage": {"prompt_tokens": len(prompt_tokens(body)), "completion_tokens": 1}}


def models(*names: str, **more: Any) -> Callable[[dict[str, Any]], Answer]:
    """The list."""
    return lambda _: (200, {"object": "list", "data": [{"id": name, "object": "model", **more} for name in names]})


def openai(*names: str) -> dict[str, Callable[[dict[str, Any]], Answer]]:
    """A server of which nothing is known."""
    return {"/v1/models": models(*names), "/v1/chat/completions": used, "/v1/completions": used}


def vllm(name: str) -> dict[str, Callable[[dict[str, Any]], Answer]]:
    """vLLM: its tokenizer is asked with a text or with messages."""

    def tokenize(body: dict[str, Any]) -> Answer:
        special = [0] if body.get("add_special_tokens") else []
        found = chat_tokens(body["messages"]) if "messages" in body else special + tokens(body["prompt"])
        return 200, {"count": len(found), "max_model_len": 4096, "tokens": found}

    return openai(name) | {
        "/v1/models": models(name, owned_by="vllm", max_model_len=4096),
        "/version": lambda _: (200, {"version": "0.11.0"}),
        "/tokenize": tokenize,
    }


def ollama(*names: str) -> dict[str, Callable[[dict[str, Any]], Answer]]:
    """Ollama: no tokenizer."""
    return openai(*names) | {"/api/version": lambda _: (200, {"version": "0.12.3"})}
