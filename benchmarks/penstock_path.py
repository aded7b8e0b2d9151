"""The leg of ``trajectory_path`` that goes through penstock: its own processes, verbs, buffer and trainer client.

    writer:  lease ─> an engine whose answers are JSON bytes that are there already, read by the worker's
             own ``generate_sample``; each sample goes to ``Commits`` by itself as it ends: pack, SET NX EX of its
             payload, fenced commit; several writers share the jobs as workers do
    buffer:  ``penstock buffer``, a process of its own: payloads made permanent, batches of 64 groups, retirement
    reader:  Trainer: manifest, payloads, checks, ``padded`` torch tensors of the fields that the other legs carry,
             commit; a checkpoint every 4 batches; every subscription is a process that reads every group

Jobs are admitted and the first version is published before the clock starts. Payloads lie in Redis. No text is decoded:
no leg has rewards, the only readers of it.
"""

import asyncio
import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import orjson
import uvloop

from benchmarks.answers import Answers, tag_of
from benchmarks.bench_run import DATASET, admit, make_config, part
from benchmarks.common import run_together
from penstock.config import Config, EngineConfig, ModelConfig, RolloutConfig
from penstock.protocol import scripts
from penstock.protocol.waits import Waiting
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.redis.commands import Client
from penstock.redis.connect import connect
from penstock.redis.control import AsyncControl, Control
from penstock.system.garbage_collection import settle
from penstock.workers.jobs.commits import Commits
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.engine import SglangEngine

GROUP = 8
BATCH_GROUPS = 64
#: Groups leased at once, and how many such turns overlap.
LEASED = 8
AT_ONCE = 2
#: What the other legs carry too: ids, logprobs, a mask, versions.
KEYS = ("tokens", "logprobs", "loss_mask", "versions")
#: Batches per checkpoint of the reader.
CHECKPOINT_EVERY = 4


class AnsweredEngine(SglangEngine):
    """A client of an engine that has every answer already."""

    def __init__(self, answers: Answers, folder: Path) -> None:
        config = EngineConfig(url="http://127.0.0.1:1")
        super().__init__(config, ModelConfig(path=str(folder)), name="bench", log_dir=folder)
        self._answers = answers
        self.info = replace(self.info, reports_spans=True)
        self._set_version(1)

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None, *_: Any, **options: Any) -> Any:
        """Read the answer's bytes as ``EngineHttp.call`` does."""
        await asyncio.sleep(0)
        index, k = body["rid"].partition(":")[0].split("/")[-2:] if body else ("", "")
        return orjson.loads(self._answers.body(int(index) * GROUP + int(k)))


class NoTokenizer:
    """Decodes nothing."""

    eos_token_id: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError("All prompts are token ids.")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return ""


@dataclass(slots=True)
class Writing:
    """Make and commit the samples of one writer."""

    commits: Commits
    source: Source

    async def write_group(self, held: scripts.RawLease) -> None:
        job = Job.from_bytes(held.body)
        await asyncio.gather(*(self._write_sample(job, k, held.token) for k in range(job.n)))

    async def _write_sample(self, job: Job, k: int, token: str) -> None:
        sample = await generate_sample(self.source, Sample(job, k))
        sample.reward = float(k % 2)
        done = await self.commits.submit(job.id, token, [sample], 1.0, "scaled")
        if done.outcome not in ("committed", "ready"):
            raise RuntimeError(f"The commit of {job.id} answered {done}.")


def writer(barrier: Barrier, *, config_file: str, share: "Share", tokens: int) -> "Part":
    """Lease, generate and commit this writer's share of the groups."""
    settle()  # as the parts do (penstock.console.cli.main)
    return uvloop.run(_write(barrier, load(config_file), share, Answers(tokens)))


