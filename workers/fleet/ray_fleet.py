"""Processes of a fleet on a Ray cluster: one actor per process, which keeps it running. Needs penstock[ray].

Ray places and restarts; no token passes through it. An actor holds no CPU (two that do are too many for a small node)
and has its own placement group, pinned to the node of the plan. An impossible group would stay pending silently: it is
refused after ``fleet.placement_timeout_s`` with what is missing. A node that freezes may run its old worker beside the
new one: leases and fences of the queue make that harmless.
"""

import json
import logging
import os
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from penstock.config import Config
from penstock.config.reading.settings import ENV_PREFIX
from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.system.processes import python_environment
from penstock.workers.fleet.keeper import VARIABLE
from penstock.workers.fleet.kept import Kept, ProcessState, Spec, Status
from penstock.workers.fleet.nodes import Node
from penstock.workers.fleet.ports import Reservation

#: Settings of clusters started here: a lost node is noticed after about 3 s instead of 14, and engines, which are
#: children of Ray's workers, run at normal priority (Ray's own is nice 15).
OWN_CLUSTER = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}
#: Longest wait for the answer of an actor, and for its end.
ANSWER_S, END_S = 2.0, 10.0
#: Share of a node's own resource that pins an actor to it.
PIN = 0.001

log = logging.getLogger(__name__)


class KeptActor:
    """A :class:`Kept` on its node, with the GPUs that Ray assigned. After a restart by Ray it starts its process."""

    def __init__(self, spec: Spec) -> None:
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "") if spec.gpus else ""
        self._kept = Kept(with_gpus(spec, given) if given else spec)
        self._kept.start()

    def look(self) -> Status:
        return replace(self._kept.look(), host=self._kept.spec.host)

    def bounce(self) -> None:
        self._kept.bounce()

    def terminate(self) -> None:
        self._kept.terminate()

    def kill(self) -> None:
        self._kept.kill()


class PortsActor:
    """Runs on a node for the life of the fleet: holds its ports."""

    def __init__(self) -> None:
        self._reservation = Reservation()

    def hold(self, ports: list[int]) -> list[int]:
        return self._reservation.hold(ports)

    def release(self, ports: list[int]) -> None:
        self._reservation.release(ports)


def with_gpus(spec: Spec, visible: str) -> Spec:
    """Return ``spec`` with the GPUs that Ray assigned instead of those of the plan, which others may use."""
    name = VARIABLE if VARIABLE in spec.environment else ENV_PREFIX + "ENGINE"
    values = json.loads(spec.environment.get(name, "{}"))
    engine = values.setdefault("engine", {}) if name == VARIABLE else values
    engine["env"] = (engine.get("env") or {}) | {"CUDA_VISIBLE_DEVICES": visible}
    return replace(spec, environment=spec.environment | {name: json.dumps(values)})


