"""A whole run as real processes under one folder, kept up as a service manager would: what a nemesis works on.

    with Cluster(folder, WORKLOADS["async"]) as cluster:
        cluster.kill(cluster.of("leader")[0])
        cluster.wait("another batch", lambda: cluster.committed() > before)

Penstock's parts are its own commands, from ``source``; engines and trainers are those of this folder. All of them
record what they do in ``FOLDER/history``. Nothing here reads penstock's memory: what is known is asked of Redis.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import redis
import yaml

from penstock.protocol.waits import read_waits
from penstock.records.keys import Keys
from penstock.redis.server import find_binary
from penstock.system.processes import free_port
from tests.chaos.cluster.adopted import child_of, logged_by
from tests.chaos.cluster.crew import Crew
from tests.chaos.cluster.forked import Zygote
from tests.chaos.cluster.redis_conf import redis_conf
from tests.chaos.cluster.supervisor import Part, Supervisor, searched
from tests.chaos.cluster.watch import Watch
from tests.chaos.cluster.workloads import STEP_S, Seats, Workload, merged
from tests.chaos.parts.policy import write_data, write_policy
from tests.chaos.places import RECORDED, ROOT

#: Packages of the product: what is taken of ``source``.
PRODUCT = ("penstock", "console", "producer", "workers", "buffer", "consumers")
#: What is started for a part that is not a command of its name; parts that record nothing, or do so themselves.
MODULES = {
    "scorer": ["tests.chaos.parts.scorer"], "agent": ["tests.chaos.parts.agent"],
    "verifier": ["penstock.cli", "verifiers"], "gateway": ["penstock.cli", "serve"],
}  # fmt: skip
UNRECORDED = frozenset(("engine", "redis", "payload", "verifier"))
#: Python parts that are started from scratch: they start others by their own command.
EXECUTED = frozenset(("launcher", "verifier"))
#: Interpreter that has a real engine, and the router.
ENGINE_PYTHON = ROOT / ".engine" / "bin" / "python"
#: Longest wait for any one thing to happen; the machine may be slow, and a real engine is slow to start.
PATIENCE_S, ENGINE_PATIENCE_S = 400.0, 600.0
_LEADS = re.compile(r"leading in epoch (\d+)")
_ROUTES = re.compile(r"router \S+ at \S+, pid (\d+)")


class Cluster(Crew):
    """Started on ``__enter__``, killed on ``__exit__``.

    Args:
        folder: for everything; made where it is missing. One run's: FileExistsError where there was one before.
        source: a checkout whose packages the parts run.
        redis_server: the binary; None: what penstock itself would take.
        seed: of data and engines.
        step_s: how long a step of a trainer takes; the longer, the less a run does between two faults.
    """

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        *,
        source: Path = ROOT,
        redis_server: Path | None = None,
        seed: int = 0,
        step_s: float = STEP_S,
    ) -> None:
        self.folder = folder.absolute()
        self.workload = workload
        self.source = source.absolute()
        self.seed = seed
        self.step_s = step_s
        self.keys = Keys(workload.resolved()["run"])
        self.history = self.folder / "history"
        self.redis_port = free_port()
        #: Which Redis a part is sent to, by its name; the server itself where nothing else is said. A proxy sets it.
        self.url_for: Callable[[str], str] = lambda name: self.redis_url
        self.binary = redis_server or find_binary()
        self._client: redis.Redis | None = None
        self.watch: Watch | None = None
        #: Ports of engines and payload servers, by the name of the part.
        self.ports: dict[str, int] = {}

    # --- start and end ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        for name in ("logs", "checkpoints", "sent"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.history.mkdir()  # that of one run
        self._link_product()
        write_policy(self.folder / "model", is_real=self.workload.is_real, is_cuda=self.workload.is_cuda)
        write_data(self.folder / "train.jsonl", "t", self.seed)
        write_data(self.folder / "heldout.jsonl", "h", self.seed, lines=8)
        self._supervisor = Supervisor(self.folder, self._environment_of, self._zygote())
        try:
            self._start_all()
        except BaseException:
            self._supervisor.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.watch is not None:
            self.watch.end()
        if self._supervisor is not None:
            self._supervisor.end()

    def _start_all(self) -> None:
        servers = ["redis", *(f"payload-{number}" for number in range(self.workload.payload_servers))]
        for name in servers:
            self._add_redis(name)
        self.wait("Redis to answer", self.answers)
        self.write_config("run")
        self.watch = Watch(self.redis_url, self.keys, self._adopt_engines)
        if self.workload.is_launched:
            self._launch()
        for seats in self.workload.trainers:
            self.start("trainer", seats=seats)
        counts = {
            "verifier": self.workload.verifiers, "recorder": self.workload.recorders, "buffer": self.workload.buffers,
            "producer": 1, "worker": self.workload.workers, "scorer": self.workload.scorers,
            "gateway": self.workload.gateways, "agent": self.workload.agents,
        }  # fmt: skip
        for kind, count in counts.items():
            for number in range(count - len(self.of(kind))):
                self.start(kind, name=kind if kind == "producer" else f"{kind}-{number}")

    def _launch(self) -> None:
        """Start `penstock run` without its trainer, and know its parts; blocks until its buffer is there.

        A trainer that came first would leave keys of a run that the launcher knows nothing of.
        """
        config, worker = self.write_config("run"), "worker-0"
        self._add_engine(engine_of(worker))
        words = ["run", str(config), "--without", "trainer", *self._engine_words(worker)]
        launcher = self._part("launcher", "launcher", [sys.executable, "-m", "penstock.cli", *words], {})
        self.supervisor.add(launcher)
        for kind, name in (("producer", "producer"), ("buffer", "buffer-0"), ("worker", worker)):
            part = self._part(kind, name, [], {})
            part.is_adopted, part.seek = True, child_of(launcher, f" penstock.cli {kind} ")
            part.log = self.folder / "runs" / self.keys.run / "logs" / f"{worker if kind == 'worker' else kind}.log"
            self.supervisor.add(part)
        self.wait("the launcher to start a buffer", lambda: self.parts["buffer-0"].is_alive)

    def _link_product(self) -> None:
        """The packages of the product and nothing else of ``source``, so that tests are those of this checkout."""
        folder = self.folder / "source"
        folder.mkdir(exist_ok=True)
        for name in PRODUCT:
            with contextlib.suppress(FileExistsError):
                (folder / name).symlink_to(self.source / name)

    # --- parts --------------------------------------------------------------------------------------------------

    def of(self, kind: str) -> list[Part]:
        """Parts of a kind that are not retired: redis, payload, producer, worker, router, engine, verifier, buffer,
        trainer, scorer, recorder, launcher.

        leader and standby are the buffer that leads now, and the others.
        """
        if kind in ("leader", "standby"):
            leader = self._leader()
            return [part for part in self.of("buffer") if (part is leader) == (kind == "leader")]
        return super().of(kind)

    def retire(self, part: Part) -> None:
        """It leaves by SIGTERM and does not come back; with a worker its engines."""
        self.supervisor.retire(part)
        if part.kind == "worker":
            for engine in self._engines_of(part.name):
                self.supervisor.retire(self.parts[engine], signal.SIGKILL)
            if router := self.parts.get(router_of(part.name)):
                router.is_retired = True

    def start(
        self,
        kind: str,
        *,
        name: str = "",
        config: dict[str, Any] | None = None,
        seats: Seats | None = None,
        environment: dict[str, str] | None = None,
    ) -> Part:
        """Start one part more; a worker with an engine of its own.

        Args:
            config: what differs in its configuration, as of an older one.
            seats: of a trainer; all its ranks are started, the first is returned.
            environment: variables of its own.
        """
        name = name or self._new_name(kind)
        if kind == "payload":
            return self._add_redis(name)
        if kind == "gateway":
            self.ports[name] = free_port()
            config = merged(config or {}, {"agents": {"port": self.ports[name]}})
        path = self.write_config(name, config or {})
        if kind == "trainer":
            return self._start_trainer(seats or Seats(), path, environment or {})
        if kind == "engine":
            return self._add_engine(name)
        command = [sys.executable, "-m", *MODULES.get(kind, ["penstock.cli", kind]), "--config", str(path)]
        if kind == "worker":
            for engine in self._engines_of(name):
                self._add_engine(engine)
            command += self._engine_words(name)
        if kind in ("worker", "verifier"):
            command += ["--name", name]
        if kind == "agent":
            gateways = [f"http://127.0.0.1:{self.ports[one.name]}" for one in self.of("gateway")]
            command += ["--gateways", ",".join(gateways)]
        part = self._part(kind, name, command, environment or {})
        self.supervisor.add(part)
        if kind == "worker" and self.workload.engines > 1:
            self._add_router(part)
        return part

    def _engines_of(self, worker: str) -> list[str]:
        further = [f"{engine_of(worker)}.{number}" for number in range(1, self.workload.engines)]
        return [engine_of(worker), *further]

    def _add_router(self, worker: Part) -> None:
        part = self._part("router", router_of(worker.name), [], {})
        part.is_adopted, part.seek = True, logged_by(worker, _ROUTES)
        self.supervisor.add(part)

    def _start_trainer(self, seats: Seats, path: Path, environment: dict[str, str]) -> Part:
        command = [
            sys.executable, "-m", "tests.chaos.parts.trainer", "--config", str(path), "--name", seats.name,
            "--ranks", str(seats.ranks), "--role", seats.role, "--roles", ",".join(seats.roles),
            "--subscription", json.dumps(seats.subscription), "--definition", json.dumps(seats.definition),
            *(["--drives"] if seats.drives else []),
            "--checkpoints", str(self.folder / "checkpoints" / seats.group), "--step-s", str(self.step_s),
        ]  # fmt: skip
        ranks = []
        for rank in range(seats.ranks):
            part = self._part("trainer", f"{seats.group}.{rank}", [*command, "--rank", str(rank)], environment)
            part.group, part.may_finish = seats.group if seats.ranks > 1 else "", True
            ranks.append(part)
        self.supervisor.add(*ranks)
        return ranks[0]

    def _engine_words(self, worker: str) -> list[str]:
        """What says which engine a worker has: ours, or a real one that it starts itself."""
        if self.workload.is_real:
            return [f"--engine.python={sys.executable if self.workload.is_cuda else ENGINE_PYTHON}"]
        urls = [f"http://127.0.0.1:{self.ports[engine]}" for engine in self._engines_of(worker)]
        if len(urls) == 1:
            return [f"--engine.url={urls[0]}"]
        engines = json.dumps([{"url": url} for url in urls])
        routed = [f"--engine.router.engines={engines}", "--engine.router.policy=round_robin"]
        return [f"--engine.python={ENGINE_PYTHON}", *routed]

    def _adopt_engines(self, pids: Mapping[str, int]) -> None:
        for part in self.of("engine"):
            if part.is_adopted and part.seek is None:
                self.supervisor.adopt(part, pids.get(part.name.removeprefix(engine_of("")), 0))

    def _add_engine(self, name: str) -> Part:
        if self.workload.is_real:
            part = self._part("engine", name, [], {})
            part.is_adopted = True
            self.supervisor.add(part)
            return part
        self.ports[name] = free_port()
        command = [
            sys.executable, "-m", "tests.chaos.parts.law_engine", "--port", str(self.ports[name]), "--name", name,
            "--pace", str(self.workload.pace), "--seed", str(self.seed + len(self.ports)),
        ]  # fmt: skip
        part = self._part("engine", name, command, {})
        self.supervisor.add(part)
        return part

    def _add_redis(self, name: str) -> Part:
        self.ports[name] = self.redis_port if name == "redis" else free_port()
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "redis.conf").write_text(redis_conf(self.binary, self.ports[name], self.workload.redis))
        command = ["/bin/sh", "-c", 'cd "$0" && exec "$1" redis.conf', str(folder), str(self.binary)]
        part = self._part("redis" if name == "redis" else "payload", name, command, {})
        self.supervisor.add(part)
        return part

    def _part(self, kind: str, name: str, command: list[str], environment: dict[str, str]) -> Part:
        part = Part(kind, name, command, environment, log=self.folder / "logs" / f"{name}.log")
        part.is_forked = kind not in EXECUTED and command[:2] == [sys.executable, "-m"]
        return part

    def _zygote(self) -> Zygote | None:
        """What forks the parts; None where ``CHAOS_FORK=0`` has each start from scratch."""
        if os.environ.get("CHAOS_FORK") == "0":
            return None
        log = self.folder / "logs" / "zygote.log"
        return Zygote(self.folder, {**os.environ, **self._environment_of(Part("zygote", "zygote", [], {}, log))}, log)

    def _new_name(self, kind: str) -> str:
        taken = sum(part.kind == kind for part in self.parts.values())
        return f"{kind}-{taken}" if taken else kind

    def _environment_of(self, part: Part) -> dict[str, str]:
        """What a part is started with: it records, runs ``source``, and knows where Redis is."""
        recorded = [] if part.kind in UNRECORDED else [str(RECORDED)]
        path = searched(*recorded, str(self.folder / "source"), str(ROOT))
        # What a launcher starts is named by its own command.
        of_all = {"PYTHONPATH": path, "CHAOS_HISTORY": str(self.history)}
        of_all |= {} if part.kind == "launcher" else {"CHAOS_WHO": part.name}
        of_all |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        # What a killed trainer leaves half sent goes with the run.
        of_all |= {"TMPDIR": str(self.folder / "sent")} if part.kind == "trainer" else {}
        # Roles are started each by itself, and follow whoever has the subscription.
        job = f"{part.group}-{part.lives}" if part.group else ""
        return of_all | {"PENSTOCK_REDIS__URL": self.url_for(part.name), "CHAOS_JOB": job}

    def write_config(self, name: str, changes: dict[str, Any] | None = None) -> Path:
        """The configuration file of a part, with ``changes`` on top of that of the workload."""
        values = merged(self.workload.resolved(), changes or {})
        servers = [part for part in self.ports if part.startswith("payload-")]
        values["redis"] = {"url": self.redis_url} | values.get("redis", {})
        if servers:
            values["redis"]["payload_servers"] = {one: f"redis://127.0.0.1:{self.ports[one]}/0" for one in servers}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    # --- looking ------------------------------------------------------------------------------------------------

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.redis_port}/0"

    def client(self) -> redis.Redis:
        """A client of the control Redis itself, through no proxy."""
        if self._client is None:
            self._client = redis.Redis(port=self.redis_port, socket_timeout=5.0, retry=None)
        return self._client

    def move_to(self, port: int) -> None:
        """The control Redis is another one from now on, as after a failover."""
        self.redis_port = port
        self._client = None
        if self.watch is not None:
            self.watch.move_to(self.redis_url)

    def ask(self, question: Callable[[redis.Redis], Any], default: Any = None) -> Any:
        """Answer of Redis, or ``default`` while it gives none."""
        try:
            return question(self.client())
        except redis.RedisError:
            return default

    def in_flight(self) -> int:
        """Jobs that are leased now; 0 while Redis does not answer."""
        assert self.watch is not None
        return int(self.ask(self.watch.count_leased, 0))

    def committed(self) -> int:
        """Batches that were committed so far, over all subscriptions; those that came again count again."""
        return 0 if self.watch is None else self.watch.committed

    @property
    def patience_s(self) -> float:
        """Longest wait for any one thing."""
        return ENGINE_PATIENCE_S if self.workload.is_real else PATIENCE_S

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Poll until ``condition`` is true; its value. Raises TimeoutError, with what the run waits for."""
        timeout_s = self.patience_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            self.supervisor.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not happen in {timeout_s:g} s; {self.words()}")
            time.sleep(0.05)
        return value

    def words(self) -> str:
        """Where the run is, for whoever waits in vain."""
        dead = [f"{part.name} (dead, {part.exits[-3:]})" for part in list(self.parts.values()) if not part.is_alive]
        waits = [(one.who, str(one.cause)) for one in self.ask(lambda client: read_waits(client, self.keys), [])]
        return f"not running: {', '.join(dead) or 'none'}; waits: {waits}; logs are in {self.folder / 'logs'}"

    def answers(self) -> bool:
        """Whether the control Redis does."""
        return bool(self.ask(lambda client: client.ping()))

    def _leader(self) -> Part | None:
        """The buffer that leads now, by what it logged; None where nobody does."""
        epoch = self.ask(lambda client: client.hget(self.keys.leader, "epoch"))
        if epoch is None:
            return None
        for part in self.of("buffer"):
            found = _LEADS.findall(part.log.read_text(errors="replace")) if part.log.exists() else []
            if found and found[-1] == epoch.decode():
                return part
        return None


def engine_of(worker: str) -> str:
    """Name of the first engine that a worker has."""
    return f"engine-{worker}"


def router_of(worker: str) -> str:
    """Name of the router that a worker of several engines has."""
    return f"router-{worker}"
