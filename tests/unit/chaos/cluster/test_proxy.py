"""The proxy breaks what it is told to, where it is told to, and nothing else."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster.proxy import DOWN, HOST, UP
from tests.chaos.cluster.proxy_control import ProxyControl

#: What the server answers to any line.
REPLY = b"+0123456789\r\n"


class Server:
    """Answers each line, and keeps what it was asked."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self.asked: list[bytes] = []
        self.changed = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, line.makefile("rb") as lines:
            for asked in lines:
                with self.changed:
                    self.asked.append(asked.strip())
                    self.changed.notify_all()
                try:
                    line.sendall(REPLY)
                except OSError:
                    return

    def until_asked(self, *asked: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.asked == list(asked), 30), self.asked

    def close(self) -> None:
        self._listener.close()


class Client:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=30)

    def ask(self, line: bytes) -> bytes:
        """The answer, as far as it came before the connection ended."""
        self.send(line)
        return self.read()

    def send(self, line: bytes) -> None:
        self.socket.sendall(line + b"\n")

    def read(self) -> bytes:
        said = b""
        try:
            while not said.endswith(b"\n") and (more := self.socket.recv(100)):
                said += more
        except ConnectionResetError:
            pass
        return said


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def proxy(server: Server, tmp_path: Path) -> Iterator[ProxyControl]:
    proxy = ProxyControl(tmp_path, HOST, server.port)
    yield proxy
    proxy.stop()


def test_a_way_that_is_open_passes_everything_on(proxy: ProxyControl, server: Server) -> None:
    client = Client(proxy.way("worker"))

    assert client.ask(b"one") == REPLY
    assert client.ask(b"two") == REPLY
    assert server.asked == [b"one", b"two"]
    assert proxy.way("worker") == proxy.way("worker")
    assert proxy.lines() == 1


@pytest.mark.parametrize(
    ("where", "told", "asked"),
    [("request", b"", []), ("reply", b"", [b"two"]), ("mid_reply", REPLY[: len(REPLY) // 2], [b"two"])],
)
def test_a_trap_ends_the_connection_where_it_was_set(
    proxy: ProxyControl, server: Server, where: str, told: bytes, asked: list[bytes]
) -> None:
    client = Client(proxy.way("worker"))
    trap = proxy.trap(where, "two", names=["worker"])
    assert client.ask(b"one") == REPLY
    assert proxy.sprung(trap) == 0

    assert client.ask(b"two") == told
    assert proxy.sprung(trap) == 1

    again = Client(proxy.way("worker"))
    assert again.ask(b"two") == REPLY, "it springs once"
    server.until_asked(b"one", *asked, b"two")


def test_what_was_held_back_arrives_late_though_its_client_is_gone(proxy: ProxyControl, server: Server) -> None:
    client = Client(proxy.way("worker"))
    assert client.ask(b"one") == REPLY
    proxy.hold([UP], ["worker"])
    client.send(b"late")
    client.socket.close()
    other = Client(proxy.way("buffer"))
    assert other.ask(b"two") == REPLY, "another way is open"
    assert server.asked == [b"one", b"two"]

    proxy.open(["worker"])

    server.until_asked(b"one", b"two", b"late")


def test_one_direction_stops_and_the_other_goes_on(proxy: ProxyControl, server: Server) -> None:
    client = Client(proxy.way("worker"))
    assert client.ask(b"one") == REPLY
    proxy.hold([DOWN], ["worker"])
    client.send(b"two")
    server.until_asked(b"one", b"two")
    client.socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.socket.recv(100)
    client.socket.settimeout(30)

    proxy.open(["worker"])

    assert client.read() == REPLY


def test_a_way_that_refuses_ends_all_connections_and_each_new_one(proxy: ProxyControl, server: Server) -> None:
    client, port = Client(proxy.way("worker")), proxy.way("worker")
    assert client.ask(b"one") == REPLY
    proxy.refuse(["worker"])
    assert client.read() == b""
    assert _answer(port) == b""

    proxy.open(["worker"])

    assert Client(port).ask(b"two") == REPLY


def _answer(port: int) -> bytes:
    try:
        return Client(port).read()
    except OSError:
        return b""


def test_an_order_that_cannot_be_obeyed_is_an_error(proxy: ProxyControl) -> None:
    with pytest.raises(RuntimeError, match="could not refuse"):
        proxy.refuse(["nobody"])