class RayLauncher:
    """Start processes as actors; they end with this process, which is Ray's driver."""

    def __init__(self, config: Config) -> None:
        check_installed("ray", "fleet.launcher ray")
        import ray

        self._ray: Any = ray
        self._timeout_s = config.fleet.placement_timeout_s
        self._wanted_hosts = [node.host for node in config.fleet.nodes]
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._last: dict[str, Status] = {}
        self._ports: dict[str, Any] = {}
        self._connect(config.fleet.ray_address)

    def _connect(self, address: str | None) -> None:
        """Join the cluster (unless this process has), or start one here that only this machine can reach."""
        self._joined = not self._ray.is_initialized()
        if not self._joined:
            return
        address = address or os.environ.get("RAY_ADDRESS")
        # Explicit, because the default differs between releases.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        options: dict[str, Any] = {"address": address} if address else {"include_dashboard": False}
        if not address:
            for name, value in OWN_CLUSTER.items():
                os.environ.setdefault(name, value)
        paths = python_environment({}).get("PYTHONPATH")
        if paths:
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": paths}}
        try:
            self._ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False, **options)
        except (ConnectionError, RuntimeError, ValueError) as exc:
            raise ConfigError(f"Ray cannot be joined at {address or 'this machine'}: {exc}") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        if self._joined:
            self._ray.shutdown()

    def nodes(self) -> list[Node]:
        """Return the living nodes of the cluster; only those of ``fleet.nodes`` if it names some.

        Raises:
            ConfigError: a named node is missing.
        """
        there = {}
        for one in self._alive():
            host = one["NodeManagerAddress"]
            there[host] = Node(host, tuple(range(int(one["Resources"].get("GPU", 0)))))
        if missing := [host for host in self._wanted_hosts if host not in there]:
            raise ConfigError(
                f"fleet.nodes names {', '.join(missing)}, and Ray's nodes are {', '.join(sorted(there))}: "
                "start Ray there, or correct fleet.nodes."
            )
        return [there[host] for host in (self._wanted_hosts or sorted(there))]

    def _alive(self) -> list[dict[str, Any]]:
        return [one for one in self._ray.nodes() if one["Alive"]]

    def reserve(self, host: str, ports: list[int]) -> list[int]:
        """Reserve ports on a node; return those that are not free."""
        if host not in self._ports:
            actor = self._ray.remote(num_cpus=0, resources={f"node:{host}": PIN})(PortsActor)
            self._ports[host] = actor.remote()
        refused: list[int] = self._ray.get(self._ports[host].hold.remote(ports), timeout=self._timeout_s)
        return refused

    def release(self, host: str, ports: list[int]) -> None:
        """Release ports."""
        if host in self._ports:
            self._ports[host].release.remote(ports)

    def start(self, spec: Spec) -> None:
        """Place an actor that starts the process. Blocks until it is placed.

        Raises:
            ConfigError: Ray cannot place it in time; the message says what is missing.
        """
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle: dict[str, float] = {f"node:{spec.host}": PIN}
        if spec.gpus:
            bundle["GPU"] = len(spec.gpus)
        group = placement_group([bundle], strategy="STRICT_PACK", name=f"penstock {spec.name}")
        if not group.wait(self._timeout_s):
            remove_placement_group(group)
            raise ConfigError(self._missing(spec))
        actor = self._ray.remote(
            num_cpus=0,
            num_gpus=len(spec.gpus),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )(KeptActor)
        self._groups[spec.name] = group
        self._actors[spec.name] = actor.remote(spec)
        self._last[spec.name] = Status(ProcessState.RESTARTING, host=spec.host)

    def _missing(self, spec: Spec) -> str:
        wants = f"{len(spec.gpus)} GPUs on {spec.host}" if spec.gpus else f"a place on {spec.host}"
        nodes = ", ".join(f"{one['NodeManagerAddress']} {int(one['Resources'].get('GPU', 0))}" for one in self._alive())
        free = int(self._ray.available_resources().get("GPU", 0))
        return (
            f"{spec.name} needs {wants}, and Ray found none within fleet.placement_timeout_s = {self._timeout_s:g} s: "
            f"its nodes have GPUs: {nodes}; {free} of them are free in all. End what holds them, add a node, or lower "
            "num_gpus."
        )

    def look(self) -> dict[str, Status]:
        """Return the status of every process. Blocks for a moment at most: a silent actor counts as lost."""
        for name, actor in self._actors.items():
            if name not in self._pending:
                self._pending[name] = actor.look.remote()
        if self._pending:
            ready, _ = self._ray.wait(list(self._pending.values()), num_returns=len(self._pending), timeout=ANSWER_S)
            done = set(ready)
            for name, ref in list(self._pending.items()):
                if ref not in done:
                    self._last[name] = replace(
                        self._last[name], state=ProcessState.LOST, why="its actor does not answer"
                    )
                    continue
                del self._pending[name]
                try:
                    self._last[name] = self._ray.get(ref)
                except self._ray.exceptions.RayError as exc:
                    # Ray restarts it; then it answers.
                    why = f"its actor was lost: {str(exc).splitlines()[0]}"
                    self._last[name] = replace(self._last[name], state=ProcessState.LOST, pid=0, why=why)
        return dict(self._last)

    def bounce(self, name: str) -> None:
        """Kill a process and restart it at once."""
        self._call(name, "bounce")

    def terminate(self, name: str) -> None:
        """Send SIGTERM, and do not restart."""
        self._call(name, "terminate")

    def _call(self, name: str, what: str) -> None:
        try:
            self._ray.get(getattr(self._actors[name], what).remote(), timeout=END_S)
        except (self._ray.exceptions.RayError, TimeoutError) as exc:
            log.warning("%s: failed to %s: %s", name, what, str(exc).splitlines()[0])

    def forget(self, name: str) -> None:
        """Kill what is left of a process, its actor and its placement group."""
        from ray.util.placement_group import remove_placement_group

        if name not in self._actors:
            return
        self._call(name, "kill")
        self._ray.kill(self._actors.pop(name), no_restart=True)
        remove_placement_group(self._groups.pop(name))
        self._pending.pop(name, None)
        self._last.pop(name, None)

    def close(self) -> None:
        """Kill all processes."""
        for name in list(self._actors):
            self.forget(name)
        for actor in self._ports.values():
            self._ray.kill(actor)
        self._ports.clear()
