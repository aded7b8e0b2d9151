"""Ways to isolate a program, best first.

======== ================================================= ==================== ============================
name     isolates by                                       processes and files  needs
======== ================================================= ==================== ============================
bwrap    namespaces that bubblewrap makes, seccomp         its own alone        the program ``bwrap``
filters  seccomp and Landlock                              none, and no file    Linux 5.13; x86_64 or aarch64
======== ================================================= ==================== ============================
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ConfigError
from penstock.system.keeper import die_with_parent
from penstock.workers.rewards.jail import filters

#: Parts of a system that programs need: libraries, and the loader's configuration.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache",
           "/etc/localtime")  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: The jail's home, and the only writable folder, if any is.
HOME = "/tmp"
#: The complete environment of a program.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": HOME, "TMPDIR": HOME, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
               "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
_PROBE = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys._base_executable]))"
_PROBE_S = 60


@dataclass(frozen=True, slots=True)
class Walls:
    #: argv of the interpreter, without a program.
    interpreter: tuple[str, ...]
    #: Real folders and files that are readable, none of them inside another.
    readable: tuple[str, ...]
    #: Link -> its target: ``/lib`` -> ``usr/lib``.
    links: tuple[tuple[str, str], ...]


def walls(python: str | None, readable: Iterable[str]) -> Walls:
    """Return the visible paths of a jail of this configuration. Starts the interpreter if ``python`` names one.

    Raises:
        ConfigError: the interpreter does not run, or a folder does not exist.
    """
    program, prefixes = _own() if python is None else _probe(python)
    for folder in readable:
        if not Path(folder).exists():
            raise ConfigError(f"reward.jail.readable: {folder} does not exist: correct the path, or leave it out.")
    links, paths = [], []
    for path in _SYSTEM:
        if Path(path).is_symlink():
            links.append((path, os.readlink(path)))
        elif Path(path).exists():
            paths.append(path)
    # -I: no imports from the environment or the current folder; -X utf8 independent of the locale.
    interpreter = (program, "-I", "-B", "-X", "utf8", "-c")
    return Walls(interpreter, _outermost([*paths, *prefixes, *readable]), tuple(links))


def _own() -> tuple[str, list[str]]:
    """Return penstock's interpreter, without the virtual environment of its packages."""
    base = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    return base, [sys.base_prefix]


def _probe(python: str) -> tuple[str, list[str]]:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
        prefix, base_prefix, base = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise ConfigError(f"reward.code.python: {python} does not run as a Python ({exc}); correct the path.") from exc
    return str(Path(python).absolute()), [prefix, base_prefix, os.path.dirname(os.path.realpath(base))]


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in paths}):
        if not any(Path(path).is_relative_to(one) for one in found):
            found.append(path)
    return tuple(found)


#: Ids of users without an account: those that systemd lends to services. One for each program, so that limits of a
#: user's processes apply to that program alone.
_FIRST_USER, _NUM_USERS = 61184, 4336
#: Exit code of a child that failed before it became the program.
_NO_PROGRAM = 125


@dataclass(frozen=True, slots=True)
class Cell:
    """A program and its isolation."""

    walls: Walls
    #: The interpreter and its program.
    argv: list[str]
    #: Its input, a file.
    stdin: int
    #: User id of the program; None: ours.
    user: int | None
    #: Most bytes in its temporary folder.
    files_bytes: int


#: A started process, and a pipe that names the id of the program's process; None: it is the program.
Started = tuple["subprocess.Popen[bytes]", int | None]


class Backend(Protocol):
    """One way to isolate."""

    name: str
    #: Whether the program itself switches to its user id, before anything else.
    leaves_user: bool
    #: Its means of isolation, in words.
    means: str

    def lack(self) -> str:
        """Return why it is not available, or ''; other obstacles appear when it is probed."""

    def start(self, cell: Cell) -> Started:
        """Start the program. The caller closes the pipe. Raises OSError."""


def user_of_its_own() -> int | None:
    """Return the id of a user for programs of this process, one at a time; None: this process may not switch."""
    return _FIRST_USER + os.getpid() % _NUM_USERS if os.geteuid() == 0 else None


