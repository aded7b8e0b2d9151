"""``penstock fleet up``: start the processes of a plan, keep them running, and scale groups on request.

| every look   | does                                                                                        |
|--------------|---------------------------------------------------------------------------------------------|
| start        | encoders first; engines that need their addresses once they answer                          |
| keep         | restart what dies; all processes of an engine over several nodes together                   |
| scale        | more: plan an additional engine; fewer: drain, those with the oldest weights first          |
| show         | the hash ``fleet``: groups, processes, their states and reasons                             |

The queue holds the work: a fleet that dies takes its engines with it, and loses nothing.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError
from penstock.metrics.server import Exporter
from penstock.protocol.presence import read_workers
from penstock.protocol.scripts import check_schema
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.control import PASSING, Control
from penstock.system.keeper import KILL_S
from penstock.system.stop import Stop
from penstock.text import redact
from penstock.workers.fleet.health import ServerHealth, answers
from penstock.workers.fleet.launcher import Launcher, ProcessState, Status
from penstock.workers.fleet.local import LocalLauncher
from penstock.workers.fleet.models import groups_of
from penstock.workers.fleet.plan import Plan
from penstock.workers.fleet.pressure import Scaling
from penstock.workers.fleet.specs import engine_process, specs_of
from penstock.workers.fleet.state import FleetCollector, clear_wanted, read_wanted, write_state
from penstock.workers.router.members import write_members
from penstock.workers.sglang.args import check_arguments

log = logging.getLogger(__name__)

LOOK_S = 0.2
#: Seconds between two updates from and to Redis.
SHOW_S = 1.0
#: Longest wait for the end of all but workers; workers have their drain on top.
STOP_S = 10.0


class Fleet:
    """One fleet. ``run`` blocks until ``stop`` is set.

    Args:
        config: with ``redis.url`` set.
    """

    def __init__(self, config: Config, launcher: Launcher, stop: Stop) -> None:
        assert config.redis.url is not None
        self.config = config
        self.launcher = launcher
        self.stop = stop
        self.keys = Keys(config.run)
        control = Control(config.redis.url)
        control.call(check_schema(self.keys))
        self.client: Client = control.client
        self.plan = Plan(config, launcher)
        self.plan.place_all()
        self._specs = specs_of(config, self.plan)
        self._waiting = dict(self._specs)
        self._statuses: dict[str, Status] = {}
        #: Engines being drained, and since when.
        self._leaving: dict[str, float] = {}
        #: Groups that could not be scaled, and why; retried when another number is wanted.
        self._refused: dict[str, str] = {}
        self._followed: dict[str, int] = {}
        self._health = ServerHealth(config.engine)
        self._shown = 0.0
        #: The last published record; replaced, never changed.
        self.shown: dict[str, Any] = {}
        # A fixed port would be the workers', which get the fleet's configuration.
        alone = config.metrics.port
        self._exporter = None if alone else Exporter.of(config, "fleet", "", FleetCollector(lambda: self.shown))
        self._scaling = Scaling(config, self.client, self.keys) if config.fleet.autoscale is not None else None

    def run(self) -> int:
        """Keep the fleet running until a signal ends it; return the exit code. Blocks."""
        clear_wanted(self.client, self.keys)
        self.show_members()
        try:
            while not self.stop:
                self.start_waiting()
                self.keep_up()
                if time.monotonic() - self._shown >= SHOW_S:
                    self._shown = time.monotonic()
                    self.follow_and_show()
                time.sleep(LOOK_S)
            self._finish()
            return 0
        finally:
            if self._exporter is not None:
                self._exporter.close()
            self.launcher.close()
            with contextlib.suppress(*PASSING):
                write_state(self.client, self.keys, {})
            self.client.close()

    def _adopt(self) -> None:
        """Follow the plan: start its new processes."""
        specs = specs_of(self.config, self.plan)
        self._waiting |= {name: spec for name, spec in specs.items() if name not in self._specs}
        self._specs = specs
        self.show_members()

    def show_members(self) -> None:
        """Publish which engines each worker has behind its router."""
        leaving = {e.url for e in self.plan.engines if e.owner in self._leaving}
        for worker in self.plan.workers:
            if worker.engine.router is not None:
                members = [one for one in worker.engine.router.engines if one.url not in leaving]
                write_members(self.client, self.keys, worker.name, members)

    def start_waiting(self) -> None:
        """Start processes that need not wait: engines that name encoders wait until those answer."""
        encoders = {e.model: False for e in self.plan.engines if e.worker_type == "encoder"}
        for model in encoders:
            urls = [e.url for e in self.plan.engines if e.model == model and e.worker_type == "encoder"]
            encoders[model] = all(map(answers, urls))
        for name, spec in list(self._waiting.items()):
            model = name.split(".", 1)[0]
            if spec.kind == "encoder" or encoders.get(model, True):
                del self._waiting[name]
                self.launcher.start(spec)

    def keep_up(self) -> None:
        """Restart what died, with what is tied to it, and end drained engines."""
        before, self._statuses = self._statuses, self.launcher.look()
        for name, status in self._statuses.items():
            old = before.get(name)
            died = status.state not in (ProcessState.RUNNING, ProcessState.ENDED)
            if old is not None and old.state == ProcessState.RUNNING and died:
                log.warning("%s %s: %s", name, status.state, redact(status.why))
                self._bounce_tied(name)
        self._bounce_hung()
        self._end_drained()

    def _bounce_hung(self) -> None:
        """Restart servers that do not answer: those that the fleet starts, as workers check their own."""
        engines = {engine_process(one): one for one in self.plan.engines if one.started_by == "fleet" and one.url}
        routers = {one.name: one for one in self.plan.routers if one.started_by == "fleet"}
        for name, server in (engines | routers).items():
            status = self._statuses.get(name)
            if status is not None and status.pid and self._health.hangs(server, status.pid):
                log.warning("restarting %s: it does not answer", name)
                self.launcher.bounce(name)
                self._bounce_tied(name)

    def _bounce_tied(self, name: str) -> None:
        tie = self._specs[name].tie if name in self._specs else ""
        for other, spec in self._specs.items():
            if tie and spec.tie == tie and other != name and other not in self._waiting:
                log.warning("restarting %s with %s", other, name)
                self.launcher.bounce(other)

    def scale(self, model: str, group: str, count: int) -> None:
        """Scale a group to ``count`` engines: start new ones, or drain those with the oldest weights.

        Raises:
            ConfigError: it cannot grow that far; the engines that fit are started.
        """
        present = [name for name in self._engines_of(model, group) if name not in self._leaving]
        for _ in range(count - len(present)):
            self.plan.add(model, group)
            self._adopt()
        if count < len(present):
            versions = self._versions()
            latest_first = reversed(present)
            for name in sorted(latest_first, key=lambda name: versions.get(name, -1))[: len(present) - count]:
                self._drain(name)

    def _engines_of(self, model: str, group: str) -> list[str]:
        """Return the names of a group's engines, by their numbers."""
        found = {e.index: e.owner for e in self.plan.engines if (e.model, e.group) == (model, group)}
        return [found[index] for index in sorted(found)]

    def _versions(self) -> dict[str, int]:
        """Return the version of each engine, as reported by workers; engines without a report are missing."""
        found = {}
        for worker in read_workers(self.client, self.keys):
            found[worker.started_as] = worker.version
            urls = {engine.url: engine.version for engine in worker.engines}
            found |= {e.owner: urls[e.url] for e in self.plan.engines if e.url in urls}
        return found

    def _drain(self, name: str) -> None:
        """Drain one engine: its worker drains, or the worker with the router removes it."""
        log.info("draining %s", name)
        self._leaving[name] = time.monotonic()
        if name in {worker.name for worker in self.plan.workers}:
            self._waiting.pop(name, None)
            if name in self._statuses:
                self.launcher.terminate(name)
        else:
            self.show_members()

    def _end_drained(self) -> None:
        """End the processes of drained engines, and release their GPUs and ports."""
        for name, since in list(self._leaving.items()):
            mine = [e for e in self.plan.engines if e.owner == name]
            if name in {worker.name for worker in self.plan.workers}:
                status = self._statuses.get(name)
                gone = status is None or status.state == ProcessState.ENDED
            else:
                gone = not self._is_behind_a_router({e.url for e in mine if e.url})
            if not gone and time.monotonic() - since < self.config.worker.drain_timeout_s + 60 + STOP_S:
                continue
            for process in [name, *map(engine_process, mine)]:
                self._waiting.pop(process, None)
                self.launcher.forget(process)
            self.plan.remove(name)
            self._specs = specs_of(self.config, self.plan)
            del self._leaving[name]
            log.info("%s has left", name)

    def _is_behind_a_router(self, urls: set[str]) -> bool:
        known = {engine.url for worker in read_workers(self.client, self.keys) for engine in worker.engines}
        return bool(urls & known)

    def follow_and_show(self) -> None:
        """Follow requests in Redis, and publish the fleet's state. If Redis is down, retry later."""
        try:
            wanted = read_wanted(self.client, self.keys)
            self._follow(wanted)
            if self._scaling is not None and self._scaling.group not in wanted:
                self._follow({self._scaling.group: self._scaling.decide(self._count(self._scaling.group))})
            self.shown = self.record()
            write_state(self.client, self.keys, self.shown)
        except PASSING as exc:
            log.warning("Redis does not answer, the fleet keeps running: %s", redact(str(exc)))
        except PenstockError as exc:
            log.error("%s", redact(str(exc)))

    def _count(self, group: str) -> int:
        """Return the number of engines of ``MODEL.GROUP`` that run or start."""
        return sum(name not in self._leaving for name in self._engines_of(*group.split(".", 1)))

    def _follow(self, wanted: dict[str, int]) -> None:
        for name, count in wanted.items():
            if self._followed.get(name) == count and name in self._refused:
                continue
            self._followed[name] = count
            model, _, group = name.partition(".")
            try:
                self.scale(model, group, count)
            except ConfigError as exc:
                log.error("%s is not scaled to %d: %s", name, count, exc)
                self._refused[name] = str(exc)
            else:
                self._refused.pop(name, None)

    def record(self) -> dict[str, Any]:
        """Return the state of the fleet, as plain values."""
        groups: dict[str, dict[str, Any]] = {}
        for model in groups_of(self.config):
            for name, group in zip(model.names(), model.server_groups, strict=True):
                engines = self._engines_of(model.name, name)
                groups[f"{model.name}.{name}"] = {
                    "worker_type": group.worker_type,
                    "engines": len(engines),
                    "leaving": sum(engine in self._leaving for engine in engines),
                    "refused": self._refused.get(f"{model.name}.{name}", ""),
                }
        statuses = {name: Status(ProcessState.WAITING) for name in self._waiting} | self._statuses
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "launcher": self.config.fleet.launcher,
            "groups": groups,
            "autoscale": self._scaling.record if self._scaling is not None else {},
            "endpoints": {model: url for model in self.plan.paths if (url := self.plan.endpoint(model))},
            "processes": [
                {
                    "name": name,
                    "kind": self._specs[name].kind if name in self._specs else "",
                    "host": status.host or (self._specs[name].host if name in self._specs else ""),
                    "state": status.state,
                    "pid": status.pid,
                    "starts": status.starts,
                    "why": redact(status.why),
                }
                for name, status in sorted(statuses.items())
            ],
        }

    def _finish(self) -> None:
        """Drain the workers, then end the rest; a second signal makes workers hand back at once, a third one kills."""
        workers = [name for name, spec in self._specs.items() if spec.kind == "worker" and name in self._statuses]
        presses = self.stop.count
        self._end(workers, self.config.worker.drain_timeout_s + KILL_S + STOP_S, presses)
        self._end([name for name in self._statuses if name not in workers], STOP_S, presses)

    def _end(self, names: Iterable[str], limit_s: float, presses: int) -> None:
        left, began = list(names), time.monotonic()
        for name in left:
            self.launcher.terminate(name)
        hurried = False
        while left and time.monotonic() - began < limit_s and self.stop.count <= presses + 1:
            if self.stop.count > presses and not hurried:
                hurried, limit_s = True, min(limit_s, time.monotonic() - began + KILL_S + STOP_S)
                for name in left:
                    self.launcher.terminate(name)
            self._statuses = self.launcher.look()
            left = [name for name in left if self._statuses[name].state != ProcessState.ENDED]
            time.sleep(LOOK_S / 4)
        for name in left:
            log.warning("%s did not end in time: killing it", name)
            self.launcher.forget(name)


def main(config: Config) -> int:
    """Run the fleet of a configuration until SIGTERM or Ctrl-C. Blocks.

    Raises:
        ConfigError: its groups, arguments, nodes or ports are invalid.
    """
    config.run_dir.mkdir(parents=True, exist_ok=True)
    stop = Stop()
    with contextlib.closing(_launcher(config)) as launcher, stop.installed():
        fleet = Fleet(config, launcher, stop)
        # Before anything starts, against the installed SGLang.
        for engine in fleet.plan.engines:
            if engine.engine is not None and engine.rank == 0:
                check_arguments(engine.engine)
        return fleet.run()


def _launcher(config: Config) -> Launcher:
    if config.fleet.launcher == "local":
        return LocalLauncher(config)
    from penstock.workers.fleet.ray_fleet import RayLauncher

    return RayLauncher(config)
