"""The interface of a fleet to its launcher: on this machine (local.py), or on Ray (ray_fleet.py)."""

from typing import Protocol

from penstock.workers.fleet.kept import Spec, Status


class Launcher(Protocol):
    """Start processes on the fleet's nodes and keep them running. Methods do not block unless they say so."""

    def reserve(self, host: str, ports: list[int]) -> list[int]:
        """Reserve ports of a node; return those that others use."""
        ...

    def release(self, host: str, ports: list[int]) -> None:
        """Release ports."""
        ...

    def start(self, spec: Spec) -> None:
        """Start a process and keep it running. Raises ConfigError if it cannot be placed."""
        ...

    def look(self) -> dict[str, Status]:
        """Return the status of every process, by name; restart what is due. Call it often."""
        ...

    def bounce(self, name: str) -> None:
        """Kill a process and restart it at once."""
        ...

    def terminate(self, name: str) -> None:
        """Send SIGTERM, and do not restart."""
        ...

    def forget(self, name: str) -> None:
        """Kill what is left of a process. Blocks until it has ended."""
        ...

    def close(self) -> None:
        """Kill all processes. Blocks until they have ended."""
        ...
