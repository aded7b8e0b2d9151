"""The plan of a fleet: which process runs on which node, GPUs and ports, with which command. Pure: starts nothing.

| worker_type | started by | served by                                   |
|-------------|------------|---------------------------------------------|
| regular     | its worker | its worker; several behind a router: by one |
| prefill     | the fleet  | the model's router, of one worker           |
| decode      | the fleet  | the same                                    |
| encoder     | the fleet  | prefill (or regular) engines, by URL        |
| placeholder | none       | none: it occupies GPUs                      |
| (urls)      | others     | as regular                                  |

Engines of frozen models and of several nodes are started by the fleet too. One worker, and so one consumer of the
queue, stands for each engine or router of the trained model.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.config import Config, EngineConfig, ModelConfig
from penstock.config.fleet import GroupConfig, MemberConfig, ModelGroups, RouterConfig, RouterOptions
from penstock.errors import ConfigError
from penstock.workers.fleet.launcher import Launcher
from penstock.workers.fleet.models import find_group, groups_of, is_routed
from penstock.workers.fleet.nodes import LOOPBACK, Inventory, Node
from penstock.workers.fleet.ports import Ports
from penstock.workers.fleet.roles import DERIVED_PORTS, merge, parallelism, role_of
from penstock.workers.router.process import build_router_command
from penstock.workers.sglang.args import build_command, build_environment

#: Ports in use, by host.
Taken = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One process of one engine: an engine over several nodes has one on each."""

    name: str
    model: str
    group: str
    worker_type: str
    index: int
    #: Index among the nodes of its engine; only rank 0 serves.
    rank: int
    num_nodes: int
    host: str
    gpus: tuple[int, ...]
    #: worker: its worker starts it; fleet; "nobody": a placeholder, or a server that runs already.
    started_by: Literal["worker", "fleet", "nobody"]
    url: str = ""
    ports: dict[str, int] = field(default_factory=dict)
    #: Its configuration; None if it is not started here.
    engine: EngineConfig | None = None
    command: tuple[str, ...] = ()
    #: Additional environment variables.
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Identity of its engine."""
        return self.model, self.group, self.index

    @property
    def member(self) -> MemberConfig:
        """The engine as a member of a router."""
        kind: Any = self.worker_type
        return MemberConfig(url=self.url, worker_type=kind, bootstrap_port=self.ports.get("bootstrap"))


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """One router."""

    name: str
    model: str
    host: str
    router: RouterConfig
    started_by: Literal["worker", "fleet"]
    command: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"http://{self.router.host}:{self.router.port}"


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker: one consumer of the queue."""

    name: str
    group: str
    host: str
    gpus: tuple[int, ...]
    engine: EngineConfig
    slots: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a fleet."""

    engines: list[EngineProcess]
    routers: list[RouterProcess]
    workers: list[WorkerProcess]
    #: Folder of each model.
    paths: dict[str, str]

    def ports(self, host: str) -> list[int]:
        """Return every port that the plan uses on a host."""
        found: list[int] = []
        for engine in self.engines:
            if engine.host == host:
                found += [port for name, port in engine.ports.items() if name != "dist_init"]
                if first := engine.ports.get("dist_init"):
                    found += range(first, first + 1 + DERIVED_PORTS)
        for router in self.routers:
            if router.host == host:
                found += [router.router.port, router.router.metrics_port]
        return sorted(found)

    def endpoint(self, model: str) -> str | None:
        """Return the one address of a model: its router's, or that of its only engine."""
        router = next((one.url for one in self.routers if one.model == model), None)
        urls = [e.url for e in self.engines if e.model == model and e.url and e.worker_type == "regular"]
        return router or (urls[0] if len(urls) == 1 else None)

    def without(self, key: tuple[str, str, int]) -> "Plan":
        """Return the plan without one engine."""
        engines = [engine for engine in self.engines if engine.key != key]
        gone = {engine.url for engine in self.engines if engine.key == key} - {""}
        name = engine_name(*key)
        routers = [replace(one, router=_without_members(one.router, gone)) for one in self.routers]
        return replace(self, engines=engines, routers=routers, workers=[w for w in self.workers if w.name != name])


def _without_members(router: RouterConfig, gone: set[str]) -> RouterConfig:
    return router.model_copy(update={"engines": [one for one in router.engines if one.url not in gone]})


def engine_name(model: str, group: str, index: int) -> str:
    return f"{model}.{group}.{index}"


