"""File systems that are quickly full: a small tmpfs, mounted where a test or a run wants it."""

import errno
import os
import subprocess
from pathlib import Path


def mount(path: Path, megabytes: int) -> str:
    """Have an empty file system of that size at ``path``; '', or why nothing may be mounted here."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "penstock-test", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no mount here"
    return done.stderr.strip() or f"mount ended with {done.returncode}" if done.returncode else ""


def unmount(path: Path) -> None:
    """Take it away again, whoever still holds files of it. Raises CalledProcessError."""
    subprocess.run(["umount", "-l", str(path)], check=True)


def unmount_below(folder: Path) -> None:
    """Take away what a process that was killed left mounted in ``folder``."""
    mounted = (Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines())
    for path in [path for path in mounted if path.is_relative_to(folder)]:
        unmount(path)


def fill(ballast: Path) -> None:
    """Let a file grow until its file system has no room for another byte."""
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for size in (65536, 4096, 1):
            try:
                while True:
                    os.write(file, bytes(size))
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise
    finally:
        os.close(file)
