"""What a fleet needs of whoever starts its processes: on this machine (local.py), or by Ray (ray_fleet.py)."""

from typing import Protocol

from penstock.workers.fleet.kept import Spec, Status


class Launcher(Protocol):
    """Starts processes on the fleet's nodes and keeps them up. Nothing blocks but what says so."""

    def reserve(self, host: str, ports: list[int]) -> list[int]:
        """Hold ports of a node; returns those that others have."""
        ...

    def release(self, host: str, ports: list[int]) -> None:
        """Let go of ports."""
        ...

    def start(self, spec: Spec) -> None:
        """Start a process, which is kept up from then on. Raises ConfigError where there is no place for it."""
        ...

    def look(self) -> dict[str, Status]:
        """How every process stands, by name; restarts what is due. To be called often."""
        ...

    def bounce(self, name: str) -> None:
        """Kill a process and start it again at once."""
        ...

    def terminate(self, name: str) -> None:
        """SIGTERM, and no restart."""
        ...

    def forget(self, name: str) -> None:
        """Kill what is left of a process. Blocks until it is gone."""
        ...

    def close(self) -> None:
        """Kill everything. Blocks until it is gone."""
        ...
