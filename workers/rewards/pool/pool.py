"""``penstock verifiers``: run a pool of verifiers for one run. Any number of such pools may serve a run.

    pool ── forks ──> verifier (rq worker) x reward.pool.workers ── forks ──> a process for each check

A verifier that dies is restarted, and its presence is removed at once, so that its check is enqueued again. When the
pool dies its verifiers die, and their checks with them. SIGTERM lets running checks end; a second one does not.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from typing import Any

from redis.exceptions import RedisError

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.hooks.slime import args_of
from penstock.metrics.server import Exporter
from penstock.names import new_token
from penstock.protocol import scripts
from penstock.protocol.waits import PublishedWaiting
from penstock.records.causes import NoChecks
from penstock.records.codec import count_shown, name_shown, pack
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.connect import as_redis, connect, connect_blocking
from penstock.redis.control import PASSING, Control
from penstock.system.keeper import END, HURRY, die_with_parent, keep, started_pid
from penstock.system.restarts import Restarts
from penstock.workers.rewards.allowed import allowed_rewards, import_reward
from penstock.workers.rewards.jail.detect import find_jail
from penstock.workers.rewards.judges import takes_judges
from penstock.workers.rewards.kinds.kind import Kind
from penstock.workers.rewards.kinds.registry import check_packages, kind_of, needs_jail
from penstock.workers.rewards.pool.check_queue import SLACK_S
from penstock.workers.rewards.pool.metrics import PoolCollector, PoolTally
from penstock.workers.rewards.pool.worker import RQ_TTL_S, Function, Verifier
from penstock.workers.rewards.processes import import_package

log = logging.getLogger(__name__)

#: Seconds between two checks of the verifiers, and between two updates of their presence.
TICK_S, NOTE_S = 0.05, 1.0
#: Wait before a verifier is restarted a second time; doubles with each death within ``WINDOW_S``.
BACKOFF_S, MAX_BACKOFF_S, WINDOW_S = 0.2, 5.0, 10.0
#: Longest wait for Redis if nothing must be blocked.
REDIS_S = 1.0

_FORK = multiprocessing.get_context("fork")


def load_rewards(config: Config) -> dict[str, Function | Kind]:
    """Import the rewards of the pool once, so that forks need not; return them by name.

    Raises:
        ConfigError: one does not exist, or there are none.
    """
    names = allowed_rewards(config)
    if not names:
        raise ConfigError(
            f"reward.pool: the only reward is {' and '.join(config.reward.names)}, which workers compute themselves; "
            "set reward.function, or name rewards of jobs in reward.pool.functions."
        )
    check_packages(names)
    args = args_of(config)
    if needs_jail(names):
        log.info("programs of answers run in a jail: %s", find_jail(config.reward).describe())
    found = {name: kind_of(name) or import_reward(name, args) for name in sorted(names)}
    asking = {name for name, one in found.items() if not isinstance(one, Kind) and takes_judges(one)}
    if asking and not (config.reward.judges and found.keys() - asking):
        raise ConfigError(
            f"reward {min(asking)} has a parameter judges, which workers call and verifiers do not, and the pool has "
            "nothing else to do: set reward.pool.kind: process."
            if config.reward.judges
            else f"reward {min(asking)} has a parameter judges, and reward.judges has none: name one there."
        )
    found = {name: one for name, one in found.items() if name not in asking}
    for one in found.values():
        if isinstance(one, Kind):
            import_package(one)
    return found


class _Child:
    """One verifier of the pool, across restarts."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = ""
        self.process: BaseProcess | None = None
        self.start_at = 0.0
        self._restarts = Restarts(BACKOFF_S, MAX_BACKOFF_S, WINDOW_S)

    def plan_restart(self) -> None:
        """Plan the next start."""
        self._restarts.note_failure()
        self.process, self.start_at = None, time.monotonic() + self._restarts.wait_s