def plan(config: Config, nodes: list[Node], taken: Taken | None = None) -> Plan:
    """Plan a fleet.

    Args:
        nodes: the machines, with their GPUs in the order of assignment.
        taken: ports that are not free, by host.

    Raises:
        ConfigError: groups that are inconsistent, or need more GPUs or ports than are available.
    """
    planner = _Planner(config, nodes, taken or {})
    models = groups_of(config)
    # GPUs are assigned in the order of the file, which placeholders exist to shape; arguments in order of dependency.
    for model in models:
        for name, group in zip(model.names(), model.server_groups, strict=True):
            planner.place(model, name, group, range(group.count))
    for model in models:
        planner.equip(model)
        planner.serve(model)
    return planner.plan()


def extend(
    config: Config, nodes: list[Node], old: Plan, model_name: str, group_name: str, taken: Taken | None = None
) -> Plan:
    """Return ``old`` with one more engine in a group; existing engines stay in place.

    Raises:
        ConfigError: no such group, one that cannot grow, or no room for it.
    """
    model, group = find_group(config, model_name, group_name)
    where = f"fleet.models.{model_name}.{group_name}"
    if group.urls or group.worker_type in ("placeholder", "encoder"):
        raise ConfigError(
            f"{where} cannot grow: {'its urls are' if group.urls else group.worker_type + ' groups are'} fixed."
        )
    if group.gpus is not None:
        raise ConfigError(f"{where} cannot grow: its gpus {group.gpus} are fixed; remove gpus.")
    used = {
        host: frozenset(old.ports(host)) | frozenset((taken or {}).get(host, ())) for host in {n.host for n in nodes}
    }
    planner = _Planner(config, nodes, used)
    planner.adopt(old)
    indexes = {engine.index for engine in old.engines if engine.key[:2] == (model_name, group_name)}
    free = next(index for index in range(len(indexes) + 1) if index not in indexes)
    planner.place(model, group_name, group, range(free, free + 1))
    planner.equip(model)
    planner.serve(model)
    return planner.plan()


