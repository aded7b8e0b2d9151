"""The runs of a folder: a list with the progress of each, and their files."""

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.console.web.replies import NotThere
from penstock.consumers.grpo.rows import Rows, read_rows
from penstock.errors import ConfigError
from penstock.names import is_name
from penstock.redis.saved_config import CONFIG_FILE
from penstock.redis.server import ADDRESS_FILE
from penstock.system.run_folder import RunFolder, RunRecord

#: Files that mark a folder as a run's.
_MARKS = (CONFIG_FILE, ADDRESS_FILE, "run.json", "steps.jsonl")
_ROWS = ("steps.jsonl", "eval.jsonl", "queue.jsonl")
#: Most bytes of a last row, and of summary.json.
_MOST = 2**16


class Runs:
    """The runs of one folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def folder(self, run: str) -> RunFolder:
        """Return the folder of a run; raise NotThere if it does not exist."""
        path = self.directory / run
        if not is_name(run) or not _is_run(path):
            raise NotThere(f"There is no run {run!r} under {self.directory}.")
        return RunFolder(path)

    def all(self) -> list[dict[str, Any]]:
        """Return a row per run, last changed first. Blocks for a few reads per run."""
        try:
            found = [path for path in self.directory.iterdir() if is_name(path.name) and _is_run(path)]
        except OSError:
            return []
        return sorted((_row(RunFolder(path)) for path in found), key=lambda row: -row["moved_s"])

    def rows(self, run: str) -> Rows:
        """Return all rows of a run, read again only if a file has grown."""
        path = self.folder(run).path
        return _rows(path, sizes(path))


def sizes(path: Path) -> tuple[int, ...]:
    """Return the sizes of the files of rows: equal sizes mean no new rows."""
    return tuple(_size(path / name) for name in _ROWS)


@lru_cache(maxsize=4)
def _rows(path: Path, _: tuple[int, ...]) -> Rows:
    return read_rows(path)


def record_of(folder: RunFolder) -> tuple[RunRecord | None, str]:
    """Read ``run.json``; also return why it cannot be read, or ''. None if the run was not started by the launcher."""
    try:
        return folder.record(), ""
    except ConfigError as exc:
        return None, str(exc)


def state_of(folder: RunFolder) -> dict[str, Any]:
    """Return ``state``: that of ``run.json``, ``killed`` if a running one has no process, or ''; and ``reason``."""
    record, trouble = record_of(folder)
    if record is None:
        return {"state": "", "reason": trouble, "started_s": None, "active_s": None}
    state = "killed" if record.state == "running" and not folder.is_held() else record.state
    return {"state": state, "reason": record.reason, "started_s": record.started_s, "active_s": record.active_s}


def summary_of(folder: RunFolder) -> dict[str, Any]:
    """Read ``summary.json``; {} if it is missing or unreadable."""
    return _map(_tail(folder.path / "summary.json"))


def _row(folder: RunFolder) -> dict[str, Any]:
    last = _map(_last_line(folder.path / "steps.jsonl"))
    evaluated = _map(_last_line(folder.path / "eval.jsonl"))
    moved = max((_moved(folder.path / name) for name in (*_MARKS, *_ROWS)), default=0.0)
    return {
        "run": folder.path.name,
        **state_of(folder),
        "step": last.get("step"),
        "reward_mean": last.get("reward_mean"),
        "accuracy": evaluated.get("accuracy"),
        "moved_s": moved,
        "age_s": max(0.0, time.time() - moved),
    }


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _MARKS)


def _last_line(path: Path) -> bytes:
    lines = _tail(path).rstrip(b"\n").splitlines()
    return lines[-1] if lines else b""


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - _MOST))
            return file.read(_MOST)
    except OSError:
        return b""


def _map(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _moved(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
