"""The folder of a run, ``DIRECTORY/NAME``: who holds it, how far the run in it came, and what was there before.

``run.json`` holds the state: running, stopped (by Ctrl-C), failed or finished. A run that starts over moves the one
before to ``NAME.prev``, replacing the one that is there.
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
from penstock.protocol.records.field_checks import checks_of
from penstock.system.disk import own_file
from penstock.text import safe_repr

RunState = Literal["running", "stopped", "failed", "finished"]


@dataclass(slots=True)
class RunRecord:
    """Content of ``run.json``."""

    state: RunState
    #: First start, in seconds since 1970.
    started_s: float
    #: Time that the run was being worked on, over all its starts.
    active_s: float = 0.0
    #: Why it failed.
    reason: str = ""


def _checked(value: dict[str, Any]) -> RunRecord:
    """Raises TypeError where it is no state of a run."""
    for name, check in checks_of(RunRecord).items():
        if name in value and not check(value[name]):
            raise TypeError(f"{name} is {safe_repr(value[name])}")
    return RunRecord(**value)


def unwritable(path: Path, exc: OSError) -> ConfigError:
    """That runs cannot be kept where they should be, and what to change."""
    reason = exc.strerror or str(exc)
    return ConfigError(f"directory: {path} cannot be written ({reason}): set --directory to a folder that can.")


class RunFolder:
    """One run's folder; see the module's text."""

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
        """What became of each sample: ``penstock.history``."""
        return self.path / "history"

    def log_files(self) -> list[Path]:
        """Logs of the run's processes that are there, that of its own Redis too; not those that were rotated."""
        return [*self.logs.glob("*.log"), *self.redis.glob("*.log")]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run's name against another launcher on this machine; ConfigError when one has it."""
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
        """Whether a launcher on this machine has the run's name now; of another user's it is taken to be so."""
        try:
            with self.path.with_name(f".{self.path.name}.lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except (BlockingIOError, PermissionError):
            return True
        return False

    def record(self) -> RunRecord | None:
        """What ``run.json`` says; None where there is no run, or one that was started by hand."""
        try:
            return _checked(json.loads((self.path / "run.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            raise ConfigError(f"{self.path / 'run.json'} cannot be read ({exc}): start over with --fresh.") from exc

    def write(self, record: RunRecord) -> None:
        """Replace ``run.json`` at once."""
        temporary = self.path / ".run.json"
        temporary.write_text(json.dumps(asdict(record)) + "\n")
        temporary.replace(self.path / "run.json")

    def unfinished(self) -> bool:
        """Whether a run is there that could go on."""
        try:
            record = self.record()
        except ConfigError:
            return True
        return self.path.exists() and (record is None or record.state != "finished")

    def make(self, *, resume: bool) -> None:
        """Take the folder up, or move what is there aside and make an empty one. ConfigError where it may not."""
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
        """After a start that failed: remove the folder that ``make`` made, and put the one before back."""
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._moved:
                self.previous.rename(self.path)
