"""A jail: runs programs written by a model one after the other; each ends within its limits.

    Jail.run ── a backend's ``start`` ──> (bwrap: process 1 of its own) runner.py: the program

Its output is read here as it arrives, up to a bound, and its time is measured here, without the wait for a free core,
which the kernel reports (schedstat). When a program has ended, all its processes have ended.
"""

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from penstock.text import format_exc
from penstock.workers.rewards.jail.backends import Backend, Cell, Walls, user_of_its_own
from penstock.workers.rewards.jail.task import RUNNER, End, Ended, Limits, Task, to_stdin

#: Seconds between two checks of a program's time.
TICK_S = 0.05
#: Characters at the end of the error output that are kept.
MAX_ERRORS = 2000
#: Longest wait for a killed program to end, before the process around it is killed.
_GONE_S = 2.0
_PIECE = 64 * 1024
#: The program's process id, as written by bubblewrap.
_PROGRAM = re.compile(rb'"child-pid": (\d+)[\s,}]')
#: First error output of the program's process: the jail is complete.
READY = b"ready\n"
#: Longest start of the jail, without the wait for a free core.
_START_S = 60.0


class JailError(Exception):
    """The jail could not be created; the message says why."""


class Jail:
    """Run programs, one at a time; only in processes with a single thread, because it forks.

    Args:
        limits: of each program.
    """

    def __init__(self, backend: Backend, walls: Walls, limits: Limits) -> None:
        self.backend = backend
        self.walls = walls
        self.limits = limits

    def describe(self) -> str:
        """Describe the isolation, for a person."""
        user = "this user's id" if self._user() is None else "a user of its own"
        return f"{self.backend.name}: {self.backend.means}; {user}"

    def run(self, task: Task, *, test_s: float | None = None) -> Ended:
        """Run one program. Blocks until all its processes have ended.

        Args:
            test_s: a shorter time limit.

        Raises:
            JailError: the jail could not be created, so no program ran.
        """
        limits = self.limits if test_s is None else replace(self.limits, test_s=min(test_s, self.limits.test_s))
        user = self._user()
        stdin = to_stdin(task, _rlimits(limits), user if self.backend.leaves_user else None)
        with open(os.memfd_create("task"), "w+b") as file:
            file.write(stdin)
            file.seek(0)
            argv = [*self.walls.interpreter, RUNNER]
            try:
                process, pid_pipe = self.backend.start(Cell(self.walls, argv, file.fileno(), user, limits.files_bytes))
            except (OSError, subprocess.SubprocessError) as exc:
                raise JailError(format_exc(exc)) from exc
        with contextlib.closing(_Watch(process, pid_pipe, limits)) as watch:
            return watch.until_end()

    def _user(self) -> int | None:
        return user_of_its_own() if self.backend.name != "none" else None


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.files_bytes,
        # Backs up the time limit measured here, for a program with several processes.
        "RLIMIT_CPU": math.ceil(limits.test_s) + 1,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
    }


