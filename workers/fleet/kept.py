"""One process of a fleet on its node, restarted whenever it dies; a crash loop is a state, not a spin."""

import os
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from penstock.config.load import without_settings
from penstock.system.log_files import LOOK_EVERY_S, bound
from penstock.system.processes import Child, python_command, python_environment

#: Pause before a process in a crash loop is retried.
LOOP_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Spec:
    """Specification of a process. Sent to other nodes: plain values only."""

    name: str
    kind: Literal["worker", "engine", "encoder", "router"]
    host: str
    gpus: tuple[int, ...]
    #: Module and arguments under the node's own interpreter.
    arguments: tuple[str, ...]
    #: Added to the node's environment; contains secrets.
    environment: dict[str, str] = field(repr=False)
    log_path: str
    #: Processes of one engine over several nodes start and end together.
    tie: str = ""
    #: ``logs.max_bytes`` and ``logs.keep``.
    max_log_bytes: int = 64 * 1024**2
    keep_logs: int = 3


class ProcessState(StrEnum):
    """State of a process of a fleet."""

    #: Not started before its encoders answer.
    WAITING = "waiting for encoders"
    RUNNING = "running"
    RESTARTING = "restarting"
    CRASH_LOOP = "crash loop"
    #: It was asked to end, or ended by itself with exit code 0.
    ENDED = "ended"
    #: Its node or actor is unreachable.
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Status:
    """State of a process, with details."""

    state: ProcessState
    pid: int = 0
    starts: int = 0
    #: How it last ended, with its last log lines.
    why: str = ""
    host: str = ""


class Kept:
    """A process and its restarts. ``look`` must be called regularly."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        path = Path(spec.log_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = python_environment(without_settings(os.environ)) | spec.environment
        self._child = Child(spec.name, python_command(*spec.arguments), environment, path)
        self._retry_at = self._look_at_log = 0.0
        self._looping = False
        self._ended = False
        self._why = ""

    def start(self) -> None:
        """Start the process; returns at once."""
        self._ended, self._retry_at = False, 0.0
        self._child.start()

    def look(self) -> Status:
        """Restart the process if due; return its status. Does not block."""
        child = self._child
        if child.ended():
            if child.code == 0:
                self._ended = True
            else:
                words = child.last_words(3)
                self._why = f"ended by {child.how()}" + (f": {words}" if words else "")
                if child.schedule_restart() is not None:
                    self._looping, self._retry_at = True, time.monotonic() + LOOP_RETRY_S
        elif self._retry_at and time.monotonic() >= self._retry_at:
            self.start()
        child.restart_if_due()
        self._bound_log()
        if child.alive():
            # It counts as recovered once it has lived longer than the pause before a retry.
            if self._looping and not self._retry_at and child.age_s > LOOP_RETRY_S:
                self._looping = False
            state = ProcessState.CRASH_LOOP if self._looping else ProcessState.RUNNING
            return Status(state, child.pid or 0, child.num_starts, self._why)
        return Status(self._down(), 0, child.num_starts, self._why)

    def _bound_log(self) -> None:
        if time.monotonic() >= self._look_at_log:
            self._look_at_log = time.monotonic() + LOOK_EVERY_S
            bound([self._child.log_path], self.spec.max_log_bytes, self.spec.keep_logs)

    def _down(self) -> ProcessState:
        """Return the state of a process that does not run."""
        if self._ended:
            return ProcessState.ENDED
        return ProcessState.CRASH_LOOP if self._looping else ProcessState.RESTARTING

    def bounce(self) -> None:
        """Kill the process and restart it at once: another process of its engine died."""
        self._child.kill()
        self.start()

    def terminate(self) -> None:
        """Send SIGTERM, and do not restart; a worker drains."""
        self._retry_at = 0.0
        if not self._child.alive():
            self._ended = True
        self._child.terminate()

    def kill(self) -> None:
        """Send SIGKILL, and do not restart; blocks until the process has ended."""
        self._retry_at, self._ended = 0.0, True
        self._child.kill()
