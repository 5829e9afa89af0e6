"""A web server for one user, on the loopback interface, with a secret in the address.

Any page in the browser can send requests to a local port, and other users of the machine can too. So: every address
begins with a random token, compared in constant time; the Host header must be ours, or another site could have its name
lead here (DNS rebinding); what changes something needs a header that other sites cannot send without asking, and asking
is never answered. Nothing is loaded from elsewhere, and no other page may show ours in a frame.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from mlcompute.errors import ExecutionError

#: Streams of events at a time: each has a thread.
MOST_STREAMS = 16
#: Characters of the address that are secret: 192 random bits.
_TOKEN_BYTES = 24


class Site(Protocol):
    """What is served. Paths are those after the token; None: there is nothing there."""

    def page(self, path: str) -> tuple[str, str] | None:
        """(HTML text, its Content-Security-Policy)."""

    def events(self, path: str) -> Iterator[str] | None:
        """Messages for the page as they come, empty ones to see whether it is still there; ends with the last."""

    def act(self, path: str) -> str | None:
        """Do what a button says; what it answers."""


class Server:
    """Serves a site until `close`. `address` is what to open in a browser."""

    def __init__(self, site: Site, port: int = 0) -> None:
        self.site = site
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        #: Streams that are open now.
        self.open_streams: set[threading.Thread] = set()
        owner = self

        class Handler(_Handler):
            server_of = owner

        try:
            self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "ports are numbers from 0 to 65535"
            raise ExecutionError(
                f"port {port} of this machine cannot be used: {why}",
                fix="choose another port, or 0: a free one",
            ) from error
        self._http.daemon_threads = True
        self.port = int(self._http.server_address[1])
        self.address = f"http://127.0.0.1:{self.port}/{self.token}/"
        self._thread = threading.Thread(target=self._http.serve_forever, name="mlcompute-live", daemon=True)
        self._thread.start()

    def close(self, patience: float = 2.0) -> None:
        """Let streams send their last message, then serve no more. Whoever asks the site must have ended them."""
        for thread in list(self.open_streams):
            thread.join(patience)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server_of: Server
    server_version, sys_version = "mlcompute", ""
    timeout = 30

    def do_GET(self) -> None:
        path = self._path()
        if path is None:
            return
        if path.endswith("events"):
            stream = self.server_of.site.events(path.removesuffix("events"))
            return self._refuse(HTTPStatus.NOT_FOUND) if stream is None else self._stream(stream)
        found = self.server_of.site.page(path)
        if found is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        text, policy = found
        return self._respond(text, "text/html; charset=utf-8", policy)

    def do_POST(self) -> None:
        path = self._path()
        if path is None:
            return
        origin = self.headers.get("Origin")
        if self.headers.get("X-Requested-With") != "mlcompute" or (
            origin is not None and origin not in self._origins()
        ):
            return self._refuse(HTTPStatus.FORBIDDEN)
        said = self.server_of.site.act(path)
        if said is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        return self._respond(said, "text/plain; charset=utf-8")

    def _origins(self) -> set[str]:
        port = self.server_of.port
        return {f"http://127.0.0.1:{port}", f"http://localhost:{port}"}

    def _path(self) -> str | None:
        """The path after the token; None, and the request is refused, where somebody has no business here."""
        if f"http://{self.headers.get('Host', '')}" not in self._origins():
            self._refuse(HTTPStatus.FORBIDDEN)
            return None
        token, slash, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        # All wrong addresses look the same, and take the same time.
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server_of.token.encode()) or not slash:
            self._refuse(HTTPStatus.NOT_FOUND)
            return None
        return path

    def _refuse(self, status: HTTPStatus) -> None:
        self._head(status, "text/plain; charset=utf-8")
        self.wfile.write(f"{status.value} {status.phrase}\n".encode())

    def _respond(self, text: str, kind: str, policy: str = "default-src 'none'") -> None:
        raw = text.encode("utf-8", "replace")
        self._head(HTTPStatus.OK, kind, policy, len(raw))
        with contextlib.suppress(OSError):  # the browser has gone away
            self.wfile.write(raw)

    def _head(
        self, status: HTTPStatus, kind: str, policy: str = "default-src 'none'", length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in (
            ("Content-Security-Policy", f"{policy}; frame-ancestors 'none'"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, messages: Iterator[str]) -> None:
        """Server-sent events; an empty message becomes a comment, by which a browser that has left is noticed."""
        if not self.server_of.streams.acquire(blocking=False):
            return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
        this = threading.current_thread()
        self.server_of.open_streams.add(this)
        try:
            self._head(HTTPStatus.OK, "text/event-stream; charset=utf-8")
            with contextlib.suppress(OSError):
                for message in messages:
                    self.wfile.write(f"data: {message}\n\n".encode() if message else b":\n\n")
                    self.wfile.flush()
        finally:
            self.server_of.open_streams.discard(this)
            self.server_of.streams.release()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are nobody's news, and their addresses are secret."""
