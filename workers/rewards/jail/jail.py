"""A jail: runs programs written by a model one after the other; each ends within its limits.

    Jail.run ── forks ──> a warden's ``enter`` ──> (bwrap, namespaces: process 1 of its own) runner.py: the program

Its output is read here as it arrives, up to a bound, and its time is measured here, without the wait for a free core,
which the kernel reports (schedstat). When a program has ended, all its processes have ended.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from penstock.text import format_exc
from penstock.workers.rewards.jail import libc
from penstock.workers.rewards.jail.backends import Cell, Files, Warden, user_of_its_own
from penstock.workers.rewards.jail.mounts import Walls
from penstock.workers.rewards.jail.task import End, Ended, Limits, Task

_PREFIX = "penstock-jail-"
#: Processes that a warden needs besides the program's.
_SPARE = 2


@dataclass(frozen=True, slots=True)
class Groups:
    """Create a cgroup for the programs of one process, if allowed, to limit the memory and processes of all of them.

    It complements rlimits, which bind each process separately, and root not at all. Version 1 has one hierarchy for
    each of the two limits, version 2 one for both. The folder is created below our own group's, or beside it if version
    2 allows none below. It is reused for each program and removed at the end; one of a killed process is removed by the
    next that is created there.
    """

    folders: tuple[Path, ...] = ()
    #: Why there are none, or ''.
    lack: str = ""

    def open(self) -> tuple[int, ...]:
        """Open the files to which a process writes 0 to join the groups; the caller closes them."""
        return tuple(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders)

    def remove(self) -> None:
        """Remove the groups; one that still has a process is left."""
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def make(memory_bytes: int, processes: int, root: Path = Path("/")) -> Groups:
    """Create groups for this process; none if not allowed here. ``root`` of the file system is set in tests."""
    made: list[Path] = []
    try:
        for parent, limits in _parents(root, memory_bytes, processes + _SPARE):
            _sweep(parent)
            folder = parent / f"{_PREFIX}{os.getpid()}"
            folder.mkdir(exist_ok=True)
            made.append(folder)
            for name, value in limits.items():
                (folder / name).write_text(str(value))
            # Swap counts as memory if it is counted at all.
            for name, value in (("memory.memsw.limit_in_bytes", memory_bytes), ("memory.swap.max", 0)):
                if (folder / name).exists() and any(limit.startswith("memory") for limit in limits):
                    with contextlib.suppress(OSError):
                        (folder / name).write_text(str(value))
    except OSError as exc:
        Groups(tuple(made)).remove()
        return Groups(lack=format_exc(exc))
    return Groups(tuple(made))


def _parents(root: Path, memory_bytes: int, processes: int) -> list[tuple[Path, dict[str, int]]]:
    """Return the folders for new groups, with the limits to set there. Raises OSError if there are none."""
    own = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    mounts = root / "sys/fs/cgroup"
    if "memory" in own and "pids" in own:
        return [
            (mounts / "memory" / own["memory"], {"memory.limit_in_bytes": memory_bytes}),
            (mounts / "pids" / own["pids"], {"pids.max": processes}),
        ]
    return [(_parent_2(mounts / own.get("", "")), {"memory.max": memory_bytes, "pids.max": processes})]


def _parent_2(own: Path) -> Path:
    """Return our own group, or its parent if ours may have none below it because it has processes itself."""
    try:
        _enable(own)
    except OSError:
        _enable(own.parent)
        return own.parent
    return own


def _enable(folder: Path) -> None:
    """Enable memory and process limits for groups below it. Raises OSError."""
    control = folder / "cgroup.subtree_control"
    if missing := {"memory", "pids"} - set(control.read_text().split()):
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def _sweep(parent: Path) -> None:
    """Remove groups of killed processes."""
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


#: Seconds between two checks of a program's time.
TICK_S = 0.05
#: Characters at the end of the error output that are kept.
MAX_ERRORS = 2000
#: Longest wait for a killed program to end, before the process around it is killed.
_GONE_S = 2.0
_PIECE = 64 * 1024
#: Exit code of a child that failed before it became the program.
_NO_PROGRAM = 125
#: The program's process id, as written by wardens here, and by bubblewrap.
_PROGRAM = re.compile(rb'(?:\{\s*"child-pid": )?(\d+)[\s,}]')
#: First error output of the program's process: the jail is complete.
READY = b"ready\n"
CANNOT = b"cannot: "
#: Longest start of the jail, without the wait for a free core.
_START_S = 60.0
_INSIDE = Path(__file__).with_name("runner.py").read_text()


class JailError(Exception):
    """The jail could not be created; the message says why."""


class Jail:
    """Run programs, one at a time; only in processes with a single thread, because it forks.

    Args:
        limits: of each program.
    """

    def __init__(self, warden: Warden, walls: Walls, limits: Limits) -> None:
        self.warden = warden
        self.walls = walls
        self.limits = limits
        self._groups: Groups | None = None
        self._made_by = 0

    def describe(self) -> str:
        """Describe the isolation, for a person."""
        groups = self._own_groups()
        user = "a user of its own" if user_of_its_own() is not None and self.warden.name != "none" else "this user's id"
        memory = "memory of all processes by cgroup" if groups.folders else "memory of each process by rlimit"
        return f"{self.warden.name}: {self.warden.means}; {user}; {memory}"

    def run(self, task: Task, *, test_s: float | None = None) -> Ended:
        """Run one program. Blocks until all its processes have ended.

        Args:
            test_s: a shorter time limit.

        Raises:
            JailError: the jail could not be created, so no program ran.
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
        """Remove its cgroups."""
        if self._groups is not None and self._made_by == os.getpid():
            self._groups.remove()
            self._groups = None

    def _own_groups(self) -> Groups:
        """Return the cgroups of this process: a fork has its own."""
        if self._groups is None or self._made_by != os.getpid():
            self._groups, self._made_by = make(self.limits.memory_bytes, self.limits.processes), os.getpid()
            atexit.register(self.close)
        return self._groups


