"""Files on the hub, over HTTP: a part of one by range requests, or all of it into a file.

Addresses, mirrors (``HF_ENDPOINT``), the user's token (``HF_TOKEN`` or a login) and ``HF_HUB_OFFLINE`` are huggingface_hub's; its download
is not used, since version 2 starts a cut one afresh. A token goes to the hub alone: httpx drops it where a redirect leads elsewhere, and it
is in no message.

Reading ahead. A header is read in order, so :class:`Remote` asks for blocks that grow from 256 KiB to 4 MiB: few requests for a header of
11 MB, no more than a block too much for a small one.

Downloading. The part file is the state: what it holds is hashed again and the rest asked for, with the ETag of the first answer
(``If-Range``, kept beside it) so that a file that changed meanwhile is sent whole. A connection that breaks is taken up again until
``_TRIES`` in succession bring nothing. A wrong sum removes the part, since nothing tells which byte is wrong; a broken connection keeps it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import httpx2

from supervisor import __version__
from supervisor.errors import Error, Exit
from supervisor.units import KIB, MIB, Progress, size

_FIRST_BYTES, _BLOCK_BYTES = 256 * KIB, 4 * MIB
_COPY_BYTES: Final = MIB
_TIMEOUT_S: Final = 30.0
"""For a connection, and between two pieces of an answer."""
_BLOCK_S: Final = 300.0
"""For a block that is read ahead, so that a server which drips is given up."""
_TRIES: Final = 3
_WAIT_S: Final = 0.5
"""Before a broken connection is taken up again, times the failures so far."""
_WHOLE, _PARTIAL, _BEYOND = 200, 206, 416
"""HTTP statuses: all of the file, the range, a range that the file hasn't (RFC 9110 §15)."""
_RANGE: Final = re.compile(r"bytes (?P<first>\d+)-(?P<last>\d+)/(?P<total>\d+)")


class Broken(Exception):
    """The connection or the server failed in a way that may pass; the message says how."""


