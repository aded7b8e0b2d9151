"""Logging of a process: entries on stderr, as lines for people or as JSON, without passwords.

    2026-01-31 12:00:00.123+01:00 digits worker-0 INFO text
    2026-01-31 12:00:00.123+01:00 digits worker-0 WARNING [job train/0/12] text
    {"time": "2026-01-31T12:00:00.123+01:00", "run": "digits", "part": "worker-0", "level": "INFO", ...}

Time with its zone, run, part, level, and the job that the entry is about, if any.
"""

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime
from enum import StrEnum
from types import TracebackType
from typing import Any, TextIO

from penstock.system.disk import is_full
from penstock.text import printable, redact, trace_of, utf8_safe

#: Most characters of one entry: the user's code may raise with a text of any length.
MAX_ENTRY = 128_000

#: Id of the current job; '' without one. Tasks and threads started meanwhile inherit it.
_job: ContextVar[str] = ContextVar("job", default="")


class LogFormat(StrEnum):
    """Format of log entries."""

    TEXT = "text"
    JSON = "json"


@contextlib.contextmanager
def of_job(job: str) -> Iterator[None]:
    """Add this job to log entries within the context."""
    token = _job.set(job)
    try:
        yield
    finally:
        _job.reset(token)


class Plain(logging.Formatter):
    """Entries without passwords and without terminal control characters: they quote other texts."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(utf8_safe(super().format(record), MAX_ENTRY)))

    def formatException(self, ei: Any) -> str:
        return trace_of(ei[1])


class Lines(Plain):
    """One line per entry, followed by tracebacks."""

    def __init__(self, part: str, run: str) -> None:
        who = " ".join(filter(None, (run, part))).replace("%", "%%")
        super().__init__(f"%(asctime)s {who} %(levelname)s %(about)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        job = _job.get()
        record.about = f"[job {job}] " if job else ""
        return super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record, " ")


class Objects(Plain):
    """One JSON object per entry, on one line of ASCII, without terminal control characters."""

    def __init__(self, part: str, run: str) -> None:
        super().__init__()
        self._part = part
        self._run = run

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record, "T"),
            "run": self._run,
            "part": self._part,
            "level": record.levelname,
            "logger": record.name,
            "job": _job.get(),
            "message": _bounded(record.getMessage()),
        }
        if record.exc_info:
            entry["traceback"] = _bounded(self.formatException(record.exc_info))
        return json.dumps({key: value for key, value in entry.items() if value})


def _bounded(text: str) -> str:
    return redact(utf8_safe(text, MAX_ENTRY))


def _time(record: logging.LogRecord, between: str) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(between, "milliseconds")


class _Lossy(logging.StreamHandler[TextIO]):
    """Continues when the disk is full; reports afterwards how many lines may be missing."""

    _lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        if is_full(sys.exc_info()[1]):
            self._lost += 1
        else:
            super().handleError(record)

    def emit(self, record: logging.LogRecord) -> None:
        before = self._lost
        super().emit(record)
        if before and self._lost == before:
            self._lost = 0
            self.stream.write(self._missing(record, before))

    def _missing(self, record: logging.LogRecord, lost: int) -> str:
        text = f"up to {lost} lines are missing here: there was no room for the log"
        if not isinstance(self.formatter, Objects):
            return f"({text})\n"
        return self.format(logging.makeLogRecord({**record.__dict__, "msg": text, "args": (), "exc_info": None})) + "\n"


def formatter(part: str, run: str = "", form: LogFormat = LogFormat.TEXT) -> Plain:
    """Return the formatter for entries of a process."""
    return Objects(part, run) if form is LogFormat.JSON else Lines(part, run)


def without_a_log() -> None:
    """Print warnings of a command without a log to stderr as plain sentences."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Plain("%(message)s"))


def set_up(part: str, run: str = "", form: LogFormat = LogFormat.TEXT, level: int = logging.INFO) -> None:
    """Send the log of this process to stderr; the launcher keeps it in ``runs/NAME/logs/PART.log``.

    Args:
        run: name of the run; empty if unknown.
    """
    handler = _Lossy(sys.stderr)
    handler.setFormatter(formatter(part, run, form))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Warnings of libraries belong there too.
    logging.captureWarnings(True)
    if form is LogFormat.JSON:
        # Uncaught exceptions would be written as lines of text between the objects.
        sys.excepthook = _say_uncaught
        threading.excepthook = lambda args: _say_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def say_end(text: str) -> None:
    """Print why this process ends to stderr: ``penstock: text``, or as an entry if its log is JSON."""
    if any(isinstance(handler.formatter, Objects) for handler in logging.root.handlers):
        logging.getLogger("penstock").error("%s", text)
    else:
        print(printable(redact(f"penstock: {text}")), file=sys.stderr)


def _say_uncaught(kind: type[BaseException], exc: BaseException | None, trace: TracebackType | None) -> None:
    if exc is not None and not issubclass(kind, SystemExit):
        logging.getLogger("penstock").critical("uncaught %s", kind.__name__, exc_info=(kind, exc, trace))


def as_text(lines: str) -> str:
    """Convert JSON entries in lines of a log to text; other lines are unchanged."""
    return "\n".join(map(_as_text, lines.splitlines()))


def _as_text(line: str) -> str:
    try:
        entry = json.loads(line) if line.startswith('{"time"') else None
    except (ValueError, RecursionError):
        return line
    if not isinstance(entry, dict):
        return line
    said = [str(entry[key]) for key in ("time", "run", "part", "level", "message", "traceback") if key in entry]
    return printable(" ".join(said))
