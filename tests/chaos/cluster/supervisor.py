"""Keeps processes up, as a service manager does: what died is started again, at once and then after longer waits.

Processes of one ``group`` live and die together, as a launcher of ranks has it: when one dies the others are killed,
and all are started anew.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.system.keeper import die_with
from tests.chaos.cluster.forked import Process, Zygote
from tests.chaos.cluster.processes import kept, runs

#: Between two looks at the processes.
LOOK_S = 0.05
#: Kinds of parts whose process waits for a keeper and the process that works.
KEPT = ("worker", "verifier")
#: Wait before a restart; doubles with each death of a process that lived for less than ``LIVED_S``.
FIRST_WAIT_S, LONGEST_WAIT_S, LIVED_S = 0.2, 3.0, 10.0


@dataclass(slots=True, eq=False)
class Part:
    """One part of a run: a name, and the process that has it now."""

    kind: str
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    #: Those that live and die together; '': it alone.
    group: str = ""
    #: Whether an end with exit code 0 is one for good.
    may_finish: bool = False
    pid: int = 0
    #: When (monotonic) it was started last.
    started: float = 0.0
    #: Times that it was started.
    lives: int = 0
    #: Exit codes of its former lives; minus the signal of one that was killed.
    exits: list[int] = field(default_factory=list)
    process: Process | None = None
    #: Whether a zygote may fork it: ``command`` is ``python -m MODULE ...``.
    is_forked: bool = False
    #: Whether another part starts it, and keeps it up: ``pid`` is found by ``seek``, or told by who sees it.
    is_adopted: bool = False
    seek: Callable[[], int] | None = None
    is_held: bool = False
    is_retired: bool = False
    is_stopped: bool = False
    _start_at: float = 0.0
    _wait_s: float = FIRST_WAIT_S

    @property
    def is_alive(self) -> bool:
        if self.is_adopted:
            return runs(self.pid)
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Parts by name. Thread-safe; parts are started by its own thread, which lives as long as they do.

    Args:
        folder: their working directory.
        expand: called before each start with the part; its environment for this life, on top of its own.
        zygote: forks the parts that may be; None: all are started from scratch.
    """

    def __init__(
        self, folder: Path, expand: Callable[[Part], Mapping[str, str]] = lambda part: {}, zygote: Zygote | None = None
    ) -> None:
        self.parts: dict[str, Part] = {}
        self._folder = folder
        self._expand = expand
        self._zygote = zygote
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="supervisor")
        self._thread.start()

    def add(self, *parts: Part) -> None:
        """Keep these up from now on; a group is added as one."""
        with self._lock:
            self.parts |= {part.name: part for part in parts}

    def send(self, part: Part, number: int) -> int:
        """Send a signal to the process that has the part now; its pid, or 0 where there is none."""
        with self._lock:
            if not part.is_alive:
                return 0
            part.is_stopped = number == signal.SIGSTOP or (part.is_stopped and number != signal.SIGCONT)
            try:
                os.kill(_target(part, number), number)
            except ProcessLookupError:  # one that another part has reaped meanwhile
                return 0
            return part.pid

    def hold(self, part: Part) -> None:
        """Leave it dead, once it is."""
        with self._lock:
            part.is_held = True

    def let_up(self, part: Part) -> None:
        """Keep it up again."""
        with self._lock:
            part.is_held, part._start_at = False, 0.0

    def retire(self, part: Part, number: int = signal.SIGTERM) -> None:
        """It leaves for good; returns at once."""
        with self._lock:
            part.is_retired = True
            self.send(part, signal.SIGCONT)
            self.send(part, number)

    def unexpected(self) -> list[tuple[str, int]]:
        """(name, exit code) of ends that no signal made, and that were not clean."""
        with self._lock:
            return [(part.name, code) for part in self.parts.values() for code in part.exits if code > 0]

    def adopt(self, part: Part, pid: int) -> None:
        """``part`` was seen as this process; 0: as none."""
        with self._lock:
            if pid and pid != part.pid:
                part.lives, part.started, part.is_stopped = part.lives + 1, time.monotonic(), False
            part.pid = pid

    def end(self) -> None:
        """Kill everything; blocks until it is gone."""
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what the supervisor itself died of."""
        if self._error is not None:
            raise RuntimeError("the supervisor of the parts has died") from self._error

    def _watch(self) -> None:
        try:
            while not self._ended.wait(LOOK_S):
                self._look()
        except BaseException as exc:
            self._error = exc
        finally:
            self._kill_all()

    def _kill_all(self) -> None:
        for part in self.parts.values():
            if part.process is not None and part.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    part.process.kill()
                part.process.wait()
        if self._zygote is not None:
            self._zygote.end()

    def _look(self) -> None:
        with self._lock:
            for part in list(self.parts.values()):
                self._look_at(part)
            for part in list(self.parts.values()):
                self._start_if_due(part)

    def _look_at(self, part: Part) -> None:
        if part.is_adopted:
            if part.seek is not None and not part.is_alive and not part.is_retired:
                self.adopt(part, part.seek())
            return
        if not part.is_alive or part.process is None or part.process.poll() is None:
            return
        part.exits.append(part.process.returncode)
        part.is_stopped = False
        lived = time.monotonic() - part.started
        part._wait_s = FIRST_WAIT_S if lived > LIVED_S else min(LONGEST_WAIT_S, 2 * part._wait_s)
        part._start_at = time.monotonic() + part._wait_s
        if part.may_finish and part.process.returncode == 0:
            part.is_retired = True
            return
        for other in self._others(part):
            self.send(other, signal.SIGKILL)

    def _start_if_due(self, part: Part) -> None:
        if part.is_adopted:
            return
        group = [part, *self._others(part)]
        if any(one.is_alive or one.is_held or one.is_retired for one in group if one.group or one is part):
            return
        if time.monotonic() >= max(one._start_at for one in group):
            for one in group:
                self._start(one)

    def _others(self, part: Part) -> list[Part]:
        """The rest of its group."""
        same = (one for one in self.parts.values() if part.group and one.group == part.group)
        return [one for one in same if one is not part]

    def _start(self, part: Part) -> None:
        part.lives += 1
        environment = {**os.environ, **part.environment, **self._expand(part)}
        with part.log.open("ab") as log:
            log.write(f"--- {part.name}, life {part.lives}\n".encode())
        if self._zygote is not None and part.is_forked:
            part.process = self._zygote.fork(part.command[2:], environment, part.log)
        else:
            part.process = self._execute(part, environment)
        part.pid, part.started = part.process.pid, time.monotonic()

    def _execute(self, part: Part, environment: Mapping[str, str]) -> Process:
        with part.log.open("ab") as log:
            return subprocess.Popen(
                part.command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with(),
            )


def _target(part: Part, number: int) -> int:
    """Return the process to signal: of a part under a keeper the one that works; SIGKILL hits each in turn."""
    if part.kind not in KEPT or number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
        return part.pid
    pids = kept(part.pid)
    return pids[-1 - part.lives % len(pids)] if number == signal.SIGKILL else pids[-1]


def searched(*folders: str) -> str:
    """A ``PYTHONPATH`` of these folders, before those that this process was given itself."""
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