class Bwrap:
    name = "bwrap"
    # It maps root to root, and leaves the program the right to switch users.
    leaves_user = True
    means = "namespaces by bubblewrap, seccomp"

    def lack(self) -> str:
        return "" if shutil.which("bwrap") else "the program bwrap is not installed"

    def start(self, cell: Cell) -> Started:
        begin, end = os.pipe2(os.O_CLOEXEC)
        given = {"--info-fd": end}
        if filters.is_known():
            given["--seccomp"] = _memory_file(filters.program())
        options = [word for name, file in given.items() for word in (name, str(file))]
        argv = [shutil.which("bwrap") or "bwrap", *self._options(cell), *options, "--", *cell.argv]
        try:
            return _start(argv, cell, env={}, pass_fds=tuple(given.values())), begin
        except BaseException:
            os.close(begin)
            raise
        finally:
            for file in given.values():
                os.close(file)

    @staticmethod
    def _options(cell: Cell) -> list[str]:
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--unshare-user"] if cell.user is None else ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        # Without --as-pid-1: the first process has bubblewrap's user, so that it gets the signal of bubblewrap's end.
        options += ["--die-with-parent", "--new-session", "--hostname", "jail", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            options += ["--setenv", name, value]
        # Before the readable paths, some of which may be below it.
        options += ["--perms", "1777", "--size", str(cell.files_bytes), "--tmpfs", HOME]
        for folder in _parents(cell.walls.readable):
            # bubblewrap would create it for its own user alone.
            options += ["--perms", "0755", "--dir", folder]
        for path in cell.walls.readable:
            options += ["--ro-bind", path, path]
        for link, target in cell.walls.links:
            options += ["--symlink", target, link]
        for path in DEVICES:
            options += ["--dev-bind-try", path, path]
        return [*options, "--chdir", HOME, "--remount-ro", "/"]


class Filters:
    name = "filters"
    leaves_user = False
    means = "seccomp, Landlock; no process and no file can be made"

    def lack(self) -> str:
        if not filters.is_known():
            return f"the system calls of {filters.machine()} are not known here"
        return "" if filters.landlock_version() else "the kernel has no Landlock"

    def start(self, cell: Cell) -> Started:
        folders = [path for path in cell.walls.readable if os.path.isdir(path)]
        plain = [path for path in cell.walls.readable if not os.path.isdir(path)]

        def confine() -> None:
            filters.drop_rights()
            filters.restrict_files(folders, [*plain, *DEVICES], ["/dev/null"])
            filters.filter_calls(filters.program(strict_for=os.getpid()))

        # Python switches the user before ``confine``.
        user: dict[str, Any] = {} if cell.user is None else {"user": cell.user, "group": cell.user, "extra_groups": []}
        return _start(cell.argv, cell, confine, env=ENVIRONMENT, cwd="/", **user), None


class NoBackend:
    """``reward.jail.kind: none``: limits and a bare environment, no isolation."""

    name = "none"
    leaves_user = False
    means = "no isolation"

    def lack(self) -> str:
        return ""

    def start(self, cell: Cell) -> Started:
        return _start(cell.argv, cell, env=ENVIRONMENT), None


def _start(
    argv: list[str], cell: Cell, confine: Callable[[], object] = bool, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own that ends with this one; ``confine`` is called in it."""
    parent = os.getpid()

    def prepare() -> None:
        # It blocks nothing, ignores nothing, and keeps no file but its own: connections to Redis among them.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(parent)
        try:
            confine()
        except OSError as exc:
            os.write(2, str(exc).encode())
            os._exit(_NO_PROGRAM)

    return subprocess.Popen(
        argv, stdin=cell.stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=prepare, **options,
    )  # fmt: skip


def _parents(paths: Iterable[str]) -> list[str]:
    """Return the parent folders of these paths, outermost first, without the two that always exist."""
    found = {str(folder) for path in paths for folder in Path(path).parents}
    return sorted(found - {"/", HOME})


def _memory_file(program: bytes) -> int:
    """Return a file with these bytes, readable by an executed program."""
    file = os.memfd_create("seccomp", 0)
    os.write(file, program)
    os.lseek(file, 0, os.SEEK_SET)
    return file


BACKENDS: tuple[Backend, ...] = (Bwrap(), Filters())
NO_BACKEND = NoBackend()
