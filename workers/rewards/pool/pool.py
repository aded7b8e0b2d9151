"""``penstock verifiers``: run a pool of verifiers for one run. Any number of such pools may serve a run.

    pool ── forks ──> verifier (rq worker) x reward.pool.workers ── forks ──> a process for each check

A verifier that dies is replaced, and its presence is removed, within a second, so that its check is enqueued again.
When the pool dies its verifiers die, and their checks with them. SIGTERM lets running checks end; a second one does
not.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
from typing import Any

from redis.exceptions import RedisError
from rq.worker_pool import WorkerData, WorkerPool

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.hooks.slime import args_of
from penstock.metrics.server import Exporter
from penstock.names import new_token
from penstock.protocol import scripts
from penstock.protocol.waits import PublishedWaiting
from penstock.records.codec import count_shown, name_shown, pack
from penstock.records.keys import Keys
from penstock.records.worker_causes import NoChecks
from penstock.redis.commands import Client
from penstock.redis.connect import as_redis, connect, connect_blocking
from penstock.redis.control import PASSING, Control
from penstock.system.keeper import END, HURRY, die_with_parent, keep, started_pid
from penstock.workers.rewards.allowed import allowed_rewards, import_reward
from penstock.workers.rewards.jail.detect import find_jail
from penstock.workers.rewards.judges import takes_judges
from penstock.workers.rewards.kinds.kind import Kind
from penstock.workers.rewards.kinds.registry import check_packages, kind_of, needs_jail
from penstock.workers.rewards.pool.client import SLACK_S
from penstock.workers.rewards.pool.metrics import PoolCollector
from penstock.workers.rewards.pool.worker import RQ_TTL_S, Function, Verifier
from penstock.workers.rewards.processes import import_package

log = logging.getLogger(__name__)

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
            "set reward.function, or name rewards of jobs in worker.rewards."
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


class Verifiers(WorkerPool):
    """Verifiers on this machine. ``run`` blocks until SIGTERM or SIGINT.

    rq's pool starts them, and replaces those that end, once a second.

    Raises:
        ConfigError: a reward cannot be found.
    """

    def __init__(self, config: Config, name: str) -> None:
        if config.redis.url is None:
            raise ConfigError("Verifiers need redis.url: the address of the run's Redis.")
        self.config = config
        self.keys = Keys(config.run)
        self.functions = load_rewards(config)
        with contextlib.closing(Control(config.redis.url)) as control:
            control.call(scripts.check_schema(self.keys))
        self._client: Client = connect(config.redis.url, timeout_s=REDIS_S, check=False)
        self._waiting = PublishedWaiting(self._client, self.keys, f"verifiers:{name}")
        self._tally = PoolCollector()
        self._exporter = Exporter.of(config, "verifiers", name, self._tally)
        #: When running checks are ended; None: before SIGTERM, ``hurry`` sets it to now.
        self._end_at: float | None = None
        super().__init__([self.keys.checks], as_redis(self._client), config.reward.pool.workers)
        self.name = name

    def run(self) -> None:
        """Keep verifiers running until SIGTERM or SIGINT. Blocks."""
        try:
            self.start(logging_level="WARNING")
        finally:
            for one in self.worker_dict.values():
                one.process.kill()
            for one in self.worker_dict.values():
                one.process.join()
                self._show(one.name, None)
            if self._exporter is not None:
                self._exporter.close()
            self._waiting.end()
            self._client.close()

    def request_stop(self, signum: object = None, frame: object = None) -> None:
        """Let running checks end, and leave: ``start`` calls ``all_workers_have_stopped`` then."""
        self.status = self.Status.STOPPED

    def hurry(self, *_: object) -> None:
        """End running checks, and leave."""
        self.status, self._end_at = self.Status.STOPPED, time.monotonic()

    def _install_signal_handlers(self) -> None:
        for number in END:
            signal.signal(number, self.request_stop)
        signal.signal(HURRY, self.hurry)

    def all_workers_have_stopped(self) -> bool:
        """Send SIGTERM to all the first time; return True once they have ended, are late, or must hurry."""
        if self._end_at is None:
            log.info("draining: verifiers stop when their checks have ended")
            self._end_at = time.monotonic() + self.config.reward.timeout_s + SLACK_S
            for one in self.worker_dict.values():
                one.process.terminate()
        self._note()
        return super().all_workers_have_stopped() or time.monotonic() >= self._end_at

    def check_workers(self, respawn: bool = True) -> None:
        """Replace verifiers that ended, and update the presence of all."""
        super().check_workers(respawn)
        self._note()

    def reap_workers(self) -> None:
        """Remove verifiers that ended, and their presence; rq's own waits 0.1 s for each that runs."""
        for one in list(self.worker_dict.values()):
            if not one.process.is_alive():
                if self.status != self.Status.STOPPED:
                    log.warning("verifier %s ended with %s", one.name, one.process.exitcode)
                self._show(one.name, None)
                self._tally.end(one.name)
                del self.worker_dict[one.name]

    def start_worker(self, *_: object, **__: object) -> None:
        """Start one verifier, unless Redis is down."""
        # A new name each time: checks of an earlier one must not be taken for this one's.
        name = f"{self.name}-{new_token()[:8]}"
        if not self._show(name, {}):
            return
        process = _FORK.Process(target=_serve, args=(self.config, name, self.functions, os.getpid()))
        process.start()
        assert process.pid is not None
        self.worker_dict[name] = WorkerData(name, process.pid, process)
        self._tally.starts += 1

    def _note(self) -> None:
        """Update the presence of all, with rq's counts; report whether they are idle."""
        names = list(self.worker_dict)
        try:
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hmget(f"rq:worker:{name}", "state", "successful_job_count", "failed_job_count")
            pipe.llen(f"rq:queue:{self.keys.checks}")
            *found, self._tally.queued = pipe.execute()
        except (*PASSING, RedisError):
            return
        self._tally.running = {
            name: {
                "state": name_shown(state or b"starting"),
                "checks": count_shown(good) or 0,
                "killed": count_shown(bad) or 0,
            }
            for name, (state, good, bad) in zip(names, found, strict=True)
        }
        for name, about in self._tally.running.items():
            self._show(name, about)
        is_idle = all(about["state"] == "idle" for about in self._tally.running.values())
        self._waiting.blocked_on(NoChecks() if is_idle else None)

    def _show(self, name: str, about: dict[str, Any] | None) -> bool:
        """Publish the presence of a verifier, None to remove it; return whether Redis took it."""
        own = {"name": name, "pool": self.name, "host": socket.gethostname(), "pid": started_pid(), "at": time.time()}
        record = b"" if about is None else pack(own | {"state": "starting", "checks": 0, "killed": 0} | about)
        try:
            scripts.run(self._client, scripts.note(self.keys, self.keys.verifiers, name, record))
        except (*PASSING, RedisError) as exc:
            log.debug("failed to publish presence of %s: %s", name, exc)
            return False
        return True


def _serve(config: Config, name: str, functions: dict[str, Function | Kind], pool: int) -> None:
    """Run one verifier."""
    die_with_parent(pool)
    for number in (*END, HURRY):
        signal.signal(number, signal.SIG_DFL)
    assert config.redis.url is not None
    with contextlib.closing(connect_blocking(config.redis.url, RQ_TTL_S)) as client:
        Verifier(config.reward, Keys(config.run), name, as_redis(client), functions).work(logging_level="WARNING")


def main(config: Config, name: str) -> int:
    """Run a pool of verifiers until SIGTERM or SIGINT, in a process of its own under a keeper. Blocks."""
    keep(config.reward.timeout_s + SLACK_S)
    Verifiers(config, name).run()
    return 0
