"""A stand-in for the hub: an HTTP server that gives out files by range requests, and can be told to misbehave."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = b"<!DOCTYPE html><html>Sign in to the hotel's network</html>"


@dataclass
class Site:
    """Files under /REPOSITORY/resolve/REVISION/, and how the server treats who asks for them."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    status: int = 0
    """Answer this to everything."""
    page: bool = False
    etag: str = '"one"'
    cut_bytes: int | None = None
    """Close the connection after so many bytes of each body."""
    length: bool = True
    redirect: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)
    """The headers of each request."""
    sent_bytes: int = 0
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        site.asked.append({name.lower(): value for name, value in self.headers.items()} | {"path": self.path})
        if site.redirect:
            return self.answer(302, b"", Location=site.redirect + self.path)
        if site.status:
            return self.answer(site.status, b"no")
        if site.page:
            return self.answer(200, PAGE, Content_Type="text/html; charset=utf-8")
        content = site.files.get(self.path)
        if content is None:
            return self.answer(404, b"no such file")
        wanted = self.headers.get("Range", "")
        if not wanted or not site.ranges or self.headers.get("If-Range", site.etag) != site.etag:
            return self.answer(200, content, ETag=site.etag)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1)
        if start >= len(content):
            return self.answer(416, b"", Content_Range=f"bytes */{len(content)}")
        return self.answer(206, content[start : end + 1], ETag=site.etag, Content_Range=f"bytes {start}-{end}/{len(content)}")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.site.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = body[: self.site.cut_bytes]
        self.site.sent_bytes += len(body)
        with contextlib.suppress(ConnectionError):  # who has read enough leaves
            self.wfile.write(body)  # HTTP/1.0: the connection ends with the answer

    def log_message(self, *_: object) -> None: ...


def serve(site: Site) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"site": site}))
    site.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server
