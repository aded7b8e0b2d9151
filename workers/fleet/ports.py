"""Ports of a node: assigned by a plan, and reserved on the node while the fleet lives."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from penstock.errors import ConfigError
from penstock.system.disk import own_file, own_folder


class Ports:
    """Assign ports of one node, each once, in order.

    Args:
        first, last: the range, both included.
        taken: ports that others use.
    """

    def __init__(self, host: str, first: int, last: int, taken: Collection[int] = ()) -> None:
        self._host = host
        self._first, self._last = first, last
        self._next = first
        self._taken = taken

    def take(self, what: str, count: int = 1) -> int:
        """Return the first of ``count`` ports in a row. Raises ConfigError naming ``what`` if the range is used up."""
        start = self._next
        while start + count - 1 <= self._last:
            blocked = [port for port in range(start, start + count) if port in self._taken]
            if not blocked:
                self._next = start + count
                return start
            start = blocked[-1] + 1
        raise ConfigError(
            f"fleet.ports [{self._first}, {self._last}] is too small for host {self._host}: no {count} free port"
            f"{'s in a row' if count > 1 else ''} left for {what} ({len(self._taken)} are in use); widen the range."
        )


class Reservation:
    """Ports reserved against other penstock fleets of this user on this machine, until ``close`` or death."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-ports-{os.getuid()}"
        self._held: dict[int, int] = {}

    def hold(self, ports: Iterable[int]) -> list[int]:
        """Reserve ports; return those that are not free: reserved by another fleet, or in use.

        The free ones stay reserved. Does not block.

        Raises:
            ConfigError: another user owns the folder of reservations.
        """
        try:
            return self._hold(ports)
        except PermissionError as exc:
            raise ConfigError(f"fleet.ports cannot be reserved ({exc}): set TMPDIR to a folder of your own.") from exc

    def _hold(self, ports: Iterable[int]) -> list[int]:
        own_folder(self._folder)
        refused = []
        for port in ports:
            if port in self._held:
                continue
            lock = own_file(self._folder / str(port))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                refused.append(port)
                continue
            if not _is_free(port):
                os.close(lock)
                refused.append(port)
                continue
            self._held[port] = lock
        return refused

    def release(self, ports: Iterable[int]) -> None:
        """Release these ports; ignores those that are not held."""
        for port in ports:
            if (lock := self._held.pop(port, None)) is not None:
                os.close(lock)

    def close(self) -> None:
        """Release all ports."""
        self.release(list(self._held))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As a server does that reuses the port of another: closing connections do not block it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True
