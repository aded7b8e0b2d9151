"""`penstock why` on real processes in each state that holds a run up: the chain's last link is the cause.

Redis, buffer, producer and worker are processes, which are really killed, filled and paused; the engine is one that
misbehaves on demand, and the trainer runs in a thread. States as the parts write them: integration/test_why_causes.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig
from penstock.console.cli.main import execute
from penstock.consumers.trainer import Trainer
from penstock.errors import PenstockError, WaitTimeout
from penstock.records.cause import Cause
from penstock.records.causes import JobsFailing, PayloadServersAway
from penstock.records.publication import Publication
from penstock.records.worker_causes import (
    CrashSuspects,
    EngineCrashLoop,
    EngineSilent,
    LanePaused,
    NoPart,
    PartGone,
    RedisDiskFull,
    RedisFull,
    TrainerGone,
)
from penstock.redis.server import RedisServer
from tests.integration.parts import kill, until
from tests.integration.small_disk import SmallDisk, small_disk
from tests.integration.storage_parts import PartProcess, Parts, parts
from tests.integration.storage_rig import Rig, rig
from tests.integration.worker_play import IDS

__all__ = ["parts", "small_disk"]

Disks = Callable[[str, int], SmallDisk]

ALL = ("buffer", "producer", "worker")
#: Longest wait of the trainer for one batch, so that it ends with the test.
NEXT_S = 5.0
#: An engine that is soon tried again, and whose failures are soon a crash loop.
QUICK = {"restart_wait_s": 0.01, "crash_loop_failures": 3, "health_interval_s": 0.1}
SEVERAL_STARTS = {"restart_wait_s": 0.1, "crash_loop_failures": 1000}


class World:
    """A run, as far as its parts are started, and what may happen to it."""

    def __init__(self, run: Rig, payloads: RedisServer, disk: SmallDisk | None, capsys: Any) -> None:
        self.run, self.payloads, self.disk = run, payloads, disk
        self._capsys = capsys
        self.parts: dict[str, PartProcess] = {}
        self._trainer: Trainer
        self._ended = threading.Event()
        self._died: list[BaseException] = []

    @property
    def target(self) -> list[str]:
        return ["--run", self.run.keys.run, "--redis", self.run.server.url]

    def start(self, *names: str) -> None:
        for name in names:
            self.parts[name] = self.run.parts.start(name, self.run.config)

    def join(self) -> None:
        """A trainer that has published and asks for nothing."""
        self._trainer = Trainer(self.run.config).__enter__()
        self.run.publish(self._trainer)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """That trainer takes whatever comes."""
        thread = threading.Thread(target=self._train, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(400)
            kill(self._trainer, self.run.client, owner=False)
            assert self._died == []

    def _train(self) -> None:
        while not self._ended.is_set():
            try:
                batch = self._trainer.next(timeout=NEXT_S)
                self._trainer.commit(batch)
                self.run.publish(self._trainer, batch.n)
            except WaitTimeout:
                continue
            except PenstockError as exc:
                if not self._ended.is_set():
                    self._died.append(exc)
                return

    def why(self, waiter: str) -> dict[str, Any]:
        """The chain that a waiter is in, itself or the thread that reads its batches; {} where it waits for nothing."""
        self._capsys.readouterr()
        assert execute(["why", "--json", *self.target]) == 0
        chains = json.loads(self._capsys.readouterr().out)
        waiters = {waiter, f"{waiter}/reading"}
        return next((one for one in chains if waiters & {one["who"], *(link["who"] for link in one["then"])}), {})


def no_worker(world: World) -> None:
    world.join()
    world.start("buffer", "producer")


def engine_hung(world: World) -> None:
    world.run.fake.behaviour = dict.fromkeys(IDS.values(), "hang")
    world.join()
    world.start(*ALL)


def crash_loop(world: World) -> None:
    world.run.fake.behaviour = dict.fromkeys((0, *IDS.values()), "die")
    world.join()
    world.start(*ALL)


def gate_closed_by_a_dead_trainer(world: World) -> None:
    world.start(*ALL)
    code = (
        "import sys, safetensors.torch; from pathlib import Path; from penstock import Trainer\n"
        "with Trainer(config=Path(sys.argv[1])) as trainer:\n"
        "    trainer.publish(safetensors.torch.load_file(sys.argv[2]), step=0)\n"
        "    print('published', flush=True); sys.stdin.read()\n"
    )
    weights = Path(world.run.config.model.path) / "model.safetensors"
    argv = [sys.executable, "-c", code, str(world.parts["buffer"].config_path), str(weights)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "published\n"
        until(lambda: "producer" in str(world.why("producer").get("who")), "the gate to close")
        os.kill(trainer.pid, signal.SIGKILL)


def poison_prompt(world: World) -> None:
    """One prompt is answered, so that the weights are known to be good; engines die of all others."""
    prompts = Path(world.run.config.data.train[0].path)
    prompts.write_text('{"prompt": "b=", "label": "x"}\n' + prompts.read_text())
    fake = world.run.fake
    fake.behaviour = {IDS["a"]: "hang"}
    world.join()
    world.start(*ALL)
    world.run.until("completed", 1)
    fake.behaviour = {IDS["a"]: "die"}
    assert fake.loop is not None
    fake.loop.call_soon_threadsafe(fake.die)


def reward_that_raises(world: World) -> None:
    world.join()
    world.start(*ALL)


def redis_full(world: World) -> None:
    world.join()
    world.start("buffer", "worker")
    world.parts["worker"].until_says("SGLang")
    world.run.client.config_set("maxmemory", 1)
    world.start("producer")


def disk_full(world: World) -> None:
    world.join()
    world.start("buffer", "worker")
    assert world.disk is not None
    world.disk.fill()


def leader_gone(world: World) -> None:
    world.join()
    world.start(*ALL)
    world.parts["buffer"].until_says("leading in epoch")
    world.parts["buffer"].kill()


def producer_dead(world: World) -> None:
    world.join()
    world.start(*ALL)
    world.parts["producer"].until_says("prompts: ")
    world.run.until("admitted", 1)
    world.parts["producer"].kill()


def payload_server_dead(world: World) -> None:
    world.join()
    world.start(*ALL)
    world.run.until("completed", 10)
    world.payloads.kill()


def lane_paused(world: World) -> None:
    world.join()
    assert execute(["pause", "train", *world.target]) == 0
    world.start(*ALL)


@dataclass(frozen=True)
class Case:
    """What happens, in whose chain it is looked for, and how that ends."""

    happens: Callable[[World], None]
    cause: type[Cause]
    #: Who stands in the last link.
    last: str
    waiter: str = "trainer:actor"
    #: Fields of the cause; what is text is searched for a pattern.
    fields: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)


WORKER = r"worker:worker\.\w+"
RAISES = {"reward": {"function": "tests.integration.worker_parts:raises"}, "worker": {"max_attempts": 1}}
SLOW = {"request_timeout_s": 900.0}
CASES = [
    Case(no_worker, NoPart, "buffer:actor", fields={"component": "worker"}),
    Case(engine_hung, EngineSilent, f"{WORKER}:requests", fields={"sample": "d/0/"}, sections={"engine": SLOW}),
    Case(crash_loop, EngineCrashLoop, f"{WORKER}:engine", fields={"retry_s": 0.3}, sections={"engine": QUICK}),
    Case(
        gate_closed_by_a_dead_trainer,
        TrainerGone,
        "producer",
        waiter="producer",
        fields={"subscription": "actor"},
    ),
    Case(
        poison_prompt,
        CrashSuspects,
        f"{WORKER}:(engine|intake)",
        fields={"jobs": "d/0/"},
        sections={"engine": SEVERAL_STARTS},
    ),
    Case(reward_that_raises, JobsFailing, "producer", fields={"error": "ArithmeticError"}, sections=RAISES),
    Case(redis_full, RedisFull, "producer"),
    Case(disk_full, RedisDiskFull, "redis"),
    Case(leader_gone, PartGone, "trainer:actor", fields={"component": "buffer"}),
    Case(producer_dead, PartGone, "buffer:actor", fields={"component": "producer"}),
    # What is finished cannot be written, and what lies there cannot be read: whichever the trainer waits for.
    Case(
        payload_server_dead,
        PayloadServersAway,
        f"buffer:payloads|{WORKER}:commit|trainer:actor/reading",
        fields={"servers": "p1"},
    ),
    Case(lane_paused, LanePaused, "buffer:actor", fields={"lane": "train", "by": "operator .+"}),
]


def has(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a cause has these fields; a text, or one of several, is searched for the pattern."""
    return all(
        re.search(value, str(found[name])) if isinstance(value, str) else found[name] == value
        for name, value in wanted.items()
    )


