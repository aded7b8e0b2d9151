"""A TCP proxy before a Redis whose every connection can be cut, and let through again."""

import contextlib
import select
import socket
import threading
from collections.abc import Collection, Iterator
from urllib.parse import urlsplit, urlunsplit


class CutProxy:
    """Passes bytes on between whoever connects to ``url`` and the server at ``target``, from ``up`` on.

    Args:
        refused: numbers of connections, from 1 on, that are ended at once.
    """

    def __init__(self, target: str, refused: Collection[int] = ()) -> None:
        self._refused = refused
        #: Connections so far.
        self.count = 0
        self._parts = urlsplit(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_cut = False
        self._ended = False

    @property
    def url(self) -> str:
        user, at, _ = self._parts.netloc.rpartition("@")
        port = self._listener.getsockname()[1]
        return urlunsplit(self._parts._replace(netloc=f"{user}{at}127.0.0.1:{port}"))

    @contextlib.contextmanager
    def up(self) -> Iterator["CutProxy"]:
        threading.Thread(target=self._accept, name="cut-proxy", daemon=True).start()
        try:
            yield self
        finally:
            self._ended = True
            self.cut()
            self._listener.close()

    def cut(self) -> None:
        """End every connection, and every new one at once, until ``heal``."""
        with self._lock:
            self._is_cut = True
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        with self._lock:
            self._is_cut = False

    def _accept(self) -> None:
        while not self._ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.count += 1
                if self._is_cut or self.count in self._refused:
                    near.close()
                    continue
                far = socket.create_connection((self._parts.hostname or "127.0.0.1", self._parts.port or 6379))
                self._open |= {near, far}
            threading.Thread(target=self._pass_on, args=(near, far), daemon=True).start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with contextlib.suppress(OSError):
            while True:
                readable, _, _ = select.select([near, far], [], [])
                chunks = [(one, one.recv(65536)) for one in readable]
                if not all(data for _, data in chunks):
                    break
                for one, data in chunks:
                    other[one].sendall(data)
        with self._lock:
            self._open -= {near, far}
            near.close()
            far.close()
