"""Processes of a fleet on a Ray cluster: one actor per process, which keeps it running. Needs penstock[ray].

Ray places engines (a placement group each, with a bundle per node) and restarts actors; no token passes through it. An
actor holds no CPU (two that do are too many for a small node). An impossible group would stay pending silently: it is
refused after ``PLACEMENT_S`` with what is missing. A node that freezes may run its old worker beside the
new one: leases and fences of the queue make that harmless.
"""

import logging
import os
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.system.extras import check_installed
from penstock.system.processes import python_environment
from penstock.workers.fleet.launcher import ProcessState, Slot, Spec, Status
from penstock.workers.fleet.local import LocalProcess
from penstock.workers.fleet.nodes import Ports, gpus_per_node

#: Settings of clusters started here: a lost node is noticed after about 3 s instead of 14, and engines, which are
#: children of Ray's workers, run at normal priority (Ray's own is nice 15).
OWN_CLUSTER = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}
#: Longest wait for the first answer of an actor, for a later one, and for its end.
START_S, ANSWER_S, END_S = 120.0, 2.0, 10.0
#: Longest wait for a placement group.
PLACEMENT_S = 120.0
#: Share of a node's own resource that pins an actor to it.
PIN = 0.001

log = logging.getLogger(__name__)


class OnNode(LocalProcess):
    """A process on its node, with the GPUs that Ray assigned. After a restart by Ray it starts its process."""

    def __init__(self, spec: Spec) -> None:
        import ray as imported

        ray: Any = imported
        here = ray.get_runtime_context().get_node_id()
        host = next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == here)
        if spec.command and host != spec.host:
            raise RuntimeError(
                f"moved from {spec.host} to {host}: scale its group down and up, others have its address"
            )
        super().__init__(spec)


class RayProcess:
    """A process that an actor keeps; see Process. An actor that does not answer in time counts as lost."""

    def __init__(self, ray: Any, actor: Any, spec: Spec) -> None:
        self._ray, self._actor, self._name = ray, actor, spec.name
        self._last = Status(ProcessState.RESTARTING, host=spec.host)
        self._ask()

    def _ask(self) -> None:
        self._answer, self._asked_at = self._actor.look.remote(), time.monotonic()

    def look(self) -> Status:
        if self._ray.wait([self._answer], timeout=0)[0]:
            try:
                self._last = self._ray.get(self._answer)
            except self._ray.exceptions.RayError as exc:
                # Ray restarts it; then it answers.
                lines = str(exc).strip().splitlines()
                why = f"its actor was lost: {lines[0]} ... {lines[-1]}"
                self._last = replace(self._last, state=ProcessState.LOST, pid=0, why=why)
            self._ask()
        elif time.monotonic() - self._asked_at > ANSWER_S:
            self._last = replace(self._last, state=ProcessState.LOST, why="its actor does not answer")
        return self._last

    def bounce(self) -> None:
        self._call("bounce")

    def terminate(self) -> None:
        self._call("terminate")

    def kill(self) -> None:
        self._call("kill")
        self._ray.kill(self._actor, no_restart=True)

    def _call(self, method: str) -> None:
        try:
            self._ray.get(getattr(self._actor, method).remote(), timeout=END_S)
        except (self._ray.exceptions.RayError, TimeoutError) as exc:
            log.warning("%s: failed to %s: %s", self._name, method, str(exc).splitlines()[0])


