"""A jail: programs that a model wrote are run in it one after the other, and each ends within its limits.

    Jail.run ── forks ──> a warden's ``enter`` ──> (bwrap, namespaces: process 1 of its own) inside.py: the program

What it prints is read here as it comes, up to a bound; time is counted here. Waiting for a free core is nobody's
fault and not counted: the kernel says how long the program waited so (schedstat). When a program has ended, all that
it started has ended.
"""

import atexit
import contextlib
import json
import math
import os
import re
import select
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from penstock.text import format_exc
from penstock.workers.rewards.jail import cgroups, libc
from penstock.workers.rewards.jail.task import End, Ended, Limits, Task
from penstock.workers.rewards.jail.walls import Walls
from penstock.workers.rewards.jail.wardens import Cell, Files, Warden, user_of_its_own

#: Between two looks at a program's time.
TICK_S = 0.05
#: Most characters of errors that are kept, from their end.
MAX_ERRORS = 2000
#: Longest wait for a program to be gone that was killed, before what it is in is killed.
_GONE_S = 2.0
_PIECE = 64 * 1024
#: Exit code of a child that did not come as far as the program.
_NO_PROGRAM = 125
#: What is told by wardens here, and by bubblewrap.
_PROGRAM = re.compile(rb'(?:\{\s*"child-pid": )?(\d+)[\s,}]')
#: What the program's process writes first, as an error: all of the jail is there.
READY = b"ready\n"
CANNOT = b"cannot: "
#: Longest time until then, the wait for a free core left out.
_START_S = 60.0
_INSIDE = Path(__file__).with_name("inside.py").read_text()


class JailError(Exception):
    """The jail could not be made; the sentence says why."""


class Jail:
    """Runs programs, one at a time; for processes of one thread, because it forks.

    Args:
        limits: of each program.
    """

    def __init__(self, warden: Warden, walls: Walls, limits: Limits) -> None:
        self.warden = warden
        self.walls = walls
        self.limits = limits
        self._groups: cgroups.Groups | None = None
        self._made_by = 0

    def describe(self) -> str:
        """What shuts programs off here, for a person."""
        groups = self._own_groups()
        user = "a user of its own" if user_of_its_own() is not None and self.warden.name != "none" else "this user's id"
        memory = "memory of all processes by cgroup" if groups.folders else "memory of each process by rlimit"
        return f"{self.warden.name}: {self.warden.means}; {user}; {memory}"

    def run(self, task: Task, *, test_s: float | None = None) -> Ended:
        """Run one program. Blocks until all of it has ended.

        Args:
            test_s: less time than the limit has.

        Raises:
            JailError: there is no program, because the jail could not be made.
        """
        limits = self.limits if test_s is None else replace(self.limits, test_s=min(test_s, self.limits.test_s))
        user = user_of_its_own() if self.warden.name != "none" else None
        with contextlib.ExitStack() as stack:
            task_file = stack.enter_context(_File(os.memfd_create("task")))
            with open(task_file, "wb", closefd=False) as writing:
                writing.write(_as_json(task, limits, user if self.warden.leaves_user else None))
            os.lseek(task_file, 0, os.SEEK_SET)
            pipes = [_Pipe(stack) for _ in range(3)]
            groups = tuple(stack.enter_context(_File(file)) for file in self._own_groups().open())
            files = Files(task_file, pipes[0].end, pipes[1].end, pipes[2].end, groups)
            argv = [*self.walls.interpreter, _INSIDE]
            pid = _fork(self.warden, Cell(self.walls, files, argv, user, limits.files_bytes))
            for pipe in pipes:
                pipe.close_end()
            watch = _Watch(pid, pipes[0].begin, pipes[1].begin, pipes[2].begin, limits)
            try:
                return watch.until_end()
            finally:
                watch.close()

    def close(self) -> None:
        """Remove what was made for it."""
        if self._groups is not None and self._made_by == os.getpid():
            self._groups.remove()
            self._groups = None

    def _own_groups(self) -> cgroups.Groups:
        """Of this process: a fork makes its own."""
        if self._groups is None or self._made_by != os.getpid():
            self._groups, self._made_by = cgroups.make(self.limits.memory_bytes, self.limits.processes), os.getpid()
            atexit.register(self.close)
        return self._groups


def _as_json(task: Task, limits: Limits, user: int | None) -> bytes:
    held = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.files_bytes,
        # Behind the time that is counted here, for what has several processes.
        "RLIMIT_CPU": math.ceil(limits.test_s) + 1,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    told = {"code": task.code, "stdin": task.stdin, "function": task.function, "arguments": task.arguments}
    return json.dumps({**told, "limits": held, "user": user}).encode()


def _fork(warden: Warden, cell: Cell) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_NO_PROGRAM)
        _forget_signals()
        _close_but(cell.files)
        warden.enter(cell)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            os.write(cell.files.told, CANNOT + format_exc(exc).encode())
    finally:
        _leave()


def _leave() -> NoReturn:
    os._exit(_NO_PROGRAM)


