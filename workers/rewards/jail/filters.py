"""Filter the system calls (seccomp, as classic BPF) and files (Landlock) of a process before it becomes the program.

Calls that Python's library lacks are made through ctypes; each raises OSError if it fails.

Besides bubblewrap's namespaces the filter of calls closes ways to the kernel (mounts, io_uring, BPF, keys), to the host
(vsock ignores namespaces), and to memory that no limit of a process covers (memfd, System V). Alone (``strict``) it
also forbids new processes, sockets, signals to other processes, and changes of permissions and times of files, which
Landlock allows.
"""

import contextlib
import ctypes
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterable

#: Call -> number on x86_64, and on aarch64; None: the call does not exist.
_ALWAYS: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "setns": (308, 268), "unshare": (272, 97), "bpf": (321, 280),
    "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "userfaultfd": (323, 282), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "syslog": (103, 116), "personality": (135, 92),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "vhangup": (153, 58), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "memfd_secret": (447, 447), "mq_open": (240, 180), "mq_unlink": (241, 181), "memfd_create": (319, 279),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "semop": (65, 193), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187),
}  # fmt: skip
_STRICT: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "process_mrelease": (448, 448), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "truncate": (76, 45),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET, _KILL, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (41, 198), (62, 129), (234, 131), (302, 261)
#: CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET.
_NEW_NAMESPACES = 0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
_CLONE_THREAD = 0x10000

#: Architecture -> (column above, its number in the kernel's audit).
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
#: x86_64: calls of the ABI x32 are above.
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16
_KILLED, _ALLOWED, _EPERM, _EACCES, _ENOSYS = 0x80000000, 0x7FFF0000, 0x50001, 0x5000D, 0x50026


def is_known() -> bool:
    """Return whether the system calls of this architecture are known."""
    return machine() in _MACHINES


def calls(*, strict: bool) -> dict[str, int]:
    """Return the calls that are refused with any arguments, with their numbers on this machine."""
    column = _MACHINES[machine()][0]
    named = {**_ALWAYS, **(_STRICT if strict else {})}
    return {name: number for name, numbers in named.items() if (number := numbers[column]) is not None}


def program(*, strict_for: int | None = None) -> bytes:
    """Return the filter for this machine; ``strict_for``: a strict one, for the process of that id alone.

    Refused calls fail with EPERM, ``clone3`` with ENOSYS (libraries then use ``clone``, whose flags can be checked),
    sockets with EACCES; calls of another architecture end the process.
    """
    strict = strict_for is not None
    column, architecture = _MACHINES[machine()]
    lines = [_line(_LOAD, _ARCHITECTURE), _line(_EQUAL, architecture, 1, 0), _line(_RETURN, _KILLED),
             _line(_LOAD, _NUMBER), _line(_AT_LEAST, _X32, 0, 1), _line(_RETURN, _ENOSYS)]  # fmt: skip
    for number in calls(strict=strict).values():
        lines += _for(number, [_line(_RETURN, _EPERM)])
    lines += _for(_CLONE3[column], [_line(_RETURN, _ENOSYS)])
    lines += _for(_CLONE[column], _clone(strict))
    if strict_for is None:
        lines += _for(_SOCKET[column], _only(socket.AF_UNIX, _EACCES))
    else:
        lines += _for(_SOCKET[column], [_line(_RETURN, _EACCES)])
        for numbers in (_KILL, _TGKILL):
            lines += _for(numbers[column], _only(strict_for, _EPERM))
        lines += _for(_PRLIMIT[column], _only(0, _EPERM))
    return b"".join([*lines, _line(_RETURN, _ALLOWED)])


def _clone(strict: bool) -> list[bytes]:
    """Refuse new namespaces; if strict, allow only threads."""
    ends = [_line(_RETURN, _EPERM)]
    lines = [_line(_LOAD, _FIRST), _line(_ANY_BIT, _NEW_NAMESPACES, 0, 1), *ends]
    if strict:
        lines += [_line(_ANY_BIT, _CLONE_THREAD, 1, 0), *ends]
    return [*lines, _line(_RETURN, _ALLOWED)]


def _only(value: int, refusal: int) -> list[bytes]:
    """Allow a call only if its first argument is ``value``."""
    return [_line(_LOAD, _FIRST), _line(_EQUAL, value, 1, 0), _line(_RETURN, refusal), _line(_RETURN, _ALLOWED)]


def _for(number: int, lines: list[bytes]) -> list[bytes]:
    return [_line(_EQUAL, number, 0, len(lines)), *lines]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


#: System calls of Landlock, the same on all architectures.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION = 1
_BENEATH = 1
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
#: Rights to files by version: 13 from the first on, then refer, truncate and ioctl_dev.
_FILES = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_FILES_LATER = 0xFFFF
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def landlock_version() -> int:
    """Return this kernel's version of Landlock; 0: none."""
    try:
        return _system_call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_ASK_VERSION))
    except OSError:
        return 0


def restrict_files(folders: Iterable[str], files: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process and its descendants only these files: read and execute in ``folders``, read ``files``, and
    read and write ``writable``. Raises OSError.
    """
    found = landlock_version()
    if not found:
        raise OSError("this kernel has no Landlock, or it is switched off")
    handled = _FILES.get(found, _FILES_LATER)
    attributes = struct.pack("Q", handled)
    attributes += struct.pack("Q", _TCP) if found >= 4 else b""
    attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS) if found >= 6 else b""
    rules = _system_call(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for paths, rights in ((folders, _EXECUTE | _READ | _LIST), (files, _READ), (writable, _READ | _WRITE)):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    _allow(rules, path, rights)
        _system_call(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, file)
        _system_call(_ADD, ctypes.c_int(rules), ctypes.c_int(_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(file)


_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def machine() -> str:
    """Return the machine's architecture, as the kernel names it."""
    return platform.machine()


def drop_rights() -> None:
    """Drop all capabilities, and forbid executed programs any right that this process does not have."""
    _call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


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


def _system_call(number: int, *arguments: object) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def _call(name: str, *arguments: object) -> int:
    if _LIBC is None:
        raise OSError(f"{name} is a call of Linux")
    result: int = getattr(_LIBC, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