def _as_json(task: Task, limits: Limits, user: int | None) -> bytes:
    rlimits = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.files_bytes,
        # Backs up the time limit measured here, for a program with several processes.
        "RLIMIT_CPU": math.ceil(limits.test_s) + 1,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    fields = {"code": task.code, "stdin": task.stdin, "function": task.function, "arguments": task.arguments}
    return json.dumps({**fields, "limits": rlimits, "user": user}).encode()


def _fork(warden: Warden, cell: Cell) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_NO_PROGRAM)
        _reset_signals()
        _close_but(cell.files)
        warden.enter(cell)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            os.write(cell.files.told, CANNOT + format_exc(exc).encode())
    finally:
        _leave()


def _leave() -> NoReturn:
    os._exit(_NO_PROGRAM)


def _reset_signals() -> None:
    """Reset signal handlers of this process, which must not apply to the program."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _close_but(files: Files) -> None:
    """Close all files except the program's own: connections to Redis among them."""
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
    """A pipe out of the jail: the end read here, and the program's end."""

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
    """One running program, from its start to its end."""

    def __init__(self, pid: int, output: int, errors: int, pid_pipe: int, limits: Limits) -> None:
        self.pid = pid
        self.limits = limits
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._read: dict[int, bytearray] = {output: bytearray(), errors: bytearray(), pid_pipe: bytearray()}
        self._output, self._errors, self._pid_pipe = output, errors, pid_pipe
        for file in (*self._read, self._pidfd):
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
            why = bytes(self._read[self._pid_pipe]).partition(CANNOT)[2] or bytes(self._read[self._errors])
            raise JailError(why.decode(errors="replace").strip()[-300:] or f"its process ended with code {code}")
        errors = bytes(self._read[self._errors][len(READY) :][-MAX_ERRORS:]).decode(errors="replace")
        return Ended(how or _ending(code), code, bytes(self._read[self._output]), errors, took_s)

    def end(self) -> None:
        """Kill its remaining processes, and wait until they have ended."""
        # The program first, with all its processes: its warden then collects it and ends.
        for pid in (self._program(), self.pid):
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
        os.close(self._pidfd)

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
        if self._program() == self.pid:
            _kill(self.pid)
        _, self._status = os.waitpid(self.pid, 0)
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
        process = Path(f"/proc/{self._program() or self.pid}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            if not self._is_ready or not _has_children(process):
                self._last_waited_s = int((process / "schedstat").read_text().split()[1]) / 1e9
        return self._last_waited_s

    def _program(self) -> int | None:
        """Return the program's process id; None if it is not known yet."""
        found = _PROGRAM.match(bytes(self._read[self._pid_pipe]))
        return int(found[1]) if found else None

    def _code(self) -> int:
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code


def _has_children(process: Path) -> bool:
    """Return whether a process has children; False on kernels that do not report it."""
    lists = process.glob("task/*/children")
    return any(one.read_text() for one in lists)


def _kill(pid: int) -> None:
    """Kill a process and the process group that it leads, if any."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _ending(code: int) -> End:
    return End.DONE if code == 0 else End.KILLED if code > 128 else End.FAILED
