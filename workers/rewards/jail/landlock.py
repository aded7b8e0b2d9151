"""Landlock: restrict the files a process may open, irrevocably and without privileges (Linux 5.13)."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

from penstock.workers.rewards.jail import libc

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
