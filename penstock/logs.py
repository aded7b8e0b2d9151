"""Logging of a process: plain lines on stderr, ``2026-01-31 12:00:00.123 worker-0 INFO text``, without passwords."""

import logging
import sys

from penstock.load_config import redact

FORMAT = "%(asctime)s.%(msecs)03d {part} %(levelname)s %(message)s"


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def set_up(part: str, level: int = logging.INFO) -> None:
    """Send the log of this process to stderr; the launcher keeps it in ``runs/NAME/logs/PART.log``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Redacting(FORMAT.format(part=part.replace("%", "%%")), datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Warnings of libraries belong there too.
    logging.captureWarnings(True)