class RayLauncher:
    """Start processes as actors; they end with this process, which is Ray's driver."""

    def __init__(self, config: Config) -> None:
        check_installed("ray", "fleet.launcher ray")
        import ray

        self._ray: Any = ray
        self._range = config.fleet.ports
        self._named = [node.host for node in config.fleet.nodes]
        #: Engines without GPUs, by host.
        self._load: Counter[str] = Counter()
        self._groups: dict[str, Any] = {}
        self._ports: dict[str, Any] = {}
        self._joined = not ray.is_initialized()
        if self._joined:
            self._join()

    def _join(self) -> None:
        """Join the cluster, or start one here that only this machine can reach."""
        address = os.environ.get("RAY_ADDRESS")
        # Explicit, because the default differs between releases.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        options: dict[str, Any] = {"address": address} if address else {"include_dashboard": False}
        if not address:
            for name, value in OWN_CLUSTER.items():
                os.environ.setdefault(name, value)
        if paths := python_environment({}).get("PYTHONPATH"):
            options["runtime_env"] = {"env_vars": {"PYTHONPATH": paths}}
        try:
            self._ray.init(log_to_driver=False, logging_level=logging.WARNING, configure_logging=False, **options)
        except (ConnectionError, RuntimeError, ValueError) as exc:
            raise ConfigError(f"Ray cannot be joined at {address or 'this machine'}: {exc}") from exc

    def _alive(self) -> dict[str, dict[str, Any]]:
        """Return the living nodes by address; only those of ``fleet.nodes`` if it names some.

        Raises:
            ConfigError: a named node is missing.
        """
        alive = {one["NodeManagerAddress"]: one for one in self._ray.nodes() if one["Alive"]}
        if missing := [host for host in self._named if host not in alive]:
            raise ConfigError(
                f"fleet.nodes names {', '.join(missing)}, and Ray's nodes are {', '.join(sorted(alive))}: "
                "start Ray there, or correct fleet.nodes."
            )
        return {host: alive[host] for host in (self._named or sorted(alive))}

    @property
    def hosts(self) -> list[str]:
        return list(self._alive())

    def take(self, engine: str, num_gpus: int, host: str | None, gpus: tuple[int, ...] | None) -> list[Slot]:
        """Have Ray place an engine; see Places. Blocks until it is placed. Ray chooses the ids of GPUs.

        Raises:
            ConfigError: Ray cannot place it in time; the message says what is missing.
        """
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        if gpus is not None:
            raise ConfigError(f"{engine}: Ray chooses the ids of GPUs: remove gpus {list(gpus)} of its group.")
        nodes = {name: one for name, one in self._alive().items() if host in (None, name)}
        if not nodes:
            raise ConfigError(f"{engine}: host {host} is not a node of Ray (there: {', '.join(self.hosts)}).")
        if num_gpus == 0:
            name = min(nodes, key=lambda one: self._load[one])
            self._load[name] += 1
            return [Slot(name)]
        sizes = {name: int(one["Resources"].get("GPU", 0)) for name, one in nodes.items()}
        per_node = gpus_per_node(engine, num_gpus, max(sizes.values()))
        count = num_gpus // per_node
        names = {one["NodeID"]: name for name, one in nodes.items()}
        group = placement_group(
            [{"GPU": per_node}] * count,
            strategy="STRICT_SPREAD" if count > 1 else "STRICT_PACK",
            name=f"penstock {engine}",
            bundle_label_selector=[{"ray.io/node-id": f"in({','.join(names)})"}] * count
            if host or self._named
            else None,
        )
        if not group.wait(PLACEMENT_S):
            remove_placement_group(group)
            shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
            free = int(self._ray.available_resources().get("GPU", 0))
            raise ConfigError(
                f"{engine} needs {num_gpus} GPUs, and Ray found none within {PLACEMENT_S:g} s: its nodes have GPUs: "
                f"{shown}; {free} of them are free in all. End what holds them, add a node, or lower num_gpus."
            )
        self._groups[engine] = group
        placed = placement_group_table(group)["bundles_to_node_id"]
        return [Slot(names[placed[index]], tuple(range(per_node))) for index in range(count)]

    def ports(self, owner: str, host: str) -> int:
        """Assign ports; see Places. Blocks for an answer of the node."""
        if host not in self._ports:
            # Lives on the node as long as the fleet, and holds its ports.
            actor = self._ray.remote(num_cpus=0, resources={f"node:{host}": PIN})(Ports)
            self._ports[host] = actor.remote(host, *self._range, reserves=True)
        try:
            first: int = self._ray.get(self._ports[host].take.remote(owner), timeout=START_S)
        except self._ray.exceptions.RayTaskError as exc:
            raise exc.cause from None
        except self._ray.exceptions.GetTimeoutError as exc:
            raise ConfigError(f"Ray's node {host} started no actor within {START_S:g} s: check its log.") from exc
        return first

    def release(self, owner: str) -> None:
        """Release GPUs and ports; see Places."""
        from ray.util.placement_group import remove_placement_group

        if (group := self._groups.pop(owner, None)) is not None:
            remove_placement_group(group)
        for actor in self._ports.values():
            actor.release.remote(owner)

    def start(self, spec: Spec) -> RayProcess:
        """Start an actor that starts the process: in the engine's placement group, or on its host."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"resources": {f"node:{spec.host}": PIN}}
        if spec.gpus:
            group = PlacementGroupSchedulingStrategy(self._groups[spec.engine], placement_group_bundle_index=spec.rank)
            options = {"num_gpus": len(spec.gpus), "scheduling_strategy": group}
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, **options)(OnNode)
        return RayProcess(self._ray, actor.remote(spec), spec)

    def close(self) -> None:
        """Leave the cluster."""
        for engine in list(self._groups):
            self.release(engine)
        for actor in self._ports.values():
            self._ray.kill(actor)
        if self._joined:
            self._ray.shutdown()
