"""Processes of a fleet on this machine, as children of this process."""

import os

from penstock.errors import ConfigError
from penstock.workers.fleet.kept import Kept, Spec, Status
from penstock.workers.fleet.nodes import LOOPBACK
from penstock.workers.fleet.ports import Reservation


class LocalLauncher:
    """Start processes on this machine; they end with this process, however it ends (Linux)."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}
        self._reservation = Reservation()

    def reserve(self, host: str, ports: list[int]) -> list[int]:
        """Reserve ports for the life of this process; return those that are not free."""
        return self._reservation.hold(ports)

    def release(self, host: str, ports: list[int]) -> None:
        """Release ports."""
        self._reservation.release(ports)

    def start(self, spec: Spec) -> None:
        """Start a process and keep it running."""
        if spec.host not in (LOOPBACK, "localhost", os.uname().nodename):
            raise ConfigError(
                f"{spec.name} belongs on host {spec.host}, and fleet.launcher local starts processes on this machine "
                f"alone: use launcher ray, or name one node {LOOPBACK} in fleet.nodes."
            )
        kept = Kept(spec)
        kept.start()
        self._kept[spec.name] = kept

    def look(self) -> dict[str, Status]:
        """Restart what is due; return the status of every process. Call it often; does not block."""
        return {name: kept.look() for name, kept in self._kept.items()}

    def bounce(self, name: str) -> None:
        """Kill a process and restart it at once."""
        self._kept[name].bounce()

    def terminate(self, name: str) -> None:
        """Send SIGTERM, and do not restart."""
        self._kept[name].terminate()

    def forget(self, name: str) -> None:
        """Kill what is left of a process, and do not restart it."""
        if (kept := self._kept.pop(name, None)) is not None:
            kept.kill()

    def close(self) -> None:
        """Kill all processes."""
        for name in list(self._kept):
            self.forget(name)
        self._reservation.close()
