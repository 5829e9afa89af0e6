"""The server of live pages: for this machine, for who knows the address, and for nobody else."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.live.server import MOST_STREAMS, Server


class Notes:
    """A site that remembers what it was asked."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def page(self, path: str) -> tuple[str, str] | None:
        return ("<p>ü\ud800</p>", "default-src 'none'") if path == "" else None

    def events(self, path: str) -> Iterator[str] | None:
        return iter(["one", "", "two"]) if path == "" else None

    def act(self, path: str) -> str | None:
        if path != "stop":
            return None
        self.done.append(path)
        return "stopping"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Notes())
    yield server
    server.close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers.items())
    finally:
        connection.close()


def test_it_listens_here_alone(server: Server) -> None:
    assert server.address == f"http://127.0.0.1:{server.port}/{server.token}/"
    assert len(server.token) >= 32
    other = Server(Notes())
    assert other.token != server.token
    other.close()
    with pytest.raises(OSError, match=r"refused|[Aa]ddress|[Nn]etwork"):
        socket.create_connection(("::1", server.port), timeout=1)
    with pytest.raises(mlc.ExecutionError, match=f"port {server.port} of this machine cannot be used"):
        Server(Notes(), server.port)


def test_pages(server: Server) -> None:
    status, text, headers = ask(server, f"/{server.token}/")
    assert (status, text) == (200, "<p>ü?</p>".encode())
    assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert headers["Cache-Control"] == "no-store"
    assert "Python" not in headers["Server"]
    assert ask(server, f"/{server.token}/events")[1] == b"data: one\n\n:\n\ndata: two\n\n"
    assert ask(server, f"/{server.token}/elsewhere")[0] == 404
    assert ask(server, f"/{server.token}/elsewhere/events")[0] == 404


@pytest.mark.parametrize("path", ["/", "", "/events", "/stop", "/{}x/", "/{}", "/%2e%2e/{}/"])
def test_without_the_token_there_is_nothing(server: Server, path: str) -> None:
    path = path.format(server.token)
    for method in ("GET", "POST"):
        assert ask(server, path, method, X_Requested_With="mlcompute")[:2] == (404, b"404 Not Found\n")
    site: Any = server.site
    assert site.done == []


def test_other_sites_cannot_press_buttons(server: Server) -> None:
    path = f"/{server.token}/stop"
    mine = f"http://127.0.0.1:{server.port}"
    assert ask(server, path, "POST")[0] == 403, "a form of another page cannot send the header"
    assert ask(server, path, "POST", X_Requested_With="mlcompute", Origin="http://evil.example")[0] == 403
    assert ask(server, path, "POST", X_Requested_With="mlcompute", Origin="null")[0] == 403
    assert ask(server, path, "POST", X_Requested_With="mlcompute", Host="evil.example")[0] == 403
    assert ask(server, f"/{server.token}/", Host=f"evil.example:{server.port}")[0] == 403, "DNS rebinding"
    assert ask(server, path, "OPTIONS", Origin="http://evil.example")[0] == 501, "no other site is allowed anything"
    assert ask(server, f"/{server.token}/stop")[0] == 404, "looking does nothing"
    site: Any = server.site
    assert site.done == []
    assert ask(server, path, "POST", X_Requested_With="mlcompute", Origin=mine)[:2] == (200, b"stopping")
    assert ask(server, path, "POST", X_Requested_With="mlcompute", Host=f"localhost:{server.port}")[0] == 200
    assert ask(server, f"/{server.token}/other", "POST", X_Requested_With="mlcompute")[0] == 404
    assert site.done == ["stop", "stop"]


def test_streams_are_counted(server: Server) -> None:
    for _ in range(MOST_STREAMS):
        server.streams.acquire()
    assert ask(server, f"/{server.token}/events")[0] == 503
    for _ in range(MOST_STREAMS):
        server.streams.release()
    assert ask(server, f"/{server.token}/events")[0] == 200
