"""Processes of a fleet on this machine, as children of this process. A crash loop is a state, not a spin."""

import os
import time
from pathlib import Path

from penstock.config import Config
from penstock.config.load import without_settings
from penstock.errors import ConfigError
from penstock.system.log_files import LOOK_EVERY_S, bound
from penstock.system.processes import Child, python_command, python_environment
from penstock.workers.fleet.launcher import ProcessState, Spec, Status
from penstock.workers.fleet.nodes import LOOPBACK, Nodes, local_nodes
from penstock.workers.sglang.args import server_environment

#: Pause before a process in a crash loop is retried.
LOOP_RETRY_S = 30.0


class Kept:
    """A process and its restarts. ``look`` must be called regularly."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        path = Path(spec.log_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if spec.command:
            argv, base = list(spec.command), server_environment(spec.command[0])
        else:
            argv, base = python_command(*spec.arguments), python_environment(without_settings(os.environ))
        self._child = Child(spec.name, argv, base | spec.environment, path, kept=bool(spec.command))
        self._look_at_log = 0.0
        self._looping = self._ended = self._is_to_end = False
        self._why = ""
        self._child.start()

    def look(self) -> Status:
        """Restart the process if due; return its status. Does not block."""
        child = self._child
        if child.ended():
            # A worker that drained is done; a server is needed, whatever code it ended with.
            self._ended = self._is_to_end or (child.code == 0 and not self.spec.command)
            if not self._ended:
                words = child.last_words(3)
                self._why = f"ended by {child.how()}" + (f": {words}" if words else "")
                if child.schedule_restart() is not None:
                    self._looping = True
                    child.restart_in(LOOP_RETRY_S)
        child.restart_if_due()
        if child.alive() and child.age_s > LOOP_RETRY_S:
            self._looping = False
        if time.monotonic() >= self._look_at_log:
            self._look_at_log = time.monotonic() + LOOK_EVERY_S
            bound([child.log_path], self.spec.max_log_bytes)
        state = ProcessState.RUNNING if child.alive() else ProcessState.RESTARTING
        state = ProcessState.ENDED if self._ended else ProcessState.CRASH_LOOP if self._looping else state
        return Status(state, child.pid or 0, child.num_starts, self._why, self.spec.host)

    def bounce(self) -> None:
        """Kill the process and restart it at once: another process of its engine died."""
        self._child.kill()
        self._ended = self._is_to_end = False
        self._child.start()

    def terminate(self) -> None:
        """Send SIGTERM, and do not restart; a worker drains."""
        self._is_to_end, self._ended = True, not self._child.alive()
        self._child.terminate()

    def kill(self) -> None:
        """Send SIGKILL, and do not restart; blocks until the process has ended."""
        self._ended = True
        self._child.kill()


class LocalLauncher(Nodes):
    """Start processes on this machine; they end with this process, however it ends (Linux)."""

    def __init__(self, config: Config) -> None:
        super().__init__(local_nodes(config), config.fleet.ports, reserves=True)
        self._kept: dict[str, Kept] = {}
        here = (LOOPBACK, "localhost", os.uname().nodename)
        if others := [host for host in self.hosts if host not in here]:
            raise ConfigError(
                f"fleet.nodes names {others[0]}, and fleet.launcher local starts processes on this machine alone: "
                f"use launcher ray, or name one node {LOOPBACK}."
            )

    def start(self, spec: Spec) -> None:
        self._kept[spec.name] = Kept(spec)

    def look(self) -> dict[str, Status]:
        return {name: kept.look() for name, kept in self._kept.items()}

    def bounce(self, name: str) -> None:
        self._kept[name].bounce()

    def terminate(self, name: str) -> None:
        self._kept[name].terminate()

    def forget(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            kept.kill()

    def close(self) -> None:
        for name in list(self._kept):
            self.forget(name)
