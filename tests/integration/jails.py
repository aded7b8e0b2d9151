"""Jails of tests: every kind, for root and for a plain user, and what a test needs for them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.rewards.jail.backends import BACKENDS, walls
from penstock.workers.rewards.jail.jail import Jail
from penstock.workers.rewards.jail.task import Ended, Limits, Task
from tests.missing import lack

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".bubblewrap" / "usr" / "bin" / "bwrap"
#: A user without an account, whose rights are nobody's.
PLAIN_USER = 54321
#: Time of a program, seconds.
TEST_S = 1.0
LIMITS = Limits(TEST_S, memory_bytes=256 * 1024**2, processes=8, files_bytes=4 * 1024**2, output_bytes=100_000)


@contextlib.contextmanager
def bwrap_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Debian's package, where any user can run it. Skips, or fails in CI, where there is none."""
    found = shutil.which("bwrap") or (str(UNPACKED) if UNPACKED.exists() else None)
    if found is None:
        lack("bwrap is missing: run make bubblewrap")
    shutil.copy(found, folder / "bwrap")
    (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield


def interpreter(who: str) -> str | None:
    """One that this user can run; None: penstock's own."""
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if who == "root" or all(folder.stat().st_mode & 0o005 == 0o005 for folder in (Path(base), *Path(base).parents)):
        return None
    if not os.access("/usr/bin/python3", os.X_OK):
        lack("there is no Python here that a plain user can run: install python3")
    return "/usr/bin/python3"


def need_kernel(kind: str, who: str) -> None:
    """Skip where the kernel, or the container around, gives this user nothing to make such a jail of."""
    if kind == "filters":
        (backend,) = [one for one in BACKENDS if one.name == kind]
        if lacking := backend.lack():
            pytest.skip(f"no jail of filters can be made here: {lacking}")
        return
    user = ["--user", "--map-root-user"] if who == "plain" else []
    unshare = ["unshare", *user, "--pid", "--net", "--ipc", "--uts", "--mount", "--fork", "true"]
    other = {"user": PLAIN_USER, "group": PLAIN_USER} if who == "plain" and os.geteuid() == 0 else {}
    done = subprocess.run(unshare, capture_output=True, text=True, check=False, **other)
    if done.returncode:
        pytest.skip(f"this machine gives no namespaces to {who}: {done.stderr.strip()}")


class Tried:
    """A jail of one kind; its processes can be told from all others of the machine."""

    def __init__(self, kind: str, who: str, readable: tuple[str, ...] = ()) -> None:
        self.kind, self.who = kind, who
        self.mark = f"jailed={uuid.uuid4().hex}"
        # Opened by tests as root: filters alone cannot hide what the interpreter's own user may not read.
        python = interpreter("plain" if kind == "filters" else who)
        built = walls(python, readable)
        built = replace(built, interpreter=(*built.interpreter[:-1], "-X", self.mark, "-c"))
        (backend,) = [one for one in BACKENDS if one.name == kind]
        self.jail = Jail(backend, built, LIMITS)

    def run(self, code: str, stdin: Any = "", **about: Any) -> Ended:
        """Run a program; blocks until it has ended. Nothing of it is left, or this raises AssertionError."""
        text = stdin if isinstance(stdin, str) else json.dumps(stdin)
        ended = as_user(self.who, lambda: self._run(Task(code, text, **about)))
        assert self.left() == []
        return ended

    def _run(self, task: Task) -> Ended:
        return self.jail.run(task)

    def left(self) -> list[str]:
        """Command lines of its processes that live, on the whole machine."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    line = (folder / "cmdline").read_bytes()
                    if self.mark.encode() in line:
                        found.append(line.decode(errors="replace")[:200])
        return found


def as_user(who: str, action: Callable[[], Ended]) -> Ended:
    """Do it as root, or as a plain user; in a process of its own, which has one thread."""
    begin, end = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(who, action, end)
    os.close(end)
    with open(begin, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    found = json.loads(said)
    assert "raised" not in found, found["raised"]
    return Ended(**{**found, "output": bytes.fromhex(found["output"])})


def _answer(who: str, action: Callable[[], Ended], file: int) -> None:
    try:
        if who == "plain" and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(PLAIN_USER, PLAIN_USER, PLAIN_USER)
            os.setresuid(PLAIN_USER, PLAIN_USER, PLAIN_USER)
        ended = action()
        found = {name: getattr(ended, name) for name in ("how", "code", "errors", "took_s")}
        said = json.dumps({**found, "output": ended.output.hex()})
    except BaseException:
        said = json.dumps({"raised": traceback.format_exc()})
    with open(file, "wb", closefd=False) as writing:
        writing.write(said.encode())
    os._exit(0)
