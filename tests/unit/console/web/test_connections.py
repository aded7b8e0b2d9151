"""Whoever reaches the page's port keeps no page out, and takes no handle for ever."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse, IncompleteRead
from typing import Any
from urllib.request import urlopen

import pytest

from penstock.console.web import serve
from penstock.console.web.serve import server_of

PATIENCE_S = 60.0


class App:
    """A page, and streams that go on when it is asked for."""

    def __init__(self) -> None:
        self._streams: list[asyncio.Event] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/":
            for stream in self._streams:
                stream.set()
        else:
            self._streams.append(asked := asyncio.Event())
            await send({"type": "http.response.body", "body": b"page", "more_body": True})
            await asked.wait()
        await send({"type": "http.response.body", "body": b"page"})


@pytest.fixture
def port() -> Iterator[int]:
    server = server_of(App())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def stream_of(port: int) -> HTTPResponse:
    """One that has begun."""
    answer: HTTPResponse = urlopen(f"http://127.0.0.1:{port}/stream", timeout=PATIENCE_S)
    assert answer.read(4) == b"page"
    return answer


def test_silent_connections_keep_no_page_and_no_stream_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 4)
    with ExitStack() as stack:
        stream = stack.enter_context(stream_of(port))
        silent = [stack.enter_context(connected(port)) for _ in range(12)]
        with urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
            assert answer.read() == b"page"
        assert [one.recv(1) for one in silent[:10]] == [b""] * 10, "the oldest were cut"
        assert stream.read() == b"page", "it asks, so it is not cut"
        silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert silent[-1].recv(4096).startswith(b"HTTP/1.1 200"), "the newest are served"


def test_where_all_ask_the_oldest_is_cut(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 2)
    with ExitStack() as stack:
        oldest, older, newest = [stack.enter_context(stream_of(port)) for _ in range(3)]
        with pytest.raises(IncompleteRead):
            oldest.read()
        with urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
            assert answer.read() == b"page"
        with pytest.raises(IncompleteRead):
            older.read()
        assert newest.read() == b"page"