class _Planner:
    def __init__(self, config: Config, nodes: list[Node], taken: Taken) -> None:
        self.config = config
        self.inventory = Inventory(nodes)
        self.spread = len(nodes) > 1
        first, last = config.fleet.ports
        self.ports = {node.host: Ports(node.host, first, last, taken.get(node.host, frozenset())) for node in nodes}
        self.engines: list[EngineProcess] = []
        self.routers: list[RouterProcess] = []
        self.workers: list[WorkerProcess] = []
        self.paths: dict[str, str] = {}
        self.groups: dict[tuple[str, str], GroupConfig] = {}

    def plan(self) -> Plan:
        return Plan(self.engines, self.routers, self.workers, self.paths)

    def adopt(self, old: Plan) -> None:
        """Continue from a plan: its processes keep their GPUs and ports."""
        self.engines, self.routers, self.workers = list(old.engines), list(old.routers), list(old.workers)
        self.paths = dict(old.paths)
        for engine in self.engines:
            if engine.host:
                self.inventory.assign(engine.name, engine.host, engine.gpus)

    # -- GPUs

    def place(self, model: ModelGroups, name: str, group: GroupConfig, indexes: range) -> None:
        """Assign nodes and GPUs to the engines of a group."""
        self.groups[model.name, name] = group
        if group.urls:
            self.engines += [
                EngineProcess(engine_name(model.name, name, index), model.name, name, "regular", index, 0, 1, "", (),
                              "nobody", url=url)
                for index, url in enumerate(group.urls)
            ]  # fmt: skip
            return
        for index in indexes:
            who = engine_name(model.name, name, index)
            if group.gpus is not None:
                per = group.per_engine
                slots = self.inventory.take_exactly(who, group.host, tuple(group.gpus[index * per : (index + 1) * per]))
            else:
                slots = self.inventory.take(who, group.per_engine, group.host)
            if len(slots) > 1 and group.worker_type == "encoder":
                raise ConfigError(
                    f"{who}: an encoder cannot be spread over {len(slots)} nodes: lower num_gpus_per_engine."
                )
            by = self._started_by(model, group, len(slots))
            self.engines += [
                EngineProcess(f"{who}.n{rank}" if len(slots) > 1 else who, model.name, name, group.worker_type, index,
                              rank, len(slots), host, gpus, by)
                for rank, (host, gpus) in enumerate(slots)
            ]  # fmt: skip

    def _started_by(
        self, model: ModelGroups, group: GroupConfig, num_nodes: int
    ) -> Literal["worker", "fleet", "nobody"]:
        if group.worker_type == "placeholder":
            return "nobody"
        own = model.name == self.config.model.name and not is_routed(self.config, model) and num_nodes == 1
        return "worker" if own and group.worker_type == "regular" else "fleet"

    # -- arguments

    def equip(self, model: ModelGroups) -> None:
        """Assign ports and arguments to the engines of a model, encoders first: the others need their URLs."""
        self.paths[model.name] = model.model_path or self.config.model.path
        ours = [e for e in self.engines if e.model == model.name and not e.url and e.started_by != "nobody"]
        for engine in sorted(ours, key=lambda one: one.worker_type != "encoder"):
            if engine.rank == 0:
                ranks = [one for one in ours if one.key == engine.key]
                for old, new in zip(ranks, self._equipped(model, ranks), strict=True):
                    self.engines[self.engines.index(old)] = new

    def _equipped(self, model: ModelGroups, ranks: list[EngineProcess]) -> Iterator[EngineProcess]:
        first = ranks[0]
        group = self.groups[first.model, first.group]
        where = f"fleet.models.{first.model}.{first.group}"
        args = merge(where, self.config.engine.args, group.overrides)
        args = parallelism(where, args, group.per_engine)
        spread = len(ranks) > 1
        dist_init = None
        if spread or args.get("enable_dp_attention"):
            dist_init = self.ports[first.host].take(f"{first.name} (dist_init)", 1 + DERIVED_PORTS)
        for rank in ranks:
            at = self.ports[rank.host]
            ports = {"http": at.take(f"{rank.name} (http)"), "nccl": at.take(f"{rank.name} (nccl)")}
            more: dict[str, Any] = {"nccl_port": ports["nccl"]}
            if dist_init is not None:
                if rank.rank == 0:
                    ports["dist_init"] = dist_init
                more["dist_init_addr"] = f"{self._address(first)}:{dist_init}"
            if spread:
                more |= {"nnodes": len(ranks), "node_rank": rank.rank}
            if rank.worker_type == "prefill":
                ports["bootstrap"] = at.take(f"{rank.name} (bootstrap)")
            more |= role_of(
                rank.worker_type,
                bootstrap_port=ports.get("bootstrap"),
                encoder_urls=self._encoders(model, rank),
            )
            yield self._with_command(model, group, rank, args | more, ports)

    def _with_command(
        self, model: ModelGroups, group: GroupConfig, rank: EngineProcess, args: dict[str, Any], ports: dict[str, int]
    ) -> EngineProcess:
        env = self.config.engine.env | group.env
        if rank.gpus:
            env |= {"CUDA_VISIBLE_DEVICES": self.inventory.node(rank.host).visible(rank.gpus)}
        host = self._address(rank)
        engine = self.config.engine.model_copy(
            update={"args": args, "env": env, "host": host, "port": ports["http"], "url": None}
        )
        served = ModelConfig(name=model.name, path=self.paths[model.name], dtype=self.config.model.dtype)
        return replace(
            rank,
            url=f"http://{host}:{ports['http']}" if rank.rank == 0 else "",
            ports=ports,
            engine=engine,
            command=tuple(build_command(engine, served, path=served.path, version=-1, port=ports["http"])),
            environment=_added(build_environment(engine)),
        )

    def _address(self, engine: EngineProcess) -> str:
        # An address that only its own worker uses need not be reachable from other machines.
        return engine.host if self.spread and engine.started_by == "fleet" else LOOPBACK

    def _encoders(self, model: ModelGroups, engine: EngineProcess) -> list[str]:
        kinds = {group.worker_type for group in model.server_groups}
        if engine.worker_type not in (("prefill",) if "prefill" in kinds else ("regular",)):
            return []
        return [one.url for one in self.engines if one.model == model.name and one.worker_type == "encoder"]

    # -- who serves

    def serve(self, model: ModelGroups) -> None:
        """Plan routers and workers for the engines of a model that have none."""
        trained = model.name == self.config.model.name
        served = [e for e in self.engines if e.model == model.name and e.url and e.worker_type != "encoder"]
        if is_routed(self.config, model):
            self._route(model, served, trained)
        elif trained:
            known = {worker.name for worker in self.workers}
            self.workers += [self._worker(e) for e in served if engine_name(*e.key) not in known]

    def _route(self, model: ModelGroups, served: list[EngineProcess], trained: bool) -> None:
        members = [engine.member for engine in served]
        old = next((one for one in self.routers if one.model == model.name), None)
        if old is not None:
            router = old.router.model_copy(update={"engines": members})
            self.routers[self.routers.index(old)] = replace(old, router=router)
            for worker in [one for one in self.workers if one.engine.router == old.router]:
                engine = worker.engine.model_copy(update={"router": router})
                self.workers[self.workers.index(worker)] = replace(worker, engine=engine)
            return
        host = next((engine.host for engine in served if engine.host), self.inventory.nodes[0].host)
        at, name = self.ports[host], f"{model.name}.router"
        address = host if self.spread and not trained else LOOPBACK
        router = RouterConfig.model_validate(
            (model.router or RouterOptions()).model_dump()
            | {
                "engines": [member.model_dump() for member in members],
                "host": address,
                "port": at.take(f"{name} (http)"),
                "metrics_port": at.take(f"{name} (metrics)"),
            }
        )
        command = tuple(build_router_command(router, self.config.engine.python))
        self.routers.append(RouterProcess(name, model.name, host, router, "worker" if trained else "fleet", command))
        if trained:
            engine = self.config.engine.model_copy(update={"router": router, "args": {}, "env": {}})
            slots = next((group.slots for group in model.server_groups if group.slots), None)
            self.workers.append(WorkerProcess(f"{model.name}.routed", "", host, (), engine, slots))

    def _worker(self, engine: EngineProcess) -> WorkerProcess:
        config = engine.engine
        if engine.started_by != "worker" or config is None:
            config = self.config.engine.model_copy(update={"url": engine.url, "args": {}, "env": {}})
        host = engine.host or self.inventory.nodes[0].host
        slots = self.groups[engine.model, engine.group].slots if (engine.model, engine.group) in self.groups else None
        gpus = engine.gpus if engine.started_by == "worker" else ()
        return WorkerProcess(engine_name(*engine.key), engine.group, host, gpus, config, slots)


