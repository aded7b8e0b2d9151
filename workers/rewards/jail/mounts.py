"""The paths visible in a jail: the interpreter, and the readable folders of this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

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
