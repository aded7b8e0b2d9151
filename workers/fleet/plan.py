"""The plan of a fleet: which process runs on which node, GPUs and ports, with which command. Starts nothing.

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

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.config import Config, EngineConfig, ModelConfig
from penstock.config.fleet import GroupConfig, MemberConfig, ModelGroups, RouterConfig, RouterOptions, WorkerType
from penstock.errors import ConfigError
from penstock.workers.fleet.groups import group_arguments, groups_of, is_routed, role_arguments
from penstock.workers.fleet.launcher import Places, Slot
from penstock.workers.fleet.nodes import LOOPBACK, Node, Nodes
from penstock.workers.router.process import build_router_command
from penstock.workers.sglang.args import build_command, engine_variables

#: Ports of a process, by their place in its block. SGLang (0.5.20) derives the six after --dist-init-addr from it.
HTTP, NCCL, BOOTSTRAP, DIST_INIT = range(4)

#: worker: its worker starts it; fleet; nobody: a placeholder, or a server that runs already.
StartedBy = Literal["worker", "fleet", "nobody"]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One process of one engine: an engine over several nodes has one on each."""

    name: str
    #: Name of its engine, MODEL.GROUP.INDEX.
    owner: str
    model: str
    worker_type: WorkerType
    #: Index among the nodes of its engine; only rank 0 serves.
    rank: int
    num_nodes: int
    host: str
    gpus: tuple[int, ...]
    started_by: StartedBy
    url: str
    ports: dict[str, int] = field(default_factory=dict)
    #: Its configuration; None if it is not started here.
    engine: EngineConfig | None = None
    command: tuple[str, ...] = ()
    #: Additional environment variables.
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """One router."""

    name: str
    model: str
    host: str
    router: RouterConfig
    started_by: StartedBy
    command: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"http://{self.router.host}:{self.router.port}"


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One worker: one consumer of the queue."""

    name: str
    host: str
    gpus: tuple[int, ...]
    engine: EngineConfig
    slots: int | None


@dataclass(frozen=True, slots=True)
class _Placed:
    """One engine with its GPUs and ports, which it keeps while others come and go."""

    name: str
    model: ModelGroups
    group_name: str
    group: GroupConfig
    index: int
    args: dict[str, Any]
    started_by: StartedBy
    #: Of each of its processes; a server that runs already has one without a host.
    slots: list[Slot]
    #: First port of the block of each of its processes; [] if it is not started here.
    ports: list[int]


def plan(config: Config, nodes: list[Node]) -> "Plan":
    """Plan a fleet on given machines; reserves nothing. Raises ConfigError as ``Plan``."""
    return Plan(config, Nodes(nodes, config.fleet.ports))


class Plan:
    """All processes of a fleet, as engines are added and removed.

    Args:
        places: assigns GPUs and ports.

    Raises:
        ConfigError: groups that are inconsistent, or need more GPUs or ports than are available.
    """

    def __init__(self, config: Config, places: Places) -> None:
        self.config = config
        self.places = places
        self.models = groups_of(config)
        self.engines: list[EngineProcess] = []
        self.routers: list[RouterProcess] = []
        self.workers: list[WorkerProcess] = []
        self._spread = len(places.hosts) > 1
        self._placed: list[_Placed] = []
        # In the order of the file, which placeholders exist to shape.
        for model in self.models:
            for name, group in model.groups():
                for index in range(len(group.urls) or group.count):
                    self._place(model, name, group, index)
        self._arrange()

    def engines_of(self, group: str) -> list[str]:
        """Return the names of the engines of ``MODEL.GROUP``, by their numbers."""
        found = [one for one in self._placed if f"{one.model.name}.{one.group_name}" == group]
        return [one.name for one in sorted(found, key=lambda one: one.index)]

    def endpoints(self) -> dict[str, str]:
        """Return the one address of each model that has one: its router's, or that of its only engine."""
        found = {}
        for model in self.models:
            urls = [one.url for one in self.routers if one.model == model.name] or [
                one.url for one in self.engines if one.model == model.name and one.url and one.worker_type == "regular"
            ]
            if len(urls) == 1:
                found[model.name] = urls[0]
        return found

    def add(self, name: str) -> None:
        """Add an engine to the group ``MODEL.GROUP``; existing engines stay in place.

        Raises:
            ConfigError: no such group, one that cannot grow, or no room for it; the plan is unchanged.
        """
        known = {f"{model.name}.{one}": (model, one, group) for model in self.models for one, group in model.groups()}
        if name not in known:
            raise ConfigError(f"The fleet has no group {name}; it has {', '.join(known)}.")
        model, group_name, group = known[name]
        if group.urls or group.worker_type in ("placeholder", "encoder"):
            what = "its urls are" if group.urls else f"{group.worker_type} groups are"
            raise ConfigError(f"fleet.models.{name} cannot grow: {what} fixed.")
        if group.gpus is not None:
            raise ConfigError(f"fleet.models.{name} cannot grow: its gpus {group.gpus} are fixed; remove gpus.")
        taken = {one.index for one in self._placed if one.group is group}
        self._place(model, group_name, group, min(set(range(len(taken) + 1)) - taken))
        self._arrange()

    def remove(self, engine: str) -> None:
        """Remove one engine, and release its GPUs and ports."""
        self._placed = [one for one in self._placed if one.name != engine]
        self.places.release(engine)
        self._arrange()

    def _place(self, model: ModelGroups, group_name: str, group: GroupConfig, index: int) -> None:
        """Assign nodes, GPUs and ports to an engine."""
        name, where, per = (
            f"{model.name}.{group_name}.{index}",
            f"fleet.models.{model.name}.{group_name}",
            group.per_engine,
        )
        is_started = not group.urls and group.worker_type != "placeholder"
        args = group_arguments(self.config, where, group) if is_started else {}
        gpus = None if group.gpus is None else tuple(group.gpus[index * per : (index + 1) * per])
        slots = [Slot("")] if group.urls else self.places.take(name, per, group.host, gpus)
        try:
            if len(slots) > 1 and group.worker_type == "encoder":
                raise ConfigError(
                    f"{name}: an encoder cannot be spread over {len(slots)} nodes: lower num_gpus_per_engine."
                )
            ports = [self.places.ports(name, slot.host) for slot in slots] if is_started else []
        except ConfigError:
            self.places.release(name)
            raise
        own = model.name == self.config.model.name and not is_routed(self.config, model) and len(slots) == 1
        by: StartedBy = "worker" if own and group.worker_type == "regular" else "fleet"
        by = by if is_started else "nobody"
        self._placed.append(_Placed(name, model, group_name, group, index, args, by, slots, ports))

    # -- processes of the placed engines

    def _arrange(self) -> None:
        """Derive the processes from the placed engines. Routers keep their addresses and commands."""
        self.engines = [process for one in self._placed for process in self._processes(one)]
        routers, self.routers, self.workers = {one.model: one for one in self.routers}, [], []
        for model in self.models:
            trained = model.name == self.config.model.name
            served = [e for e in self.engines if e.model == model.name and e.url and e.worker_type != "encoder"]
            if is_routed(self.config, model):
                self.routers.append(self._router(model, served, routers.get(model.name), trained=trained))
                if trained:
                    self.workers.append(self._routed_worker(model, self.routers[-1]))
            elif trained:
                placed = {one.name: one for one in self._placed}
                self.workers += [self._worker(e, placed[e.owner].group.slots) for e in served]

    def _processes(self, placed: _Placed) -> list[EngineProcess]:
        """Return the processes of an engine, by rank."""
        count, url = len(placed.slots), self._url(placed)
        processes = [
            EngineProcess(
                name=f"{placed.name}.n{rank}" if count > 1 else placed.name,
                owner=placed.name,
                model=placed.model.name,
                worker_type=placed.group.worker_type,
                rank=rank,
                num_nodes=count,
                host=slot.host,
                gpus=slot.gpus,
                started_by=placed.started_by,
                url=url if rank == 0 else "",
            )
            for rank, slot in enumerate(placed.slots)
        ]
        return [self._with_command(placed, one) for one in processes] if placed.ports else processes

    def _url(self, placed: _Placed) -> str:
        if placed.group.urls:
            return placed.group.urls[placed.index]
        return f"http://{self._address(placed, 0)}:{placed.ports[0] + HTTP}" if placed.ports else ""

    def _address(self, placed: _Placed, rank: int) -> str:
        # An address that only its own worker uses need not be reachable from other machines.
        return placed.slots[rank].host if self._spread and placed.started_by == "fleet" else LOOPBACK

    def _with_command(self, placed: _Placed, process: EngineProcess) -> EngineProcess:
        config, group, rank = self.config, placed.group, process.rank
        ports = {"http": placed.ports[rank] + HTTP, "nccl": placed.ports[rank] + NCCL}
        args = placed.args | {"nccl_port": ports["nccl"]}
        if process.num_nodes > 1 or args.get("enable_dp_attention"):
            dist_init = placed.ports[0] + DIST_INIT
            ports |= {"dist_init": dist_init} if rank == 0 else {}
            args["dist_init_addr"] = f"{self._address(placed, 0)}:{dist_init}"
        if process.num_nodes > 1:
            args |= {"nnodes": process.num_nodes, "node_rank": rank}
        if group.worker_type == "prefill":
            ports["bootstrap"] = placed.ports[rank] + BOOTSTRAP
        args |= role_arguments(group.worker_type, ports, self._encoders(placed))
        env = config.engine.server_env | group.env
        if visible := placed.slots[rank].visible:
            env |= {"CUDA_VISIBLE_DEVICES": visible}
        address = {"host": self._address(placed, rank), "port": ports["http"], "url": None}
        engine = config.engine.model_copy(update={"preset": None, "args": args, "env": env} | address)
        path = placed.model.model_path or config.model.path
        served = ModelConfig(name=placed.model.name, path=path, dtype=config.model.dtype)
        command = build_command(engine, served, path=path, version=-1, port=ports["http"])
        environment = engine_variables(engine)
        return replace(process, ports=ports, engine=engine, command=tuple(command), environment=environment)

    def _encoders(self, placed: _Placed) -> list[str]:
        """Return the URLs of the encoders that an engine uses."""
        kinds = {group.worker_type for group in placed.model.server_groups}
        if placed.group.worker_type != ("prefill" if "prefill" in kinds else "regular"):
            return []
        mine = [one for one in self._placed if one.model is placed.model and one.group.worker_type == "encoder"]
        return [self._url(one) for one in mine]

    def _router(
        self, model: ModelGroups, served: list[EngineProcess], known: RouterProcess | None, *, trained: bool
    ) -> RouterProcess:
        members = [
            MemberConfig.model_validate(
                {"url": e.url, "worker_type": e.worker_type, "bootstrap_port": e.ports.get("bootstrap")}
            )
            for e in served
        ]
        if known is not None:
            return replace(known, router=known.router.model_copy(update={"engines": members}))
        name, host = f"{model.name}.router", next((e.host for e in served if e.host), self.places.hosts[0])
        port = self.places.ports(name, host)
        router = RouterConfig(
            **dict(model.router or RouterOptions()),
            engines=members,
            host=host if self._spread and not trained else LOOPBACK,
            port=port,
        )
        command = build_router_command(router, self.config.engine.python, metrics_port=port + 1)
        return RouterProcess(name, model.name, host, router, "worker" if trained else "fleet", tuple(command))

    def _routed_worker(self, model: ModelGroups, router: RouterProcess) -> WorkerProcess:
        slots = next((group.slots for group in model.server_groups if group.slots), None)
        return WorkerProcess(f"{model.name}.routed", router.host, (), self._external(router=router.router), slots)

    def _worker(self, engine: EngineProcess, slots: int | None) -> WorkerProcess:
        host = engine.host or self.places.hosts[0]
        if engine.started_by == "worker" and engine.engine is not None:
            return WorkerProcess(engine.owner, host, engine.gpus, engine.engine, slots)
        return WorkerProcess(engine.owner, host, (), self._external(url=engine.url), slots)

    def _external(self, **address: Any) -> EngineConfig:
        """Return the configuration of an engine that its worker does not start."""
        return self.config.engine.model_copy(update={"preset": None, "args": {}, "env": {}} | address)
