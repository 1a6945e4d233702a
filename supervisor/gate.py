"""Which requests may come in at all, decided on the head alone, before the body is read. Pure.

Until there are keys llmctl listens on loopback only, so the danger is the user's own browser: a web page may send requests to
127.0.0.1. It can't set a JSON content type without asking first (and we answer no such question), it can't hide its ``Origin``, and
a name rebound to 127.0.0.1 shows in ``Host``.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from supervisor.errors import Error, Exit

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_READING: Final = ("GET", "HEAD", "OPTIONS")


def check(method: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise the :class:`Error` with which this request is to be refused, if it is. Header names are lower case."""
    found = dict(headers)
    host = found.get(b"host", b"").decode("latin-1")
    if hostname(host) not in LOOPBACK:
        raise _refusal(
            403, "host_not_allowed", f"the Host {host!r} is not this machine's loopback", "http://127.0.0.1 or http://localhost"
        )
    origin = found.get(b"origin", b"").decode("latin-1")
    if origin and origin != f"http://{host}":
        raise _refusal(
            403, "origin_not_allowed", f"a page of {origin!r} may not use this machine's models", "a client without an Origin"
        )
    kind = found.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if method not in _READING and kind != "application/json":
        said = kind or "no content type"
        raise _refusal(
            415, "unsupported_media_type", f"the body must be application/json, not {said}", "Content-Type: application/json"
        )


_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")
"""Visible ASCII: it goes back into a header, and into a record."""


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The ``X-Request-Id`` that a request came with; None for one that can't be used."""
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode() if _REQUEST_ID.fullmatch(value) else None
    return None


@functools.lru_cache(64)
def whereabouts(address: str) -> str | None:
    """Where a client is, by its address: ``loopback``, ``private`` (the home's network) or ``public``. More of it is not kept."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    found = getattr(found, "ipv4_mapped", None) or found
    return "loopback" if found.is_loopback else "private" if found.is_private else "public"


def hostname(host: str) -> str:
    """The name in a ``Host`` header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _refusal(status: int, code: str, message: str, hint: str) -> Error:
    return Error(message, exit=Exit.USAGE, hint=hint, status=status, code=code)
