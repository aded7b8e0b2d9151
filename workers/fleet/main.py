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
from penstock.protocol.snapshot import snapshot
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.control import PASSING, Control
from penstock.system.keeper import KILL_S
from penstock.system.stop import Stop
from penstock.text import redact
from penstock.workers.fleet.autoscaler import Autoscaler
from penstock.workers.fleet.health import ServerHealth, answers
from penstock.workers.fleet.launcher import Launcher, Process, ProcessState, Status
from penstock.workers.fleet.local import LocalLauncher
from penstock.workers.fleet.plan import Plan
from penstock.workers.fleet.specs import engine_process, specs_of
from penstock.workers.fleet.state import (
    FleetCollector,
    clear_wanted,
    read_capacity,
    read_wanted,
    write_capacity,
    write_state,
)
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
        self._specs = specs_of(config, self.plan)
        self._waiting = dict(self._specs)
        self._processes: dict[str, Process] = {}
        self._statuses: dict[str, Status] = {}
        #: Engines being drained, and since when.
        self._leaving: dict[str, float] = {}
        #: The number of engines last requested of each group, and why it could not be had; '' if it could.
        self._followed: dict[str, tuple[int, str]] = {}
        self._health = ServerHealth(config.engine)
        self._shown = 0.0
        #: The last published record; replaced, never changed.
        self.shown: dict[str, Any] = {}
        # A fixed port would be the workers', which get the fleet's configuration.
        alone = config.metrics.port
        self._exporter = None if alone else Exporter.of(config, "fleet", "", FleetCollector(lambda: self.shown))
        self._autoscaler = None
        if config.fleet.autoscale is not None:
            self._autoscaler = Autoscaler(config, read_capacity(self.client, self.keys))

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
            for name in list(self._processes):
                self._kill(name)
            self.launcher.close()
            with contextlib.suppress(*PASSING):
                write_state(self.client, self.keys, {})
            self.client.close()

    def show_members(self) -> None:
        """Publish which engines each worker has behind its router."""
        leaving = {e.url for e in self.plan.engines if e.owner in self._leaving}
        for worker in self.plan.workers:
            if worker.engine.router is not None:
                members = [one for one in worker.engine.router.engines if one.url not in leaving]
                write_members(self.client, self.keys, worker.name, members)

    def start_waiting(self) -> None:
        """Start processes that need not wait: engines that name encoders wait until those answer."""
        if not self._waiting:
            return
        silent = {e.model for e in self.plan.engines if e.worker_type == "encoder" and not answers(e.url)}
        for name, spec in list(self._waiting.items()):
            if spec.kind == "encoder" or name.split(".", 1)[0] not in silent:
                del self._waiting[name]
                self._processes[name] = self.launcher.start(spec)

    def keep_up(self) -> None:
        """Restart what died or hangs, with what is tied to it, and end drained engines."""
        before, self._statuses = self._statuses, {name: one.look() for name, one in self._processes.items()}
        for name, status in self._statuses.items():
            old = before.get(name)
            died = status.state not in (ProcessState.RUNNING, ProcessState.ENDED)
            if old is not None and old.state == ProcessState.RUNNING and died:
                log.warning("%s %s: %s", name, status.state, redact(status.why))
                self._bounce_tied(name)
        # Workers check the engines that they start.
        engines = {engine_process(one): one for one in self.plan.engines if one.started_by == "fleet" and one.url}
        routers = {one.name: one for one in self.plan.routers if one.started_by == "fleet"}
        for name, server in (engines | routers).items():
            pid = self._statuses[name].pid if name in self._statuses else 0
            if pid and self._health.hangs(server, pid):
                log.warning("restarting %s: it does not answer", name)
                self._processes[name].bounce()
                self._bounce_tied(name)
        self._end_drained()

    def _bounce_tied(self, name: str) -> None:
        """Restart the other processes of an engine over several nodes."""
        mine = self._specs.get(name)
        for other, spec in self._specs.items():
            tied = mine is not None and mine.kind == spec.kind == "engine" and spec.engine == mine.engine
            if tied and other != name and other in self._processes:
                log.warning("restarting %s with %s", other, name)
                self._processes[other].bounce()

    def _kill(self, name: str) -> None:
        """Kill what is left of a process."""
        self._waiting.pop(name, None)
        if (process := self._processes.pop(name, None)) is not None:
            process.kill()

    def scale(self, group: str, count: int) -> None:
        """Scale ``MODEL.GROUP`` to ``count`` engines: start new ones, or drain those with the oldest weights.

        Raises:
            ConfigError: it cannot grow that far; the engines that fit are started.
        """
        present = self._staying(group)
        for _ in range(count - len(present)):
            self.plan.add(group)
            known, self._specs = self._specs, specs_of(self.config, self.plan)
            self._waiting |= {name: spec for name, spec in self._specs.items() if name not in known}
            self.show_members()
        if count < len(present):
            versions = self._versions()
            latest_first = reversed(present)
            for name in sorted(latest_first, key=lambda name: versions.get(name, -1))[: len(present) - count]:
                self._drain(name)

    def _staying(self, group: str) -> list[str]:
        """Return the engines of a group that are not being drained."""
        return [name for name in self.plan.engines_of(group) if name not in self._leaving]

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
        if not self._has_worker(name):
            self.show_members()
        elif name in self._processes:
            self._processes[name].terminate()
        self._waiting.pop(name, None)

    def _has_worker(self, engine: str) -> bool:
        """Return whether an engine has a worker of its own, of the same name."""
        return any(worker.name == engine for worker in self.plan.workers)

    def _end_drained(self) -> None:
        """End the processes of drained engines, and release their GPUs and ports."""
        limit_s = self.config.worker.drain_timeout_s + 60 + STOP_S
        for name, since in list(self._leaving.items()):
            if self._serves(name) and time.monotonic() - since < limit_s:
                continue
            for process in (name, *(engine_process(e) for e in self.plan.engines if e.owner == name)):
                self._kill(process)
            self.plan.remove(name)
            self._specs = specs_of(self.config, self.plan)
            del self._leaving[name]
            log.info("%s has left", name)

    def _serves(self, name: str) -> bool:
        """Return whether an engine that is being drained still has requests to finish, or may have."""
        if self._has_worker(name):
            return name in self._statuses and self._statuses[name].state != ProcessState.ENDED
        urls = {e.url for e in self.plan.engines if e.owner == name}
        return any(one.url in urls for worker in read_workers(self.client, self.keys) for one in worker.engines)

    def follow_and_show(self) -> None:
        """Follow requests in Redis, and publish the fleet's state. If Redis is down, retry later."""
        try:
            wanted = read_wanted(self.client, self.keys)
            if self._autoscaler is not None and self._autoscaler.group not in wanted:
                wanted[self._autoscaler.group] = self._autoscaled(self._autoscaler)
            for name, count in wanted.items():
                self._follow(name, count)
            self.shown = self.record()
            write_state(self.client, self.keys, self.shown)
        except PASSING as exc:
            log.warning("Redis does not answer, the fleet keeps running: %s", redact(str(exc)))
        except PenstockError as exc:
            log.error("%s", redact(str(exc)))

    def _autoscaled(self, autoscaler: Autoscaler) -> int:
        present = len(self._staying(autoscaler.group))
        count = autoscaler.decide(time.monotonic(), snapshot(self.client, self.keys), present)
        if autoscaler.capacity:
            write_capacity(self.client, self.keys, autoscaler.capacity)
        return count

    def _follow(self, group: str, count: int) -> None:
        known = self._followed.get(group)
        if known is not None and known[0] == count and known[1]:
            return  # refused; another number is tried
        self._followed[group] = (count, "")
        try:
            self.scale(group, count)
        except ConfigError as exc:
            log.error("%s is not scaled to %d: %s", group, count, exc)
            self._followed[group] = (count, str(exc))

    def record(self) -> dict[str, Any]:
        """Return the state of the fleet, as plain values."""
        groups = {
            (group := f"{model.name}.{name}"): {
                "worker_type": one.worker_type,
                "engines": len(self.plan.engines_of(group)),
                "leaving": len(self.plan.engines_of(group)) - len(self._staying(group)),
                "refused": self._followed.get(group, (0, ""))[1],
            }
            for model in self.plan.models
            for name, one in model.groups()
        }
        statuses = {name: Status(ProcessState.WAITING) for name in self._waiting} | self._statuses
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "launcher": self.config.fleet.launcher,
            "groups": groups,
            "autoscale": self._autoscaler.record if self._autoscaler is not None else {},
            "endpoints": self.plan.endpoints(),
            "processes": [
                {
                    "name": name,
                    "kind": self._specs[name].kind,
                    "host": status.host or self._specs[name].host,
                    "state": status.state,
                    "pid": status.pid,
                    "starts": status.starts,
                    "why": redact(status.why),
                }
                for name, status in sorted(statuses.items())
                if name in self._specs
            ],
        }

    def _finish(self) -> None:
        """Drain the workers, then end the rest; a second signal makes workers hand back at once, a third one kills."""
        workers = [name for name in self._processes if self._specs[name].kind == "worker"]
        presses = self.stop.count
        self._end(workers, self.config.worker.drain_timeout_s + KILL_S + STOP_S, presses)
        self._end([name for name in self._processes if name not in workers], STOP_S, presses)

    def _end(self, names: Iterable[str], limit_s: float, presses: int) -> None:
        left, began, hurried = list(names), time.monotonic(), False
        for name in left:
            self._processes[name].terminate()
        while left and time.monotonic() - began < limit_s and self.stop.count <= presses + 1:
            if self.stop.count > presses and not hurried:
                hurried, limit_s = True, min(limit_s, time.monotonic() - began + KILL_S + STOP_S)
                for name in left:
                    self._processes[name].terminate()
            left = [name for name in left if self._processes[name].look().state != ProcessState.ENDED]
            time.sleep(LOOK_S / 4)
        for name in left:
            log.warning("%s did not end in time: killing it", name)
            self._kill(name)


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
