"""What a jail is built of: the interpreter and what of this machine can be read in it, as paths."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

#: What programs need of a system: libraries, and where the loader finds them.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache",
           "/etc/localtime")  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: The jail's own folder, and the only one that can be written, where one can.
HOME = "/tmp"
#: The whole environment of a program.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": HOME, "TMPDIR": HOME, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
               "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
_ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys._base_executable]))"
_ASK_S = 60


@dataclass(frozen=True, slots=True)
class Walls:
    #: argv of the interpreter, without a program.
    interpreter: tuple[str, ...]
    #: Real folders and files that can be read, none of them inside of another.
    readable: tuple[str, ...]
    #: Link -> where it points: ``/lib`` -> ``usr/lib``.
    links: tuple[tuple[str, str], ...]


def walls(python: str | None, readable: Iterable[str]) -> Walls:
    """What a jail of this configuration is built of. Blocks for the interpreter where ``python`` names one.

    Raises:
        ConfigError: the interpreter does not run, or a folder is not there.
    """
    program, prefixes = _own() if python is None else _asked(python)
    for folder in readable:
        if not Path(folder).exists():
            raise ConfigError(f"reward.jail.readable: there is no {folder}; correct the path, or leave it out.")
    links, paths = [], []
    for path in _SYSTEM:
        if Path(path).is_symlink():
            links.append((path, os.readlink(path)))
        elif Path(path).exists():
            paths.append(path)
    # -I: nothing of the environment or the current folder is imported; -X utf8 whatever the locale is.
    interpreter = (program, "-I", "-B", "-X", "utf8", "-c")
    return Walls(interpreter, _outermost([*paths, *prefixes, *readable]), tuple(links))


def _own() -> tuple[str, list[str]]:
    """Penstock's interpreter, as it is without the environment of its packages."""
    base = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    return base, [sys.base_prefix]


def _asked(python: str) -> tuple[str, list[str]]:
    try:
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=True)
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
