"""A TCP proxy before a server whose answers are cut, changed or held back."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

How = Literal["cut", "change", "stall"]


class SpoilingProxy:
    """Passes on what whoever connects asks the server at ``target``, and spoils its answers, from ``up`` on.

    Args:
        how: cut an answer behind ``after`` bytes, change the byte there, or send nothing more.
        count: of so many connections, the first ones; all others are passed on as they are.
    """

    def __init__(self, target: str, how: How, *, after: int, count: int = 1 << 30) -> None:
        self._at = urlsplit(target)
        self._how, self._after, self._count = how, after, count
        #: Connections so far.
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @contextlib.contextmanager
    def up(self) -> Iterator["SpoilingProxy"]:
        threading.Thread(target=self._accept, name="spoiling-proxy", daemon=True).start()
        try:
            yield self
        finally:
            self._ended.set()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            is_spoilt = self.num_connections <= self._count
            threading.Thread(target=self._pass_on, args=(near, is_spoilt), daemon=True).start()

    def _pass_on(self, near: socket.socket, is_spoilt: bool) -> None:
        far = socket.create_connection((self._at.hostname, self._at.port))
        with near, far, contextlib.suppress(OSError):
            asking = threading.Thread(target=_ask, args=(near, far), daemon=True)
            asking.start()
            try:
                self._answer(near, far, is_spoilt)
            finally:
                # A close alone waits for who reads there.
                for one in (near, far):
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                asking.join()

    def _answer(self, near: socket.socket, far: socket.socket, is_spoilt: bool) -> None:
        passed = 0
        while data := far.recv(16 * 1024):
            if is_spoilt and passed <= self._after < passed + len(data):
                data = self._spoil(near, data, self._after - passed)
                if not data:
                    return
            near.sendall(data)
            passed += len(data)

    def _spoil(self, near: socket.socket, data: bytes, at: int) -> bytes:
        if self._how == "change":
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        near.sendall(data[:at])
        if self._how == "stall":
            self._ended.wait(60)
        return b""


def _ask(near: socket.socket, far: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := near.recv(16 * 1024):
            far.sendall(data)
        far.shutdown(socket.SHUT_WR)