class Remote:
    """A file on the hub at a revision, as a :class:`supervisor.cursor.Reader`. No request is made before the first use; close it after."""

    def __init__(self, repository: str, revision: str, file: str) -> None:
        self.repository, self.revision, self.file = repository, revision, file
        self.name = f"{repository}/{file}"
        self._client: httpx2.Client | None = None
        self._total: int | None = None
        self._block = b""
        self._base = 0
        self._ahead = _FIRST_BYTES

    def __repr__(self) -> str:
        return f"<Remote {self.name}@{self.revision}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End its connections; it can still be used."""
        if self._client:
            self._client.close()
            self._client = None

    @property
    def size(self) -> int:
        """Of the file, in bytes. The first block is fetched with it. Raises :class:`Error`."""
        if self._total is None:
            self.read_at(0, 1)
        assert self._total is not None
        return self._total

    def read_at(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``, fewer only where the file ends. Raises :class:`Error` (exit code 6)."""
        start = offset - self._base
        if not 0 <= start <= start + count <= len(self._block):
            held = self._block[start:] if 0 <= start <= len(self._block) else b""
            place = offset + len(held)
            if self._total is None or place < self._total:
                held += self._fetch(place, max(count - len(held), self._ahead))
                self._ahead = min(self._ahead * 2, _BLOCK_BYTES)
            self._block, self._base, start = held, offset, 0
        return self._block[start : start + count]

    def sibling(self, name: str) -> Remote:
        """The file of this name beside it."""
        folder, slash, _ = self.file.rpartition("/")
        return Remote(self.repository, self.revision, f"{folder}{slash}{name}")

    def _fetch(self, offset: int, count: int) -> bytes:
        for failures in range(_TRIES):
            try:
                with self.stream({"Range": f"bytes={offset}-{offset + count - 1}"}) as answer:
                    if answer.status_code == _BEYOND:
                        raise self.error(f"ends before byte {offset}", "look at the repository's files")
                    first, total = _span(answer)
                    if answer.status_code != _PARTIAL or total is None or first != offset:
                        raise self.error("can't be read in parts: its server ignores ranges", "fetch the whole file: llmctl pull")
                    self._total = total
                    return self._whole(answer, min(count, total - offset))
            except Broken as exc:
                if failures == _TRIES - 1:
                    raise self.error(f"can't be read: {exc}", "check the network, or HF_ENDPOINT if you use a mirror") from exc
                time.sleep(_WAIT_S * (failures + 1))
        raise AssertionError("the last try returns or raises")

    def _whole(self, answer: httpx2.Response, count: int) -> bytes:
        """``count`` bytes of a body, no more whatever is sent."""
        end = time.monotonic() + _BLOCK_S
        data = bytearray()
        for piece in answer.iter_raw():
            data += piece
            if len(data) >= count:
                return bytes(data[:count])
            if time.monotonic() > end:
                raise Broken(f"{count} bytes were not here within {_BLOCK_S:.0f} s")
        raise Broken(f"the answer ended after {len(data)} of {count} bytes")

    @contextmanager
    def stream(self, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """Ask for the file; the body is yet to be read. Raises :class:`Error` for an answer that is no file, :class:`Broken` for none."""
        from huggingface_hub import constants, get_token, hf_hub_url

        if constants.is_offline_mode():
            raise self.error("can't be fetched: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
        if self._client is None:
            self._client = httpx2.Client(follow_redirects=True, timeout=_TIMEOUT_S)
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        url = hf_hub_url(self.repository, self.file, revision=self.revision, endpoint=endpoint)
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        # Unpacked content would be of another length than the file and its ranges.
        own = {"User-Agent": f"llmctl/{__version__}", "Accept-Encoding": "identity"}
        if token:
            own["Authorization"] = f"Bearer {token}"
        try:
            with self._client.stream("GET", url, headers=own | headers) as answer:
                self._check(answer, has_token=bool(token))
                yield answer
        except httpx2.TimeoutException as exc:
            raise Broken(f"{_host(url)} gave no answer within {_TIMEOUT_S:.0f} s") from exc
        except (httpx2.NetworkError, httpx2.RemoteProtocolError) as exc:
            raise Broken(f"the connection to {_host(url)} failed ({exc or type(exc).__name__})") from exc
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as exc:
            # Such as a token or an endpoint that can't be sent. The text may hold the token, so only its kind is said.
            what = f"can't be asked for at {_host(url)} ({type(exc).__name__})"
            raise self.error(what, "check HF_ENDPOINT, HF_TOKEN and the proxy settings") from None

    def _check(self, answer: httpx2.Response, *, has_token: bool) -> None:
        """Let only a file pass."""
        status = answer.status_code
        if status in (401, 403):
            hint = (
                "accept its licence on its page, or another HF_TOKEN"
                if has_token
                else "check its name; if it is gated, set HF_TOKEN"
            )
            raise self.error(f"is not open to {'your token' if has_token else 'everybody'} (HTTP {status})", hint)
        if status == 404:
            raise self.error(f"isn't there at revision {self.revision} (HTTP 404)", "correct repository, revision and file")
        if status == 429 or status >= 500:
            raise Broken(f"{answer.url.host} answers HTTP {status}")
        if status not in (_WHOLE, _PARTIAL, _BEYOND):
            raise self.error(f"can't be fetched: {answer.url.host} answers HTTP {status}", "check HF_ENDPOINT")
        if status != _BEYOND and answer.headers.get("Content-Type", "").lower().startswith("text/html"):
            raise self.error(
                f"can't be fetched: {answer.url.host} sends a web page", "log in to the network, or check HF_ENDPOINT"
            )

    def error(self, what: str, hint: str) -> Error:
        """An Error that names repository and file."""
        return Error(f"{self.file} of {self.repository} {what}", exit=Exit.MODEL, hint=hint)


def download(remote: Remote, part: Path, progress: Progress, *, bytes_expected: int | None, sha256: str) -> None:
    """Have all of ``remote`` in ``part``, going on where a cut download left it. ``sha256`` may be empty: then it isn't compared.

    ``progress`` is told MiB. Raises :class:`Error` (exit code 6) for another size or sum than expected, a connection that stays broken, or
    a full disk. Ctrl-C leaves the part for the next time.
    """
    try:
        with remote, part.open("r+b" if part.exists() else "w+b") as file:
            copy = _Copy(remote, file, part, progress, bytes_expected)
            copy.run()
            digest = copy.sha.hexdigest()
    except OSError as exc:
        wanted = size(bytes_expected) if bytes_expected else "more room"
        why = f"the disk is full, it needs {wanted}" if exc.errno == errno.ENOSPC else exc.strerror or str(exc)
        hint = "free some space; the download goes on where it was"
        raise Error(f"{remote.file} can't be stored in {part.parent}: {why}", exit=Exit.MODEL, hint=hint) from exc
    _etag_file(part).unlink(missing_ok=True)
    if sha256 and digest != sha256:
        part.unlink(missing_ok=True)
        raise remote.error(
            f"has sha256 {digest}, {sha256} was expected", "correct the preset, or fetch it again; nothing was kept"
        )


class _Copy:
    """One download into an open part file."""

    def __init__(self, remote: Remote, file: BinaryIO, part: Path, progress: Progress, expected: int | None) -> None:
        self.remote, self.file, self.part, self.progress = remote, file, part, progress
        self.total = expected
        self.sha = hashlib.sha256()
        self.done = 0

    def run(self) -> None:
        """Until it is whole."""
        self._hash_what_is_here()
        failures = 0
        while self.total is None or self.done < self.total:
            before = self.done
            try:
                self._once()
                if self.total is None:
                    self.total = self.done
                elif self.done < self.total:
                    raise Broken(f"the answer ended after {self.done} of {self.total} bytes")
            except Broken as exc:
                failures = 1 if self.done > before else failures + 1
                if failures == _TRIES:
                    hint = "the same again; it goes on where it was"
                    raise self.remote.error(f"can't be fetched: {exc}, with {size(self.done)} here", hint) from exc
                time.sleep(_WAIT_S * failures)

    def _once(self) -> None:
        """One request, from where the part ends."""
        etag = _etag_file(self.part)
        headers = {}
        if self.done:
            headers["Range"] = f"bytes={self.done}-"
            if etag.exists():
                headers["If-Range"] = etag.read_text()
        with self.remote.stream(headers) as answer:
            if answer.status_code == _BEYOND:
                if answer.headers.get("Content-Range") == f"bytes */{self.done}":  # it is all here
                    self.total = self.done
                    return
                self._restart()  # the part is longer than the file, so of another one
                raise Broken("the file is shorter than the part that is here")
            first, total = _span(answer)
            if self.total is not None and total is not None and total != self.total:
                raise self.remote.error(f"has {total} bytes, {self.total} were expected", "correct the preset")
            self.total = total if self.total is None else self.total
            if first == 0 and self.done:
                self._restart()  # the server ignores ranges, or the file has changed
            if first != self.done:
                raise Broken(f"the answer begins at byte {first}, {self.done} was asked for")
            if (tag := answer.headers.get("ETag", "")).startswith('"'):  # a weak one is of no use to If-Range
                etag.write_text(tag)
            for block in answer.iter_raw(_COPY_BYTES):
                self.file.write(block)
                self._count(block)
                if self.total is not None and self.done > self.total:
                    self._restart()
                    raise self.remote.error(f"has more than the {self.total} bytes expected", "correct the preset")
            self.file.flush()

    def _hash_what_is_here(self) -> None:
        here = self.part.stat().st_size
        if self.total is not None and here > self.total:
            self._restart()
            here = 0
        while self.done < here and (block := self.file.read(min(_COPY_BYTES, here - self.done))):
            self._count(block)

    def _count(self, block: bytes) -> None:
        self.sha.update(block)
        self.done += len(block)
        self.progress(f"fetching {self.remote.file}, MiB", self.done // MIB, (self.total or 0) // MIB)

    def _restart(self) -> None:
        self.file.seek(0)
        self.file.truncate()
        _etag_file(self.part).unlink(missing_ok=True)
        self.sha = hashlib.sha256()
        self.done = 0


def _span(answer: httpx2.Response) -> tuple[int, int | None]:
    """The first byte of an answer and the bytes of the whole file, None where it doesn't say."""
    if answer.status_code == _PARTIAL:
        match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if not match:
            raise Broken(f"{answer.url.host} sends a part without saying which")
        return int(match["first"]), int(match["total"])
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _etag_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")


def _host(url: str) -> str:
    return url.split("/")[2].rpartition("@")[2] if url.count("/") >= 2 else url
