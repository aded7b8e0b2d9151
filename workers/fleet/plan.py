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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.config import Config, EngineConfig, ModelConfig
from penstock.config.fleet import GroupConfig, MemberConfig, ModelGroups, RouterConfig, RouterOptions
from penstock.errors import ConfigError
from penstock.workers.fleet.launcher import Places
from penstock.workers.fleet.models import find_group, groups_of, is_routed
from penstock.workers.fleet.nodes import LOOPBACK, Node, Nodes
from penstock.workers.fleet.roles import DERIVED_PORTS, merge, parallelism, role_of
from penstock.workers.router.process import build_router_command
from penstock.workers.sglang.args import build_command, engine_variables


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
    #: Its CUDA_VISIBLE_DEVICES; empty: set where it starts.
    visible: str
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
    def owner(self) -> str:
        """Name of its engine."""
        return engine_name(self.model, self.group, self.index)

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


def engine_name(model: str, group: str, index: int) -> str:
    return f"{model}.{group}.{index}"


def plan(config: Config, nodes: list[Node]) -> "Plan":
    """Plan a fleet on given machines; reserves nothing. Raises ConfigError as ``Plan.place_all``."""
    made = Plan(config, Nodes(nodes, config.fleet.ports))
    made.place_all()
    return made


class Plan:
    """All processes of a fleet, as engines are added and removed.

    Args:
        places: assigns GPUs and ports.
    """

    def __init__(self, config: Config, places: Places) -> None:
        self.config = config
        self.places = places
        self.spread = len(places.hosts) > 1
        self.engines: list[EngineProcess] = []
        self.routers: list[RouterProcess] = []
        self.workers: list[WorkerProcess] = []
        #: Folder of each model.
        self.paths: dict[str, str] = {}
        self.groups: dict[tuple[str, str], GroupConfig] = {}

    def endpoint(self, model: str) -> str | None:
        """Return the one address of a model: its router's, or that of its only engine."""
        router = next((one.url for one in self.routers if one.model == model), None)
        urls = [e.url for e in self.engines if e.model == model and e.url and e.worker_type == "regular"]
        return router or (urls[0] if len(urls) == 1 else None)

    def place_all(self) -> None:
        """Plan the configured engines.

        Raises:
            ConfigError: groups that are inconsistent, or need more GPUs or ports than are available.
        """
        models = groups_of(self.config)
        # GPUs are assigned in the order of the file, which placeholders exist to shape; arguments by dependency.
        for model in models:
            for name, group in zip(model.names(), model.server_groups, strict=True):
                self.place(model, name, group, range(group.count))
        for model in models:
            self.equip(model)
            self.serve(model)

    def add(self, model_name: str, group_name: str) -> None:
        """Add an engine to a group; existing engines stay in place.

        Raises:
            ConfigError: no such group, one that cannot grow, or no room for it; the plan is unchanged.
        """
        model, group = find_group(self.config, model_name, group_name)
        where = f"fleet.models.{model_name}.{group_name}"
        if group.urls or group.worker_type in ("placeholder", "encoder"):
            raise ConfigError(
                f"{where} cannot grow: {'its urls are' if group.urls else group.worker_type + ' groups are'} fixed."
            )
        if group.gpus is not None:
            raise ConfigError(f"{where} cannot grow: its gpus {group.gpus} are fixed; remove gpus.")
        indexes = {engine.index for engine in self.engines if (engine.model, engine.group) == (model_name, group_name)}
        free = next(index for index in range(len(indexes) + 1) if index not in indexes)
        try:
            self.place(model, group_name, group, range(free, free + 1))
            self.equip(model)
            self.serve(model)
        except ConfigError:
            self.remove(engine_name(model_name, group_name, free))
            raise

    def remove(self, owner: str) -> None:
        """Remove one engine, and release its GPUs and ports."""
        gone = {engine.url for engine in self.engines if engine.owner == owner} - {""}
        self.engines = [engine for engine in self.engines if engine.owner != owner]
        self.workers = [worker for worker in self.workers if worker.name != owner]
        self.routers = [
            replace(one, router=one.router.model_copy(update={"engines": [
                member for member in one.router.engines if member.url not in gone
            ]}))
            for one in self.routers
        ]  # fmt: skip
        self.places.release(owner)

    # -- GPUs

    def place(self, model: ModelGroups, name: str, group: GroupConfig, indexes: range) -> None:
        """Assign nodes and GPUs to the engines of a group."""
        self.groups[model.name, name] = group
        if group.urls:
            self.engines += [
                EngineProcess(engine_name(model.name, name, index), model.name, name, "regular", index, 0, 1, "", (),
                              "", "nobody", url=url)
                for index, url in enumerate(group.urls)
            ]  # fmt: skip
            return
        for index in indexes:
            who = engine_name(model.name, name, index)
            per = group.per_engine
            gpus = None if group.gpus is None else tuple(group.gpus[index * per : (index + 1) * per])
            slots = self.places.take(who, per, group.host, gpus)
            if len(slots) > 1 and group.worker_type == "encoder":
                raise ConfigError(
                    f"{who}: an encoder cannot be spread over {len(slots)} nodes: lower num_gpus_per_engine."
                )
            by = self._started_by(model, group, len(slots))
            self.engines += [
                EngineProcess(f"{who}.n{rank}" if len(slots) > 1 else who, model.name, name, group.worker_type, index,
                              rank, len(slots), slot.host, slot.gpus, slot.visible, by)
                for rank, slot in enumerate(slots)
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
                ranks = [one for one in ours if one.owner == engine.owner]
                for old, new in zip(ranks, self._equipped(model, ranks), strict=True):
                    self.engines[self.engines.index(old)] = new

    def _equipped(self, model: ModelGroups, ranks: list[EngineProcess]) -> Iterator[EngineProcess]:
        first = ranks[0]
        group = self.groups[first.model, first.group]
        where = f"fleet.models.{first.model}.{first.group}"
        args = merge(where, self.config.engine.server_args, group.overrides)
        args = parallelism(where, args, group.per_engine)
        spread = len(ranks) > 1
        owner, dist_init = first.owner, None
        if spread or args.get("enable_dp_attention"):
            dist_init = self.places.port(owner, first.host, 1 + DERIVED_PORTS)
        for rank in ranks:
            ports = {name: self.places.port(owner, rank.host) for name in ("http", "nccl")}
            more: dict[str, Any] = {"nccl_port": ports["nccl"]}
            if dist_init is not None:
                if rank.rank == 0:
                    ports["dist_init"] = dist_init
                more["dist_init_addr"] = f"{self._address(first)}:{dist_init}"
            if spread:
                more |= {"nnodes": len(ranks), "node_rank": rank.rank}
            if rank.worker_type == "prefill":
                ports["bootstrap"] = self.places.port(owner, rank.host)
            more |= role_of(
                rank.worker_type,
                bootstrap_port=ports.get("bootstrap"),
                encoder_urls=self._encoders(model, rank),
            )
            yield self._with_command(model, group, rank, args | more, ports)

    def _with_command(
        self, model: ModelGroups, group: GroupConfig, rank: EngineProcess, args: dict[str, Any], ports: dict[str, int]
    ) -> EngineProcess:
        env = self.config.engine.server_env | group.env
        if rank.visible:
            env |= {"CUDA_VISIBLE_DEVICES": rank.visible}
        host = self._address(rank)
        engine = self.config.engine.model_copy(
            update={"preset": None, "args": args, "env": env, "host": host, "port": ports["http"], "url": None}
        )
        served = ModelConfig(name=model.name, path=self.paths[model.name], dtype=self.config.model.dtype)
        return replace(
            rank,
            url=f"http://{host}:{ports['http']}" if rank.rank == 0 else "",
            ports=ports,
            engine=engine,
            command=tuple(build_command(engine, served, path=served.path, version=-1, port=ports["http"])),
            environment=engine_variables(engine),
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
            self.workers += [self._worker(e) for e in served if e.owner not in known]

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
        host = next((engine.host for engine in served if engine.host), self.places.hosts[0])
        name = f"{model.name}.router"
        address = host if self.spread and not trained else LOOPBACK
        router = RouterConfig.model_validate(
            (model.router or RouterOptions()).model_dump()
            | {
                "engines": [member.model_dump() for member in members],
                "host": address,
                "port": self.places.port(name, host),
            }
        )
        metrics_port = self.places.port(name, host)
        command = tuple(build_router_command(router, self.config.engine.python, metrics_port=metrics_port))
        self.routers.append(RouterProcess(name, model.name, host, router, "worker" if trained else "fleet", command))
        if trained:
            engine = self.config.engine.model_copy(update={"router": router, "preset": None, "args": {}, "env": {}})
            slots = next((group.slots for group in model.server_groups if group.slots), None)
            self.workers.append(WorkerProcess(f"{model.name}.routed", "", host, (), engine, slots))

    def _worker(self, engine: EngineProcess) -> WorkerProcess:
        config = engine.engine
        if engine.started_by != "worker" or config is None:
            config = self.config.engine.model_copy(update={"url": engine.url, "preset": None, "args": {}, "env": {}})
        host = engine.host or self.places.hosts[0]
        slots = self.groups[engine.model, engine.group].slots
        gpus = engine.gpus if engine.started_by == "worker" else ()
        return WorkerProcess(engine.owner, engine.group, host, gpus, config, slots)