class Verifiers:
    """Verifiers on this machine. ``run`` blocks until ``stop``.

    Raises:
        ConfigError: a reward cannot be found.
    """

    def __init__(self, config: Config, name: str) -> None:
        if config.redis.url is None:
            raise ConfigError("Verifiers need redis.url: the address of the run's Redis.")
        self.config, self.name = config, name
        self.keys = Keys(config.run)
        self.functions = load_rewards(config)
        with contextlib.closing(Control(config.redis.url)) as control:
            control.call(scripts.check_schema(self.keys))
        self._client: Client = connect(config.redis.url, timeout_s=REDIS_S, check=False)
        self._waiting = PublishedWaiting(self._client, self.keys, f"verifiers:{name}")
        self._tally = PoolTally()
        self._exporter = Exporter.of(config, "verifiers", name, PoolCollector(self._tally))
        self._children = [_Child(index) for index in range(config.reward.pool.workers)]
        self._draining = self._hurry = False

    def stop(self, *_: object) -> None:
        """Let running checks end, and leave. Safe in a signal handler, as is ``hurry``."""
        self._draining = True

    def hurry(self, *_: object) -> None:
        """End running checks, and leave."""
        self._draining = self._hurry = True

    def run(self) -> None:
        """Keep verifiers running until ``stop``. Blocks."""
        noted = 0.0
        try:
            while not self._draining:
                for child in self._children:
                    self._keep(child)
                if time.monotonic() - noted >= NOTE_S:
                    noted = time.monotonic()
                    self._note()
                time.sleep(TICK_S)
            self._drain()
        finally:
            for child in self._children:
                self._end(child)
            if self._exporter is not None:
                self._exporter.close()
            self._waiting.end()
            self._client.close()

    def _keep(self, child: _Child) -> None:
        if child.process is not None and not child.process.is_alive():
            log.warning("verifier %s ended with %s", child.name, child.process.exitcode)
            self._show(child.name, b"")
            self._tally.end(child.name)
            child.plan_restart()
        if child.process is None and time.monotonic() >= child.start_at:
            # A new name each time: checks of an earlier one must not be taken for this one's.
            child.name = f"{self.name}-{child.index}.{new_token()[:8]}"
            if not self._show(child.name, self._record(child.name, {})):
                return
            child.process = _FORK.Process(target=_serve, args=(self.config, child.name, self.functions, os.getpid()))
            child.process.start()
            self._tally.starts += 1

    def _note(self) -> None:
        """Update the presence of all, with rq's counts; report whether they are idle."""
        names = [child.name for child in self._children if child.process is not None]
        try:
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hmget(f"rq:worker:{name}", "state", "successful_job_count", "failed_job_count")
            pipe.llen(f"rq:queue:{self.keys.checks}")
            *found, queued = pipe.execute()
        except (*PASSING, RedisError):
            return
        self._tally.queued = queued
        states = []
        for name, (state, good, bad) in zip(names, found, strict=True):
            states.append(name_shown(state or b"starting"))
            made, killed = count_shown(good) or 0, count_shown(bad) or 0
            self._tally.look(name, states[-1], made, killed)
            self._show(name, self._record(name, {"state": states[-1], "checks": made, "killed": killed}))
        self._waiting.blocked_on(NoChecks() if all(state == "idle" for state in states) else None)

    def _record(self, name: str, about: dict[str, Any]) -> bytes:
        shown = {"name": name, "pool": self.name, "host": socket.gethostname(), "pid": started_pid(), "at": time.time()}
        return pack(shown | {"state": "starting", "checks": 0, "killed": 0} | about)

    def _show(self, name: str, record: bytes) -> bool:
        try:
            scripts.run(self._client, scripts.note(self.keys, self.keys.verifiers, name, record))
        except (*PASSING, RedisError) as exc:
            log.debug("failed to publish presence of %s: %s", name, exc)
            return False
        return True

    def _drain(self) -> None:
        """Send SIGTERM to all, and wait until they have ended, are late, or ``hurry`` was called."""
        log.info("draining: verifiers stop when their checks have ended")
        deadline = time.monotonic() + self.config.reward.timeout_s + SLACK_S
        for child in self._children:
            if child.process is not None:
                child.process.terminate()
        noted = 0.0
        while not self._hurry and time.monotonic() < deadline:
            if not any(child.process is not None and child.process.is_alive() for child in self._children):
                return
            if time.monotonic() - noted >= NOTE_S:
                noted = time.monotonic()
                self._note()
            time.sleep(TICK_S)

    def _end(self, child: _Child) -> None:
        if child.process is not None:
            child.process.kill()
            child.process.join()
        if child.name:
            self._show(child.name, b"")


def _serve(config: Config, name: str, functions: dict[str, Function | Kind], pool: int) -> None:
    """Run one verifier."""
    die_with_parent(pool)
    for number in (*END, HURRY):
        signal.signal(number, signal.SIG_DFL)
    assert config.redis.url is not None
    with contextlib.closing(connect_blocking(config.redis.url, RQ_TTL_S)) as client:
        Verifier(config.reward, Keys(config.run), name, as_redis(client), functions).work(logging_level="WARNING")


def _on_signals(verifiers: Verifiers) -> None:
    for number in END:
        signal.signal(number, verifiers.stop)
    signal.signal(HURRY, verifiers.hurry)


def main(config: Config, name: str) -> int:
    """Run a pool of verifiers until SIGTERM or SIGINT, in a process of its own under a keeper. Blocks."""
    keep(config.reward.timeout_s + SLACK_S)
    verifiers = Verifiers(config, name)
    _on_signals(verifiers)
    verifiers.run()
    return 0
