"""Calls of Linux that Python's library does not have, each an OSError where it fails."""

import ctypes
import os
import platform
import struct
import sys

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
#: The same number on all machines.
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def machine() -> str:
    """The machine's architecture, as the kernel calls it."""
    return platform.machine()


def system_call(number: int, *arguments: object) -> int:
    """A system call by its number. Raises OSError."""
    return _called("syscall", ctypes.c_long(number), *arguments)


def unshare(flags: int) -> None:
    _called("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _called("mount", source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags),
            options.encode() or None)  # fmt: skip


def unmount(target: str) -> None:
    _called("umount2", target.encode(), ctypes.c_int(MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    if machine() not in _PIVOT_ROOT:
        raise OSError(f"pivot_root has no number for {machine()} here")
    system_call(_PIVOT_ROOT[machine()], new.encode(), old.encode())


def make_readonly(path: str, *, has_devices: bool = False) -> None:
    """Let nothing below ``path`` be written, with all that is mounted there; needs Linux 5.12."""
    flags = _ATTR_RDONLY | _ATTR_NOSUID | (0 if has_devices else _ATTR_NODEV)
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    system_call(_MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_int(_AT_RECURSIVE), attributes,
                ctypes.c_size_t(len(attributes)))  # fmt: skip


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent ends; forgotten where the user id changes."""
    _prctl(_PR_SET_PDEATHSIG, number)


def own_proc() -> None:
    """Let this process write its own files in /proc again, which it may not once its user id has changed."""
    _prctl(_PR_SET_DUMPABLE, 1)


def take_no_rights() -> None:
    """No program that is executed from now on gets a right that this one has not."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give all up, for what is executed too; some may be there for root alone to give up."""
    for number in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except OSError:
            break
    header, nothing = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    _called("capset", header, nothing)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def filter_calls(program: bytes) -> None:
    """Hold this process, and all that it starts, to a filter of system calls (classic BPF)."""
    text = ctypes.create_string_buffer(program, len(program))
    filter_ = _Program(len(program) // 8, ctypes.addressof(text))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_))


def _prctl(option: int, *values: object) -> None:
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    _called("prctl", ctypes.c_int(option), *words)


def _called(name: str, *arguments: object) -> int:
    if _LIBC is None:
        raise OSError(f"{name} is a call of Linux")
    result: int = getattr(_LIBC, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