@contextlib.contextmanager
def server(folder: Path) -> Iterator[RedisServer]:
    made = RedisServer(folder)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=[case.happens.__name__ for case in CASES])
def test_I8_the_last_link_of_a_real_run_is_the_cause(
    case: Case,
    parts: Parts,
    small_disk: Disks,
    model_config: ModelConfig,
    publications: list[Publication],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = small_disk("small", 64) if case.happens is disk_full else None
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(server(disk.path if disk is not None else tmp_path / "control"))
        payloads = stack.enter_context(server(tmp_path / "p1"))
        sections = {"redis": {"url": control.url, "payload_servers": {"p1": payloads.url}}, **case.sections}
        run = stack.enter_context(rig(control, parts, model_config, publications[1], tmp_path, **sections))
        world = World(run, payloads, disk, capsys)
        case.happens(world)
        if case.waiter == "trainer:actor":
            stack.enter_context(world.training())
        pids = {name: part.process.pid for name, part in world.parts.items() if part.process is not None}
        fields = dict(case.fields)
        if case.cause is PartGone:
            fields["pid"] = pids[fields["component"]]

        found: dict[str, Any] = {}

        def ends_so() -> bool:
            found.clear()
            found.update(world.why(case.waiter))
            return bool(found) and found["cause_name"] == case.cause.name and has(found["cause_fields"], fields)

        try:
            until(ends_so, f"the chain of {case.waiter} to end in {case.cause.name}")
        except AssertionError as exc:
            raise AssertionError(f"{exc}; it is {json.dumps(found, indent=1)}") from None

        last = (found["then"] or [found])[-1]["who"]
        assert re.fullmatch(case.last, last), found
        if disk is not None:
            disk.make_room()
        run.client.config_set("maxmemory", 0)
