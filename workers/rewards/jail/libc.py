"""Linux calls that Python's library lacks; each raises OSError if it fails."""

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
#: The same number on all architectures.
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def machine() -> str:
    """Return the machine's architecture, as the kernel names it."""
    return platform.machine()


def system_call(number: int, *arguments: object) -> int:
    """Make a system call by its number. Raises OSError."""
    return _call("syscall", ctypes.c_long(number), *arguments)


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags),
            options.encode() or None)  # fmt: skip


def unmount(target: str) -> None:
    _call("umount2", target.encode(), ctypes.c_int(MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    if machine() not in _PIVOT_ROOT:
        raise OSError(f"pivot_root has no number for {machine()} here")
    system_call(_PIVOT_ROOT[machine()], new.encode(), old.encode())


def make_readonly(path: str, *, has_devices: bool = False) -> None:
    """Make everything below ``path`` read-only, with all mounts there; needs Linux 5.12."""
    flags = _ATTR_RDONLY | _ATTR_NOSUID | (0 if has_devices else _ATTR_NODEV)
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    system_call(_MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), path.encode(), ctypes.c_int(_AT_RECURSIVE), attributes,
                ctypes.c_size_t(len(attributes)))  # fmt: skip


def die_with_parent(number: int) -> None:
    """Make the kernel send this signal when the parent ends; a change of user id resets it."""
    _prctl(_PR_SET_PDEATHSIG, number)


def own_proc() -> None:
    """Let this process write its own files in /proc again, which a change of user id forbids."""
    _prctl(_PR_SET_DUMPABLE, 1)


def take_no_rights() -> None:
    """Forbid executed programs any right that this process does not have (no_new_privs)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drop all capabilities, for executed programs too; some can be dropped by root alone."""
    for number in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except OSError:
            break
    header, nothing = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    _call("capset", header, nothing)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def filter_calls(program: bytes) -> None:
    """Apply a filter of system calls (classic BPF) to this process and its descendants."""
    text = ctypes.create_string_buffer(program, len(program))
    filter_ = _Program(len(program) // 8, ctypes.addressof(text))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_))


def _prctl(option: int, *values: object) -> None:
    words = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    _call("prctl", ctypes.c_int(option), *words)


def _call(name: str, *arguments: object) -> int:
    if _LIBC is None:
        raise OSError(f"{name} is a call of Linux")
    result: int = getattr(_LIBC, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