async def _write(barrier: Barrier, config: Config, share: "Share", answers: Answers) -> "Part":
    url, keys = str(config.redis.url), Keys(config.run)
    sync = Control(url)
    control = await AsyncControl(url).open()
    name = f"bench{share.index}"
    commits = Commits(config, keys, control, Waiting(), name)
    sampling = {"max_new_tokens": answers.length, "ignore_eos": True, "temperature": 1.0}
    rollout = RolloutConfig(sampling=sampling, max_context_tokens=answers.length + len(answers.prompt))
    writing = Writing(commits, Source(AnsweredEngine(answers, config.run_dir), Valves(), NoTokenizer(), rollout))
    barrier.wait()  # the subscriptions are there, and version 1
    if share.index == 0:
        jobs = [Job(f"{DATASET}/0/{i}", GROUP, prompt_ids=answers.prompt) for i in range(share.groups * share.of)]
        admit(sync, config, jobs, position=0)
    barrier.wait()
    began_s, cpu_s = time.monotonic(), time.process_time()
    turns = iter(range(share.groups // LEASED))

    async def work() -> None:
        for turn in turns:
            leases = await control.call(scripts.lease(keys, name, f"{name}.{turn}", most=LEASED, version=1))
            await asyncio.gather(*(writing.write_group(held) for held in leases))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    done = Part(began_s, {"writer": time.process_time() - cpu_s})
    await commits.close()
    await control.close()
    return done


def reader(barrier: Barrier, *, config_file: str, groups: int, name: str, pids: dict[str, int]) -> "Part":
    """Train nothing: batches to tensors, commit, checkpoint. ``pids``: of processes beside it whose CPU time is told.

    The reader of the run's own subscription drives; ``name`` of another makes one that reads beside it.
    """
    import torch

    from penstock.consumers.trainer import Trainer

    torch.set_num_threads(1)
    settle()  # as the parts do (penstock.console.cli.main)
    seen: list[int] = []
    config = load(config_file)
    client = connect(str(config.redis.url))
    drives = name == config.trainer.name
    with Trainer(config, name=name, prefetch=1, subscription={"driving": drives}) as trainer:
        if drives:
            trainer.publish({"weight": torch.zeros(1)})
        barrier.wait()
        barrier.wait()
        before = cpu_s_of_all(client, pids)
        for _ in range(groups // BATCH_GROUPS):
            batch = trainer.next(timeout=60)
            data = batch.padded(keys=KEYS)
            ended_s = time.monotonic()
            seen.extend(tag_of(data["tokens"]).tolist())
            trainer.commit(batch)
            if batch.n % CHECKPOINT_EVERY == 0:
                trainer.state_dict()
                trainer.checkpointed()
        after = cpu_s_of_all(client, pids)
        recorded = groups_recorded(client, Keys(config.run))
    return Part(ended_s, {name: after[name] - before[name] for name in before}, seen, recorded)


def load(config_file: str) -> Config:
    return Config.model_validate(json.loads(Path(config_file).read_text()))


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several writers does."""

    index: int
    of: int
    #: Groups that it commits.
    groups: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one process of a round says."""

    #: When the writer began, or the reader had the last tensor (monotonic seconds).
    at_s: float
    #: Process -> CPU seconds it took.
    cpu_s: dict[str, float]
    #: Tags of the samples that came.
    seen: list[int] = field(default_factory=list)
    #: Groups that a recorder had recorded by then; without one, those that were done with.
    recorded: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One measured round."""

    #: From the first lease to the last tensor of the last reader.
    seconds: float
    #: Tags of the samples that came, of each reader.
    seen: list[list[int]]
    #: Process -> CPU time it took, in us per sample; writers together, and readers. What limits when there are fewer
    #: cores than processes.
    cpu_us: dict[str, float]
    #: Groups that a recorder had recorded at the end; without one, those that were done with.
    recorded: int


def run(
    url: str,
    groups: int,
    tokens: int,
    *,
    writers: int = 1,
    subscriptions: int = 1,
    history: bool = False,
) -> Round:
    """Measure one round; ``history``: beside a recorder. Blocks."""
    if groups % BATCH_GROUPS or groups % (LEASED * writers):
        raise SystemExit(
            f"--groups must be a multiple of {BATCH_GROUPS} and of {LEASED} for each of {writers} writers: "
            "readers take whole batches, writers whole leases."
        )
    empty(url)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        (Path(name) / "model").mkdir()
        (Path(name) / "model" / "config.json").write_text("{}")
        config = make_config(
            url,
            Path(name),
            redis={"url": url},
            trainer={"batch_groups": BATCH_GROUPS, "batches_per_version": 1_000_000},
        )
        config_file = Path(name) / "config.json"
        config_file.write_text(config.model_dump_json())
        with contextlib.ExitStack() as parts_beside:
            pids = {
                name: parts_beside.enter_context(part(config, name)) for name in ("buffer", "recorder")[: 1 + history]
            }
            if history:
                until_recording(url, Keys(config.run))
            parts = run_together(
                _writers(str(config_file), groups, writers, {"tokens": tokens})
                | _readers(config, str(config_file), groups, subscriptions, pids)
            )
    return _round(parts, groups * GROUP)


def until_recording(url: str, keys: Keys) -> None:
    """Wait for the run's first recorder, from which on it keeps a history."""
    with connect(url) as client:
        deadline = time.monotonic() + 60
        while not client.exists(keys.recorder):
            if time.monotonic() > deadline:
                raise SystemExit("The recorder did not start within 60 s; the leg has no figure.")
            time.sleep(0.05)


def empty(url: str) -> None:
    """Every round begins with an empty server and an empty append-only file. Blocks."""
    client = connect(url)
    client.flushall()
    client.bgrewriteaof()
    while client.info("persistence")["aof_rewrite_in_progress"]:
        time.sleep(0.05)


def _writers(config_file: str, groups: int, count: int, arguments: dict[str, Any]) -> dict[str, Any]:
    shares = [Share(i, count, groups // count) for i in range(count)]
    return {f"writer{one.index}": (writer, {"config_file": config_file, "share": one, **arguments}) for one in shares}


def _readers(config: Config, config_file: str, groups: int, count: int, pids: dict[str, int]) -> dict[str, Any]:
    names = [config.trainer.name, *(f"copy{i}" for i in range(1, count))]
    both = {"config_file": config_file, "groups": groups, "pids": pids}
    return {f"reader{i}": (reader, {**both, "name": name}) for i, name in enumerate(names)}


def _round(parts: "dict[str, Part]", samples: int) -> Round:
    writers = [one for name, one in parts.items() if name.startswith("writer")]
    readers = [one for name, one in parts.items() if name.startswith("reader")]
    cpu_s = {
        "writer": sum(one.cpu_s["writer"] for one in writers),
        "reader": sum(one.cpu_s["reader"] for one in readers),
        # What the others took meanwhile, as one reader saw it.
        **{name: value for name, value in parts["reader0"].cpu_s.items() if name != "reader"},
    }
    return Round(
        max(one.at_s for one in readers) - min(one.at_s for one in writers),
        [one.seen for one in readers],
        {name: 1e6 * value / samples for name, value in cpu_s.items()},
        parts["reader0"].recorded,
    )


def groups_recorded(client: Client, keys: Keys) -> int:
    """Groups that a checkpoint covers and that wait for no recorder."""
    return int(client.hget(keys.counters, "retired") or 0) - client.zcard(keys.unrecorded)


def cpu_s_of_all(client: Client, pids: dict[str, int]) -> dict[str, float]:
    """CPU seconds so far of Redis, of these processes, and of this one, the reader."""
    others = {name: cpu_s_of(pid) for name, pid in pids.items()}
    return {"redis": cpu_s_of_redis(client), "reader": time.process_time()} | others


def cpu_s_of(pid: int) -> float:
    """CPU seconds so far of a process and its running descendants, their threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return own_s + sum(map(cpu_s_of, children))


def cpu_s_of_redis(client: Any) -> float:
    """CPU seconds so far of a server, by its own account."""
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])
