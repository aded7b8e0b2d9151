"""A threaded server with limits: clients of its port cannot use up the process' handles and threads."""

import logging
import socket
import sys
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any

log = logging.getLogger(__name__)

#: Most open connections; the oldest is closed for one more.
MAX_CONNECTIONS = 32
#: Most threads, including those that have not noticed that their connection was closed.
MAX_THREADS = 4 * MAX_CONNECTIONS
#: Longest wait for the next bytes of a request, and for the client to take some.
STALL_S = 10.0


class BoundedThreads(ThreadingMixIn):
    """A mixin for servers of ``socketserver``: a daemon thread for each connection, with a limit."""

    daemon_threads = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        #: The oldest first; True: it was closed, and its thread has not ended.
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
        """Log an error of a client at debug level: it is not ours."""
        is_theirs = isinstance(sys.exception(), OSError)
        log.log(logging.DEBUG if is_theirs else logging.ERROR, "a request of %s failed", client_address, exc_info=True)
