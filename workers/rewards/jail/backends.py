"""Ways to isolate a program, best first. Each starts it in a child process.

======== ================================================= ==================== ============================
name     isolates by                                       processes and files  needs
======== ================================================= ==================== ============================
bwrap    namespaces that bubblewrap makes, seccomp         its own alone        the program ``bwrap``
namespaces  the same namespaces, made here; seccomp        its own alone        the right to make them
filters  seccomp and Landlock                              none, and no file    Linux 5.13; x86_64 or aarch64
======== ================================================= ==================== ============================
"""

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from penstock.workers.rewards.jail import libc, seccomp
from penstock.workers.rewards.jail.mounts import DEVICES, ENVIRONMENT, HOME, Walls

#: Mount point of the new root; any existing folder.
_STAGE = "/tmp"
#: Most files and folders below the temporary one.
_MAX_FILES = 4096


def unshare_all(*, own_user: bool) -> None:
    """Create namespaces for the next child: it sees only its own processes, network and memory, and allowed files.

        root's child:       unshare ──> child is process 1 of its namespace: mounts, drops root, executes the program
        another's child:    the same in a user namespace, in which it may mount

    Mounts, network and names change for this process at once. The program's root is a small file system in memory in
    which only the folder for temporary files can be written. It has no /proc.

    Args:
        own_user: in a user namespace, for users who may not create the others. Raises OSError if that is not allowed.
    """
    flags = libc.CLONE_NEWNS | libc.CLONE_NEWPID | libc.CLONE_NEWNET | libc.CLONE_NEWIPC | libc.CLONE_NEWUTS
    if not own_user:
        libc.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    libc.own_proc()
    libc.unshare(flags | libc.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def build(walls: Walls, files_bytes: int) -> None:
    """Build the root that the program sees, and leave the old one. For the child alone. Raises OSError."""
    os.umask(0o022)
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", _STAGE, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.chdir(_STAGE)
    os.mkdir("old")
    libc.pivot_root(".", "old")
    os.chdir("/")
    # Before the readable paths, some of which may be below it.
    os.makedirs(HOME, exist_ok=True)
    options = f"size={files_bytes},nr_inodes={_MAX_FILES},mode=1777"
    libc.mount("tmpfs", HOME, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, options)
    for path in walls.readable:
        _bind(path)
        libc.make_readonly(path)
    for path in DEVICES:
        if os.path.exists(f"/old{path}"):
            _bind(path)
    for link, target in walls.links:
        os.symlink(target, link)
    libc.unmount("/old")
    os.rmdir("/old")
    libc.mount("none", "/", None, libc.MS_REMOUNT | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_BIND)


def _bind(path: str) -> None:
    """Mount ``path`` of the old root at the same path in the new one."""
    old = f"/old{path}"
    if os.path.isdir(old):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    libc.mount(old, path, None, libc.MS_BIND | libc.MS_REC)


#: System call numbers, the same on all architectures.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_BENEATH = 1
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
#: Rights to files by version: 13 from the first on, then refer, truncate and ioctl_dev.
_FILES = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_FILES_LATER = 0xFFFF
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def version() -> int:
    """Return this kernel's version of Landlock; 0: none."""
    try:
        return libc.system_call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    except OSError:
        return 0


def restrict(folders: Iterable[str], files: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process and its descendants only these files: read and execute in ``folders``, read ``files``, and
    read and write ``writable``. Raises OSError.
    """
    found = version()
    if not found:
        raise OSError("this kernel has no Landlock, or it is switched off")
    handled = _FILES.get(found, _FILES_LATER)
    attributes = struct.pack("Q", handled)
    attributes += struct.pack("Q", _TCP) if found >= 4 else b""
    attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS) if found >= 6 else b""
    rules = libc.system_call(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, rights in ((folders, _EXECUTE | _READ | _LIST), (files, _READ), (writable, _READ | _WRITE)):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    _allow(rules, path, rights)
        libc.system_call(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, file)
        libc.system_call(_ADD, ctypes.c_int(rules), ctypes.c_int(_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(file)


#: Ids of users without an account: those that systemd lends to services. One for each program, so that limits of a
#: user's processes apply to that program alone.
_FIRST_USER, _NUM_USERS = 61184, 4336


@dataclass(frozen=True, slots=True)
class Files:
    """Open files of a child: stdin, stdout and stderr, and the pipe for the id of the program's process."""

    stdin: int
    output: int
    errors: int
    told: int
    #: ``cgroup.procs`` of the program's cgroups.
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """A program and its isolation."""

    walls: Walls
    files: Files
    argv: list[str]
    #: User id of the program; None: ours.
    user: int | None
    #: Most bytes in its temporary folder.
    files_bytes: int


class Warden(Protocol):
    """One way to isolate. ``enter`` is called in a child process, and never returns."""

    name: str
    #: Whether the program itself switches to its user id, before anything else.
    leaves_user: bool
    #: Its means of isolation, in words.
    means: str

    def lack(self) -> str:
        """Return why it is not available, or ''; other obstacles appear when it is probed."""

    def enter(self, cell: Cell) -> NoReturn:
        """Become the program, or its parent. Raises OSError."""


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

    def enter(self, cell: Cell) -> NoReturn:
        join(cell.files)
        place(cell.files)
        filter_ = _memory_file(seccomp.program()) if seccomp.is_known() else None
        os.set_inheritable(cell.files.told, True)
        program = shutil.which("bwrap") or "bwrap"
        os.execve(program, [program, *self._options(cell, filter_), "--", *cell.argv], {})

    @staticmethod
    def _options(cell: Cell, filter_: int | None) -> list[str]:
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--unshare-user"] if cell.user is None else ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        options += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "jail", "--clearenv"]
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
        options += ["--chdir", HOME, "--remount-ro", "/"]
        options += ["--info-fd", str(cell.files.told)]
        return [*options, "--seccomp", str(filter_)] if filter_ is not None else options


class Namespaces:
    name = "namespaces"
    leaves_user = False
    means = "namespaces, seccomp"

    def lack(self) -> str:
        return "" if sys.platform == "linux" else "namespaces are Linux's"

    def enter(self, cell: Cell) -> NoReturn:
        user = cell.user
        unshare_all(own_user=user is None)
        child = os.fork()
        if child:
            told = cell.files.told
            os.write(told, b"%d\n" % child)
            os.closerange(0, told)
            os.closerange(told + 1, 1024)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        libc.die_with_parent(signal.SIGKILL)
        os.setsid()
        build(cell.walls, cell.files_bytes)
        join(cell.files)
        place(cell.files)
        become(user)
        libc.drop_capabilities()
        libc.take_no_rights()
        if seccomp.is_known():
            libc.filter_calls(seccomp.program())
        os.chdir(HOME)
        os.execve(cell.argv[0], cell.argv, ENVIRONMENT)


class Filters:
    name = "filters"
    leaves_user = False
    means = "seccomp, Landlock; no process and no file can be made"

    def lack(self) -> str:
        if not seccomp.is_known():
            return f"the system calls of {libc.machine()} are not known here"
        return "" if version() else "the kernel has no Landlock"

    def enter(self, cell: Cell) -> NoReturn:
        os.write(cell.files.told, b"%d\n" % os.getpid())
        user = cell.user
        join(cell.files)
        place(cell.files)
        os.setsid()
        os.chdir("/")
        libc.take_no_rights()
        become(user)
        libc.drop_capabilities()
        folders = [path for path in cell.walls.readable if os.path.isdir(path)]
        plain = [path for path in cell.walls.readable if not os.path.isdir(path)]
        restrict(folders, [*plain, *DEVICES], ["/dev/null"])
        libc.filter_calls(seccomp.program(strict_for=os.getpid()))
        os.execve(cell.argv[0], cell.argv, ENVIRONMENT)


class NoWarden:
    """``reward.jail.kind: none``: limits and a bare environment, no isolation."""

    name = "none"
    leaves_user = False
    means = "no isolation"

    def lack(self) -> str:
        return ""

    def enter(self, cell: Cell) -> NoReturn:
        os.write(cell.files.told, b"%d\n" % os.getpid())
        join(cell.files)
        place(cell.files)
        os.setsid()
        os.execve(cell.argv[0], cell.argv, ENVIRONMENT)


def become(user: int | None) -> None:
    """Switch to this user id, unless it is None."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        # A change of user id resets it.
        libc.die_with_parent(signal.SIGKILL)


def join(files: Files) -> None:
    """Join the program's cgroups."""
    for group in files.groups:
        os.write(group, b"0\n")


def place(files: Files) -> None:
    """Move stdin, stdout and stderr to their standard numbers; ``exec`` closes the rest."""
    for number, file in enumerate((files.stdin, files.output, files.errors)):
        os.dup2(file, number)


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


WARDENS: tuple[Warden, ...] = (Bwrap(), Namespaces(), Filters())
NO_WARDEN = NoWarden()