def _forget_signals() -> None:
    """What this process does at a signal is none of the program's."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _close_but(files: Files) -> None:
    """Close all files of this process but the program's own: connections to Redis among them."""
    kept = sorted({0, 1, 2, files.stdin, files.output, files.errors, files.told, *files.groups})
    for before, after in zip(kept, [*kept[1:], 65536], strict=True):
        os.closerange(before + 1, after)


class _File(contextlib.AbstractContextManager[int]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class _Pipe:
    """One way out of the jail: what is read here, and the end that the program has."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.begin, self.end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.begin, False)
        stack.callback(os.close, self.begin)
        self._open = True
        stack.callback(self.close_end)

    def close_end(self) -> None:
        if self._open:
            os.close(self.end)
            self._open = False


class _Watch:
    """One program that runs, from its start to its end."""

    def __init__(self, pid: int, output: int, errors: int, told: int, limits: Limits) -> None:
        self.pid = pid
        self.limits = limits
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._read: dict[int, bytearray] = {output: bytearray(), errors: bytearray(), told: bytearray()}
        self._output, self._errors, self._told = output, errors, told
        for file in (*self._read, self._pidfd):
            self._poll.register(file, select.POLLIN)
        self._num_bytes = 0
        self._status: int | None = None
        #: When the program's time began, and what it had waited for a core by then.
        self._began, self._had_waited_s = time.monotonic(), 0.0
        self._last_waited_s = 0.0
        self._is_ready = False

    def until_end(self) -> Ended:
        """Wait until it ends by itself or for a limit. Raises JailError."""
        how = None
        while how is None and self._status is None:
            self._look(TICK_S)
            how = self._over()
        took_s = self._took_s()
        self.end()
        # What it wrote before it ended.
        self._look(0)
        how = how or self._over()
        code = self._code()
        if not self._is_ready:
            why = bytes(self._read[self._told]).partition(CANNOT)[2] or bytes(self._read[self._errors])
            raise JailError(why.decode(errors="replace").strip()[-300:] or f"its process ended with code {code}")
        errors = bytes(self._read[self._errors][len(READY) :][-MAX_ERRORS:]).decode(errors="replace")
        return Ended(how or _ending(code), code, bytes(self._read[self._output]), errors, took_s)

    def end(self) -> None:
        """Kill what is left of it, and wait until it is gone."""
        # The program first, and with it all that it started: its warden then sees it off, and ends.
        for pid in (self._program(), self.pid):
            if self._status is None and pid is not None:
                _kill(pid)
                deadline = time.monotonic() + _GONE_S
                while self._status is None and time.monotonic() < deadline:
                    self._look(TICK_S)
        if self._status is None:
            self._reap()

    def close(self) -> None:
        """End it, and let go of it."""
        self.end()
        os.close(self._pidfd)

    def _look(self, wait_s: float) -> None:
        # Errors first: that it has begun is said there, before all that may use up what is kept of both.
        for file, _ in sorted(self._poll.poll(wait_s * 1000), key=lambda event: event[0] != self._errors):
            if file == self._pidfd:
                self._reap()
            else:
                self._take(file)
        if not self._is_ready and bytes(self._read[self._errors][: len(READY)]) == READY:
            self._is_ready = True
            self._began, self._had_waited_s = time.monotonic(), self._waited_s()

    def _reap(self) -> None:
        # Until then its id is its own, and its group's.
        if self._program() == self.pid:
            _kill(self.pid)
        _, self._status = os.waitpid(self.pid, 0)
        self._poll.unregister(self._pidfd)

    def _take(self, file: int) -> None:
        """Read what is there, as much as may still be kept and one more."""
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

    def _over(self) -> End | None:
        if self._num_bytes > self.limits.output_bytes:
            return End.TOO_MUCH_OUTPUT
        return End.OUT_OF_TIME if self._took_s() > (self.limits.test_s if self._is_ready else _START_S) else None

    def _took_s(self) -> float:
        """Seconds of the program, without those that it waited for a core."""
        return max(0.0, time.monotonic() - self._began - (self._waited_s() - self._had_waited_s))

    def _waited_s(self) -> float:
        """What its process waited for a core; what was last seen of it where it has ended.

        One that made others may wait for them: its wait is its own matter then.
        """
        process = Path(f"/proc/{self._program() or self.pid}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            if not self._is_ready or not _has_children(process):
                self._last_waited_s = int((process / "schedstat").read_text().split()[1]) / 1e9
        return self._last_waited_s

    def _program(self) -> int | None:
        """The program's process; None where it was not told yet."""
        found = _PROGRAM.match(bytes(self._read[self._told]))
        return int(found[1]) if found else None

    def _code(self) -> int:
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code


def _has_children(process: Path) -> bool:
    """Whether a process has any; False on kernels that do not say."""
    lists = process.glob("task/*/children")
    return any(one.read_text() for one in lists)


def _kill(pid: int) -> None:
    """Kill a process and the group that it leads, where there is one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _ending(code: int) -> End:
    return End.DONE if code == 0 else End.KILLED if code > 128 else End.FAILED
