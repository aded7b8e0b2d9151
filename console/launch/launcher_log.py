"""The launcher's own log: all records in ``launcher.log``, warnings also above the live table."""

import contextlib
import logging
from collections.abc import Iterator
from itertools import product

from penstock.config import Config
from penstock.console.launch.live import Live
from penstock.logs import formatter
from penstock.system.run_folder import RunFolder

#: Packages whose log records belong to the launcher.
LOGGERS = ("console", "penstock")


@contextlib.contextmanager
def launcher_log(folder: RunFolder, live: Live, config: Config) -> Iterator[None]:
    """Write the log while the context lasts."""
    file = logging.FileHandler(folder.logs / "launcher.log")
    file.setFormatter(formatter("launcher", config.run, config.logs.format))
    handlers, loggers = [file, _Events(live)], [logging.getLogger(name) for name in LOGGERS]
    for logger, handler in product(loggers, handlers):
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, handler in product(loggers, handlers):
            logger.removeHandler(handler)
        for handler in handlers:
            handler.close()


class _Events(logging.Handler):
    """Show warnings as events of the live view."""

    def __init__(self, live: Live) -> None:
        super().__init__(logging.WARNING)
        self.live = live

    def emit(self, record: logging.LogRecord) -> None:
        self.live.event(record.getMessage())
