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


class LocalProcess:
    """A child of this process, and its restarts; see Process. It ends with this process, however that ends (Linux)."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
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
        child = self._child
        if child.ended():
            self._note_end()
        child.restart_if_due()
        if child.alive() and child.age_s > LOOP_RETRY_S:
            self._looping = False
        if time.monotonic() >= self._look_at_log:
            self._look_at_log = time.monotonic() + LOOK_EVERY_S
            bound([child.log_path], self._spec.max_log_bytes)
        state = ProcessState.RUNNING if child.alive() else ProcessState.RESTARTING
        state = ProcessState.ENDED if self._ended else ProcessState.CRASH_LOOP if self._looping else state
        return Status(state, child.pid or 0, child.num_starts, self._why, self._spec.host)

    def _note_end(self) -> None:
        # A worker that drained is done; a server is needed, whatever code it ended with.
        child, self._ended = self._child, self._is_to_end or (self._child.code == 0 and not self._spec.command)
        if not self._ended:
            words = child.last_words(3)
            self._why = f"ended by {child.how()}" + (f": {words}" if words else "")
            if child.schedule_restart() is not None:
                self._looping = True
                child.restart_in(LOOP_RETRY_S)

    def bounce(self) -> None:
        self._child.kill()
        self._ended = self._is_to_end = False
        self._child.start()

    def terminate(self) -> None:
        self._is_to_end, self._ended = True, not self._child.alive()
        self._child.terminate()

    def kill(self) -> None:
        self._ended = True
        self._child.kill()


class LocalLauncher(Nodes):
    """Start processes on this machine."""

    def __init__(self, config: Config) -> None:
        super().__init__(local_nodes(config), config.fleet.ports, reserves=True)
        here = (LOOPBACK, "localhost", os.uname().nodename)
        if others := [host for host in self.hosts if host not in here]:
            raise ConfigError(
                f"fleet.nodes names {others[0]}, and fleet.launcher local starts processes on this machine alone: "
                f"use launcher ray, or name one node {LOOPBACK}."
            )

    def start(self, spec: Spec) -> LocalProcess:
        return LocalProcess(spec)

    def close(self) -> None:
        """Do nothing: the processes are killed."""
