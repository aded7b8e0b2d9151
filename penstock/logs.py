"""Logging of a process: plain lines on stderr, ``2026-01-31 12:00:00.123 worker-0 INFO text``, without passwords."""

import logging
import sys
from typing import Any, TextIO

from penstock.redaction import redact
from penstock.system.disk import is_full
from penstock.words import printable, trace_of, writable

FORMAT = "%(asctime)s.%(msecs)03d {part} %(levelname)s %(message)s"


#: Most characters of one entry: a user's code may raise with a text of any length.
MAX_ENTRY = 128_000


class Plain(logging.Formatter):
    """Entries without passwords, and without what a terminal would obey: they quote others."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(writable(super().format(record), MAX_ENTRY)))

    def formatException(self, ei: Any) -> str:
        return trace_of(ei[1])


class _Lossy(logging.StreamHandler[TextIO]):
    """Goes on where its file has no room; says afterwards how many lines may be missing."""

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
            self.stream.write(f"(up to {before} lines are missing here: there was no room for the log)\n")


def formatter(part: str) -> Plain:
    """How entries of a part are written."""
    return Plain(FORMAT.format(part=part.replace("%", "%%")), datefmt="%Y-%m-%d %H:%M:%S")


def without_a_log() -> None:
    """Have warnings of a command that sets no log up go to stderr as sentences, as they do, but plain."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Plain("%(message)s"))


def set_up(part: str, level: int = logging.INFO) -> None:
    """Send the log of this process to stderr; the launcher keeps it in ``runs/NAME/logs/PART.log``."""
    handler = _Lossy(sys.stderr)
    handler.setFormatter(formatter(part))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Warnings of libraries belong there too.
    logging.captureWarnings(True)
