"""Waiting for the Redis of a run: processes may start in any order, also before their Redis."""

import logging
import time

from penstock.config import Config
from penstock.errors import QueueRefused, QueueUnavailable
from penstock.redis.connect import connect
from penstock.redis.server import ADDRESS_FILE, read_address
from penstock.system.stop import pause_s

#: Waits between attempts; the address in the run's folder is read each time, as our own server may move.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
#: Interval of log lines about the wait.
SAY_EVERY_S = 10.0

log = logging.getLogger(__name__)


def await_redis(config: Config) -> Config:
    """Return ``config`` with the ``redis.url`` of a Redis that answers: as configured, else from the run's folder.

    Blocks until it answers, with a log line every few seconds.

    Raises:
        QueueRefused: the configured server refuses the password or this user, or is too old.
        ConfigError: the URL is invalid, or the server would lose jobs.
    """
    said, began, tries = float("-inf"), time.monotonic(), 0
    while True:
        url = config.redis.url or read_address(config.run_dir)
        why = _missing(config) if url is None else _why_not(url, is_given=config.redis.url is not None)
        if not why:
            if said > 0:
                log.info("Redis answers")
            return _with(config, url)
        now = time.monotonic()
        if now - said >= SAY_EVERY_S:
            said = now
            log.warning("waiting for Redis for %.0f s: %s", now - began, why)
        tries += 1
        time.sleep(pause_s(tries, FIRST_WAIT_S, LONGEST_WAIT_S))


def _missing(config: Config) -> str:
    return (
        f"no Redis is known for run {config.run}, because {config.run_dir / ADDRESS_FILE} does not exist yet: start "
        "`penstock redis --config ...` in this folder, or name one with --redis URL."
    )


def _why_not(url: str, *, is_given: bool) -> str:
    """Return why the server at ``url`` cannot be used yet; '' if it can."""
    try:
        connect(url).close()
    except QueueRefused as exc:
        # The address of an earlier server may belong to another one by now.
        if is_given:
            raise
        return f"{exc} This address is that of the run's last server: start `penstock redis --config ...` again."
    except QueueUnavailable as exc:
        return str(exc)
    return ""


def _with(config: Config, url: str | None) -> Config:
    if config.redis.url is not None:
        return config
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": url, "port": 0})})
