"""The folder of a run, ``DIRECTORY/NAME``: its lock, the state of the run, and the previous run.

``run.json`` holds the state: running, stopped (by Ctrl-C), failed or finished. A run that starts over renames the
previous one to ``NAME.prev``, replacing an older one.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.records.codec import checks_of
from penstock.system.disk import own_file
from penstock.text import safe_repr

RunState = Literal["running", "stopped", "failed", "finished"]


@dataclass(slots=True)
class RunRecord:
    """Content of ``run.json``."""

    state: RunState
    #: First start, in seconds since 1970.
    started_s: float
    #: Time that the run was running, over all its starts.
    active_s: float = 0.0
    #: Why it failed.
    reason: str = ""


def _checked(value: dict[str, Any]) -> RunRecord:
    """Make a record; raise TypeError if it is invalid."""
    for name, check in checks_of(RunRecord).items():
        if name in value and not check(value[name]):
            raise TypeError(f"{name} is {safe_repr(value[name])}")
    return RunRecord(**value)


def unwritable(path: Path, exc: OSError) -> ConfigError:
    """Return the error for a run's folder that cannot be written."""
    reason = exc.strerror or str(exc)
    return ConfigError(f"directory: {path} cannot be written ({reason}): set --directory to a folder that can.")


class RunFolder:
    """One run's folder; see the module's docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = path.with_name(f"{path.name}.prev")
        #: Whether ``make`` made the folder, and so ``undo`` may remove it.
        self._made = False
        self._moved = False

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def history(self) -> Path:
        """Folder of the history (``penstock.history``)."""
        return self.path / "history"

    def log_files(self) -> list[Path]:
        """Return the current logs of the run's processes and of its own Redis, without rotated ones."""
        return [*self.logs.glob("*.log"), *self.redis.glob("*.log")]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run's name against other launchers on this machine; raise ConfigError if one has it."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        with contextlib.ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(os.fdopen(own_file(lock), "r+"))
            except OSError as exc:
                raise unwritable(self.path.parent, exc) from exc
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfigError(
                    f"Run {self.path.name} is already running (pid {file.read().strip()}): stop it first, "
                    "or give this one another name with --run=NAME."
                ) from None
            file.truncate(0)
            file.seek(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def is_held(self) -> bool:
        """Return whether a launcher on this machine has the run's name; true if another user's lock is unreadable."""
        try:
            with self.path.with_name(f".{self.path.name}.lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except (BlockingIOError, PermissionError):
            return True
        return False

    def is_over(self) -> bool:
        """Return whether ``penstock run`` has ended it, and its own Redis with it."""
        return self.record() is not None and not self.is_held() and self.redis.is_dir()

    def record(self) -> RunRecord | None:
        """Return the content of ``run.json``; None without a run, or for one whose processes were started manually."""
        try:
            return _checked(json.loads((self.path / "run.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            raise ConfigError(f"{self.path / 'run.json'} cannot be read ({exc}): start over with --fresh.") from exc

    def write(self, record: RunRecord) -> None:
        """Replace ``run.json`` atomically."""
        temporary = self.path / ".run.json"
        temporary.write_text(json.dumps(asdict(record)) + "\n")
        temporary.replace(self.path / "run.json")

    def unfinished(self) -> bool:
        """Return whether a run exists that can be continued."""
        try:
            record = self.record()
        except ConfigError:
            return True
        return self.path.exists() and (record is None or record.state != "finished")

    def make(self, *, resume: bool) -> None:
        """Use the existing folder, or rename it and create an empty one. Raises ConfigError if that is not possible."""
        try:
            self._make(resume=resume)
        except OSError as exc:
            raise unwritable(self.path, exc) from exc

    def _make(self, *, resume: bool) -> None:
        if not resume and self.path.exists():
            # Renamed first, so that a kill in between loses neither.
            doomed = self.path.with_name(f".{self.path.name}.{time.time_ns()}")
            if self.previous.exists():
                self.previous.rename(doomed)
            self.path.rename(self.previous)
            self._moved = True
            shutil.rmtree(doomed, ignore_errors=True)
        self._made = not self.path.exists()
        self.logs.mkdir(parents=True, exist_ok=True)

    def undo(self) -> None:
        """Remove the folder that ``make`` made for a failed start, and restore the previous one."""
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._moved:
                self.previous.rename(self.path)