def _added(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if os.environ.get(name) != value and name != "PATH"}


#: Attempts to find free ports.
MAX_PLANS = 20


class ReservedPlans:
    """Plan one fleet on its nodes."""

    def __init__(self, config: Config, nodes: list[Node], launcher: Launcher) -> None:
        self._config = config
        self._nodes = nodes
        self._launcher = launcher
        #: Host -> ports found to be in use by others.
        self._taken: dict[str, frozenset[int]] = {}

    def first(self) -> Plan:
        """Return the plan of the configured fleet. Raises ConfigError if it cannot be placed."""
        return self._reserved(lambda: plan(self._config, self._nodes, self._taken), None)

    def extended(self, old: Plan, model: str, group: str) -> Plan:
        """Return a plan with one more engine in a group. Raises ConfigError if it cannot be placed."""
        return self._reserved(lambda: extend(self._config, self._nodes, old, model, group, self._taken), old)

    def without(self, old: Plan, key: tuple[str, str, int]) -> Plan:
        """Return a plan without one engine, and release its ports."""
        new = old.without(key)
        for host in {engine.host for engine in old.engines if engine.key == key and engine.host}:
            self._launcher.release(host, sorted(set(old.ports(host)) - set(new.ports(host))))
        return new

    def _reserved(self, lay_out: Callable[[], Plan], old: Plan | None) -> Plan:
        for _ in range(MAX_PLANS):
            new = lay_out()
            if not self._refused(new, old):
                return new
            for node in self._nodes:
                self._launcher.release(node.host, _added_entries(new, old, node.host))
        raise ConfigError(
            f"fleet.ports {list(self._config.fleet.ports)}: others take its ports faster than they are planned."
        )

    def _refused(self, new: Plan, old: Plan | None) -> bool:
        """Reserve what a plan adds, on every node; return True if others use some of it."""
        refused = False
        for node in self._nodes:
            if bad := self._launcher.reserve(node.host, _added_entries(new, old, node.host)):
                self._taken[node.host] = self._taken.get(node.host, frozenset()) | frozenset(bad)
                refused = True
        return refused


def _added_entries(new: Plan, old: Plan | None, host: str) -> list[int]:
    known = set(old.ports(host)) if old is not None else set()
    return [port for port in new.ports(host) if port not in known]
