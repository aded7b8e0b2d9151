"""Whatever answers at an engine's address, who asks has an answer or penstock's own error, in the time it gave."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from penstock.console.cli.engines import _checksum
from penstock.errors import EngineError
from penstock.protocol.engine_http import ANSWER_BYTES, ask, fetch
from penstock.protocol.presence import WorkerPresence
from penstock.workers.fleet.main import answers

#: So long for servers that never end, and the pace of those that go on for ever: many bytes come in that time.
SHORT_S, PACE_S = 0.5, 0.02
#: Long enough to be no matter where a server does end.
LONG_S = 60.0
HEAD = b"HTTP/1.1 200 OK\r\n"

Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server whose connections a function speaks with, in a thread each; its address."""
    with ExitStack() as stack:

        def start(speak: Callable[[socket.socket], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.callback(listener.shutdown, socket.SHUT_RDWR)

            def accept() -> None:
                with suppress(OSError):
                    while True:
                        one = listener.accept()[0]
                        threading.Thread(target=hear, args=(one,), daemon=True).start()

            def hear(one: socket.socket) -> None:
                with one, suppress(OSError):
                    one.recv(65536)
                    speak(one)

            threading.Thread(target=accept, daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield start


def saying(data: bytes) -> Callable[[socket.socket], None]:
    return lambda one: one.sendall(data)


def dripping(head: bytes, drops: int) -> Callable[[socket.socket], None]:
    """Whole after all, for who waits without end."""

    def drip(one: socket.socket) -> None:
        one.sendall(head)
        gone = threading.Event()
        for _ in range(drops):
            one.sendall(b"x")
            gone.wait(PACE_S)

    return drip


def stalling(head: bytes) -> Callable[[socket.socket], None]:
    def stall(one: socket.socket) -> None:
        one.sendall(head)
        one.recv(1)  # until who asked has left

    return stall


@pytest.mark.parametrize(
    "said",
    [
        b"HELLO THERE\r\n\r\n",
        b"",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc",
        HEAD + b"".join(b"h%d: x\r\n" % i for i in range(300)) + b"\r\n",
        b"HTTP/1.1 200 " + b"a" * 100_000 + b"\r\n\r\n",
        HEAD + b"h: " + b"a" * 100_000 + b"\r\n\r\n",
        HEAD + b"Content-Length: 1000\r\n\r\nabc",
    ],
    ids=["no HTTP", "nothing", "bad chunk", "300 headers", "long status", "long header", "cut short"],
)
def test_what_is_no_answer_of_http_is_an_error_of_the_engine(said: bytes, serve: Serve) -> None:
    url = serve(saying(said))

    with pytest.raises(EngineError, match="does not answer"):
        fetch(url, timeout_s=LONG_S)
    assert "does not answer" in _checksum(WorkerPresence(name="w"), url)["why"]
    assert not answers(url)


@pytest.mark.parametrize(
    "url", ["http://h:abc", "http://h/a b", "http://[::1", "http://" + "a" * 70 + "\u00e9", "http://", "file:///etc/x"]
)
def test_what_is_no_address_is_an_error_of_the_engine(url: str) -> None:
    with pytest.raises(EngineError):
        fetch(url + "/metrics", timeout_s=LONG_S)
    assert _checksum(WorkerPresence(name="w"), url)["checksum"] == ""


@pytest.mark.parametrize(
    "speak",
    [
        dripping(HEAD + b"Content-Length: 500\r\n\r\n", 500),
        dripping(HEAD + b"h: ", 500),
        stalling(HEAD),
        stalling(b"HTTP/1.1 500 no\r\nContent-Length: 1000\r\n\r\nabc"),
        stalling(b""),
    ],
    ids=["body drips", "header drips", "headers stall", "body of an error stalls", "silence"],
)
def test_an_answer_that_does_not_end_is_given_up_in_time(speak: Callable[[socket.socket], None], serve: Serve) -> None:
    with pytest.raises(EngineError, match="does not answer"):
        fetch(serve(speak), timeout_s=SHORT_S)


def test_no_redirect_is_followed(serve: Serve) -> None:
    """An engine may not have its asker fetch what only the asker can reach."""
    asked = []
    other = serve(lambda one: asked.append(one))  # type: ignore[func-returns-value]
    url = serve(saying(f"HTTP/1.1 302 Found\r\nLocation: {other}/internal\r\nContent-Length: 0\r\n\r\n".encode()))

    with pytest.raises(EngineError, match="returned status 302: Found"):
        fetch(url, timeout_s=LONG_S)
    assert "answers with status 302" in _checksum(WorkerPresence(name="w"), url)["why"]
    assert not answers(url)
    assert asked == []


def test_an_answer_is_read_whole_and_a_refusal_says_why(serve: Serve) -> None:
    fine = serve(saying(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"))
    open_ended = serve(saying(HEAD + b"\r\nabc"))
    refusing = serve(saying(b"HTTP/1.1 503 x\r\nContent-Length: 7\r\n\r\nloading"))

    assert fetch(fine, timeout_s=LONG_S) == b"abcde"
    assert fetch(open_ended, timeout_s=LONG_S) == b"abc"
    assert ask(refusing, timeout_s=LONG_S).status == 503
    with pytest.raises(EngineError, match="returned status 503: loading"):
        fetch(refusing, timeout_s=LONG_S)


def test_more_than_is_read_is_refused(serve: Serve) -> None:
    much = serve(saying(HEAD + b"\r\n" + bytes(ANSWER_BYTES + 1)))

    with pytest.raises(EngineError, match="more than"):
        fetch(much, timeout_s=LONG_S)


def test_the_path_the_query_and_the_body_arrive() -> None:
    heard = []

    def once(listener: socket.socket) -> None:
        one, data = listener.accept()[0], b""
        with one:
            while not data.endswith(b'{"a": 1}'):
                data += one.recv(65536)
            heard.append(data)
            one.sendall(HEAD + b"Content-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=once, args=(listener,), daemon=True)
        thread.start()
        fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/p?q=1", b'{"a": 1}', timeout_s=LONG_S)
        thread.join(LONG_S)
    assert heard[0].startswith(b"POST /p?q=1 HTTP/1.1\r\n")
    assert b"Content-Type: application/json" in heard[0]