class _Watch:
    """One running program, from its start to its end.

    Args:
        pid_pipe: the pipe with the id of bubblewrap's first process in the jail, with which all others end; None: there
            is no other process.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", pid_pipe: int | None, limits: Limits) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.pid = process.pid
        self.limits = limits
        self._pidfd = os.pidfd_open(self.pid)
        self._poll = select.poll()
        self._output, self._errors, self._pid_pipe = process.stdout.fileno(), process.stderr.fileno(), pid_pipe
        self._read = {file: bytearray() for file in (self._output, self._errors, pid_pipe) if file is not None}
        for file in (*self._read, self._pidfd):
            os.set_blocking(file, False)
            self._poll.register(file, select.POLLIN)
        self._num_bytes = 0
        self._status: int | None = None
        #: When the program's time began, and how long it had waited for a core by then.
        self._began, self._had_waited_s = time.monotonic(), 0.0
        self._last_waited_s = 0.0
        self._is_ready = False

    def until_end(self) -> Ended:
        """Wait until it ends or exceeds a limit. Raises JailError."""
        how = None
        while how is None and self._status is None:
            self._check(TICK_S)
            how = self._exceeded_limit()
        took_s = self._run_s()
        self.end()
        # Output written before its end.
        self._check(0)
        how = how or self._exceeded_limit()
        code = self._code()
        if not self._is_ready:
            why = self._read[self._errors].decode(errors="replace").strip()[-300:]
            raise JailError(why or f"its process ended with code {code}")
        errors = bytes(self._read[self._errors][len(READY) :][-MAX_ERRORS:]).decode(errors="replace")
        return Ended(how or _ending(code), code, bytes(self._read[self._output]), errors, took_s)

    def end(self) -> None:
        """Kill its remaining processes, and wait until they have ended."""
        # The jail's first process, and with it all others: bubblewrap then collects it and ends.
        for pid in (self._first(), self.pid):
            if self._status is None and pid is not None:
                _kill(pid)
                deadline = time.monotonic() + _GONE_S
                while self._status is None and time.monotonic() < deadline:
                    self._check(TICK_S)
        if self._status is None:
            self._reap()

    def close(self) -> None:
        """End it and close its files."""
        self.end()
        for file in (*self._read, self._pidfd):
            if file not in (self._output, self._errors):
                os.close(file)
        with self.process:
            pass

    def _check(self, wait_s: float) -> None:
        # Errors first: they start with READY, before output can use up the bound on both.
        for file, _ in sorted(self._poll.poll(wait_s * 1000), key=lambda event: event[0] != self._errors):
            if file == self._pidfd:
                self._reap()
            else:
                self._read_available(file)
        if not self._is_ready and bytes(self._read[self._errors][: len(READY)]) == READY:
            self._is_ready = True
            self._began, self._had_waited_s = time.monotonic(), self._waited_s()

    def _reap(self) -> None:
        # Until it is reaped, its id and its group's cannot be reused.
        if self._pid_pipe is None:
            _kill(self.pid)
        self._status = self.process.wait()
        self._poll.unregister(self._pidfd)

    def _read_available(self, file: int) -> None:
        """Read available output, up to one byte more than the bound."""
        while (most := self.limits.output_bytes + 1 - self._num_bytes) > 0:
            try:
                piece = os.read(file, min(_PIECE, most))
            except BlockingIOError:
                return
            if not piece:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(file)
                return
            self._num_bytes += len(piece)
            self._read[file] += piece

    def _exceeded_limit(self) -> End | None:
        if self._num_bytes > self.limits.output_bytes:
            return End.TOO_MUCH_OUTPUT
        return End.OUT_OF_TIME if self._run_s() > (self.limits.test_s if self._is_ready else _START_S) else None

    def _run_s(self) -> float:
        """Return the seconds the program ran, without its wait for a core."""
        return max(0.0, time.monotonic() - self._began - (self._waited_s() - self._had_waited_s))

    def _waited_s(self) -> float:
        """Return the seconds its process waited for a core; the last known value if it has ended.

        A process with children may wait for them, which counts as its own time.
        """
        pid = self._first() or self.pid
        with contextlib.suppress(OSError, ValueError, IndexError):
            if self._pid_pipe is not None:  # bubblewrap's first process waits for the program
                pid = next(iter(_children(pid)), pid)
            if not self._is_ready or not _children(pid):
                self._last_waited_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        return self._last_waited_s

    def _first(self) -> int | None:
        """Return the id of the jail's first process; None if it is not known yet."""
        if self._pid_pipe is None:
            return self.pid
        found = _PROGRAM.search(self._read[self._pid_pipe])
        return int(found[1]) if found else None

    def _code(self) -> int:
        assert self._status is not None
        return self._status if self._status >= 0 else 128 - self._status


def _children(pid: int) -> list[int]:
    """Return the ids of a process's children; [] on kernels that do not report them."""
    return [int(child) for file in Path(f"/proc/{pid}").glob("task/*/children") for child in file.read_text().split()]


def _kill(pid: int) -> None:
    """Kill a process and the process group that it leads, if any."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _ending(code: int) -> End:
    return End.DONE if code == 0 else End.KILLED if code > 128 else End.FAILED
