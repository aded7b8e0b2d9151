"""A server of threads that cannot be filled: who reaches its port takes handles and threads of the part it is in."""

import logging
import socket
import sys
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any

log = logging.getLogger(__name__)

#: Connections that are open at once; the oldest is cut for one more.
MAX_CONNECTIONS = 32
#: Threads at most, those included whose connection was cut and that have not seen it yet.
MAX_THREADS = 4 * MAX_CONNECTIONS
#: Longest wait for the next bytes of a request, and for the client to take some.
STALL_S = 10.0


class BoundedThreads(ThreadingMixIn):
    """To be put before a server of ``socketserver``: a daemon thread for each connection, and not too many of them."""

    daemon_threads = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        #: The oldest first; True: it was cut, and its thread has not ended.
        self._open: dict[Any, bool] = {}
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            has_room = len(self._open) < MAX_THREADS
            living = [one for one, is_cut in self._open.items() if not is_cut]
            if has_room and len(living) >= MAX_CONNECTIONS:
                self._open[living[0]] = True
                with suppress(OSError):
                    living[0].shutdown(socket.SHUT_RDWR)
            if has_room:
                self._open[request] = False
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left, or says nothing, is no error of ours."""
        is_theirs = isinstance(sys.exception(), OSError)
        log.log(logging.DEBUG if is_theirs else logging.ERROR, "a request of %s failed", client_address, exc_info=True)
