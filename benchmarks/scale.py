"""Does the queue cost more when it is long? Admit, lease, commit and cut, with few and with many jobs and groups.

The verbs run against a real Redis, AOF with fsync every second, and the real state and cutter of the buffer. Two
ladders: 10^3 ... 10^6 queued jobs beside 10^2 buffered groups, and 10^2 ... 10^5 buffered groups beside 10^3 queued
jobs. On every rung the system turns over at constant size: a cycle admits 32 jobs, leases and commits the 32 oldest (8
samples each), takes them into the buffer, cuts a batch of 32 groups, commits it, seals and sweeps it. Costs are per job
or group, the median over the cycles:

    admit, lease, commit, cut, retire   Redis' own time inside the scripts (``INFO commandstats``), in us, so that
                                        neither Python nor the socket hides a slope
    ingest, buffer's cut                time on the clock in the buffer's Python, Redis included, in us

``slowdown_max``: the largest cost on any rung over that on the first rung of its ladder.

    python -m benchmarks.scale --json FILE
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, median, redis_server, versions
from penstock.buffer.cutter import Cutter
from penstock.buffer.payload_servers import PayloadServers
from penstock.buffer.retire import Retirement
from penstock.buffer.state import State
from penstock.config import RedisConfig
from penstock.protocol import scripts
from penstock.protocol.scripts import Call, Leadership
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample_meta import SampleMeta
from penstock.redis.commands import Client
from penstock.redis.connect import connect

MODEL, SUB, OWNER, WORKER = "policy", "actor", "bench-trainer", "bench-worker"
SAMPLES, GROUPS_PER_BATCH, TOKENS = 8, 32, 2560
#: Jobs of one admit, and calls in flight, while a ladder is climbed.
FILL_JOBS, FILL_CALLS = 500, 16
#: Column -> heading of every cost.
COSTS = {
    "admit_us": "admit",
    "lease_us": "lease",
    "commit_us": "commit",
    "cut_us": "cut",
    "retire_us": "retire",
    "ingest_wall_us": "ingest",
    "cut_wall_us": "buffer's cut",
}


@dataclass(slots=True)
class Queue:
    """A run with one driving subscription, and the state of those who work on it."""

    client: Client
    keys: Keys
    lead: Leadership
    gen: int
    #: What the buffer remembers, and what cuts from it.
    state: State
    cutter: Cutter
    #: Jobs admitted, leased and batches cut so far.
    admitted: int = 0
    leases: int = 0
    batches: int = 0

    @property
    def size(self) -> int:
        """Groups that are ready and uncut."""
        return len(self.state.subs[SUB].pool)


def open_queue(client: Client, url: str) -> Queue:
    """A fresh run at version 1, its gate wide open, with leadership and ownership taken for an hour."""
    keys = Keys("bench")
    for name in ("admit", "lease", "commit"):  # pipelines do not load what is missing
        client.script_load(scripts.script(name).text)
    scripts.ensure_lanes(client, keys)
    definition: dict[str, scripts.Value] = {
        "model": MODEL, "lanes": "train", "reuse": 1, "bound": 4, "gb": 2**40, "sampler": "oldest_version",
        "mode": "async", "on_expiry": "mask", "size": GROUPS_PER_BATCH, "per_version": 10**9, "driving": 1,
    }  # fmt: skip
    scripts.run(client, scripts.subscribe(keys, SUB, definition))
    joined = scripts.run(client, scripts.join(keys, SUB, OWNER, 3_600_000))
    first = scripts.publish(
        keys, SUB, owner=OWNER, gen=joined.gen, model=MODEL, version=1, through=0, step=0, record=b""
    )
    scripts.run(client, first)
    lead = Leadership(scripts.run(client, scripts.lead(keys, "bench-leader", 3_600_000)), "bench-leader")
    state = State(client, keys, PayloadServers(RedisConfig(url=url), client), lead)
    state.load()
    return Queue(client, keys, lead, joined.gen, state, Cutter(client, keys, lead, state))


def admit(queue: Queue, count: int) -> Call[scripts.Admission]:
    """Admit the next ``count`` jobs: a prompt of 64 token ids, a label, a sampling section."""
    jobs = []
    for index in range(queue.admitted, queue.admitted + count):
        job = Job(id=f"bench/0/{index}", n=SAMPLES, prompt_ids=PROMPT, label="42", sampling=SAMPLING)
        jobs.append((job, pack({**BODY, "id": job.id})))
    position = queue.admitted
    queue.admitted += count
    return scripts.admit(
        queue.keys,
        jobs,
        lane="train",
        source="bench",
        position=position,
        model=MODEL,
        gate=(queue.state.revision, [SUB]),
    )


PROMPT = list(range(1000, 1064))
SAMPLING = {"max_new_tokens": TOKENS, "temperature": 1.0}
BODY = {"id": "", "n": SAMPLES, "prompt_ids": PROMPT, "label": "42", "sampling": SAMPLING, "lane": "train"}


def lease(queue: Queue, count: int) -> Call[list[scripts.RawLease]]:
    queue.leases += 1
    return scripts.lease(queue.keys, WORKER, f"{WORKER}.{queue.leases}", most=count, version=1)


def commit(queue: Queue, held: scripts.RawLease) -> Call[scripts.Committed]:
    """All samples of a job at once."""
    meta = SampleMeta(
        k=0, token=held.token, server="control", checksum=1, num_bytes=9 * TOKENS, length=TOKENS, prompt_length=64,
        num_generated=TOKENS - 64, temperature=1.0, loss_by_version=[[1, TOKENS - 64]], oldest=1, newest=1, reward=1.0,
        status="completed", finish_reason="stop", worker=WORKER,
    )  # fmt: skip
    record = meta.to_bytes()
    return scripts.commit(queue.keys, held.job, held.token, [(k, 1, record) for k in range(SAMPLES)])


def write_payloads(client: Client, keys: Keys, leases: list[scripts.RawLease]) -> None:
    """One byte for each sample: the buffer asks whether payloads are there, not what they hold."""
    with client.pipeline(transaction=False) as pipe:
        for held in leases:
            for k in range(SAMPLES):
                pipe.set(keys.payload(f"{held.job}/{k}", held.token), b"p", nx=True, ex=86400)
        pipe.execute()


def cycle(queue: Queue, costs: dict[str, list[float]]) -> None:
    """Admit 32 jobs, lease, commit and ingest the oldest 32, cut and retire the oldest 32 groups; adds the costs."""
    client, keys, size = queue.client, queue.keys, GROUPS_PER_BATCH
    with cost_of("admit", costs, client, size):
        scripts.run(client, admit(queue, size))
    with cost_of("lease", costs, client, size):
        held = scripts.run(client, lease(queue, size))
    write_payloads(client, keys, held)
    with cost_of("commit", costs, client, size):
        for one in held:
            scripts.run(client, commit(queue, one))
    with wall_of("ingest", costs, size):
        queue.state.ingest([one.job for one in held])
    queue.batches += 1
    with cost_of("cut", costs, client, size), wall_of("cut", costs, size):
        why = queue.cutter.try_cut(queue.state.subs[SUB])
    if len(held) != size or why:
        raise SystemExit(f"The cycle broke: {len(held)} of {size} jobs were leased, and the cut waits for {why!r}.")
    with cost_of("retire", costs, client, size):
        retire(queue)


def retire(queue: Queue) -> None:
    """Commit the batch, declare it durable, seal and sweep its groups."""
    client, keys, n, gen, state = queue.client, queue.keys, queue.batches, queue.gen, queue.state
    entry: Any = client.xrange(keys.batches(SUB), f"{n}-0", f"{n}-0")
    digest = entry[0][1][b"dg"].decode()
    scripts.run(client, scripts.commit_batch(keys, SUB, owner=OWNER, gen=gen, n=n, digest=digest, rank=0, ranks=1))
    scripts.run(client, scripts.checkpointed(keys, SUB, owner=OWNER, gen=gen, n=n))
    state.refresh()
    retirement = Retirement(client, keys, PayloadServers(RedisConfig(), client), queue.lead, state)
    sealed, swept = retirement.seal(), retirement.sweep()
    if not sealed == swept == GROUPS_PER_BATCH:
        raise SystemExit(f"The cycle broke: {sealed} of {GROUPS_PER_BATCH} groups were sealed, {swept} swept.")
    client.xtrim(keys.batches(SUB), minid=f"{n}-0", approximate=False)
    client.xtrim(keys.samples, maxlen=0)


@contextmanager
def cost_of(verb: str, costs: dict[str, list[float]], client: Client, items: int) -> Iterator[None]:
    """Redis' own time inside scripts, in us per item."""
    client.config_resetstat()
    yield
    stats: Any = client.info("commandstats")
    spent = sum(value["usec"] for name, value in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))
    costs.setdefault(f"{verb}_us", []).append(spent / items)


@contextmanager
def wall_of(what: str, costs: dict[str, list[float]], items: int) -> Iterator[None]:
    """Time on the clock, in us per item."""
    began_s = time.perf_counter()
    yield
    costs.setdefault(f"{what}_wall_us", []).append(1e6 * (time.perf_counter() - began_s) / items)


def pipelined(queue: Queue, total: int, make: Callable[[int], list[Call[Any]]]) -> None:
    """Send the calls that ``make`` gives for up to FILL_JOBS jobs at a time, several at once, until ``total``."""
    done = 0
    while done < total:
        with queue.client.pipeline(transaction=False) as pipe:
            for _ in range(FILL_CALLS):
                step = min(FILL_JOBS, total - done)
                for call in make(step) if step else []:
                    pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
                done += step
            pipe.execute()


def fill_jobs(queue: Queue, total: int) -> None:
    """Admit ``total`` jobs through the verb itself."""
    pipelined(queue, total, lambda step: [admit(queue, step)])


def fill_groups(queue: Queue, total: int) -> None:
    """Make ``total`` groups ready through the verbs: admit as many jobs, lease and commit the oldest, ingest."""
    for first in range(0, total, FILL_JOBS):
        step = min(FILL_JOBS, total - first)
        scripts.run(queue.client, admit(queue, step))
        held = scripts.run(queue.client, lease(queue, step))
        write_payloads(queue.client, queue.keys, held)
        with queue.client.pipeline(transaction=False) as pipe:
            for one in held:
                call = commit(queue, one)
                pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
            pipe.execute()
        queue.state.ingest([one.job for one in held])
    queue.client.xtrim(queue.keys.samples, maxlen=0)


def settle(client: Client) -> int:
    """Wait until no rewrite of the AOF runs beside the measurement; returns bytes of memory used."""
    deadline = time.monotonic() + 120
    while client.info("persistence")["aof_rewrite_in_progress"]:
        if time.monotonic() > deadline:
            raise SystemExit("Redis has rewritten its AOF for 120 s; give the benchmark a faster disk.")
        time.sleep(0.05)
    return int(client.info("memory")["used_memory"])


def rung(queue: Queue, cycles: int, ladder: str, jobs: int) -> dict[str, Any]:
    """Costs at the present size; the first cycles warm caches and do not count."""
    memory = settle(queue.client)
    costs: dict[str, list[float]] = {}
    for _ in range(3):
        cycle(queue, {})
    for _ in range(cycles):
        cycle(queue, costs)
    row: dict[str, Any] = {"ladder": ladder, "jobs": jobs, "groups": queue.size, "memory_bytes": memory}
    return row | {name: median(values) for name, values in costs.items()}


def climb(
    client: Client, url: str, most_jobs: int, most_groups: int, cycles: int
) -> tuple[list[dict[str, Any]], float, float]:
    """Both ladders; the rows, bytes per queued job, bytes per buffered group."""
    client.flushall()
    queue = open_queue(client, url)
    rows = []
    fill_jobs(queue, 1000)
    for groups in tens(100, most_groups):
        fill_groups(queue, groups - queue.size)
        rows.append(rung(queue, cycles, "groups", 1000))
    group_bytes = slope(rows, "groups")
    client.flushall()
    queue = open_queue(client, url)
    fill_jobs(queue, 1000)
    fill_groups(queue, 100)
    by_jobs: list[dict[str, Any]] = []
    for jobs in tens(1000, most_jobs):
        fill_jobs(queue, jobs - (by_jobs[-1]["jobs"] if by_jobs else 1000))
        by_jobs.append(rung(queue, cycles, "jobs", jobs))
    return rows + by_jobs, slope(by_jobs, "jobs"), group_bytes


def tens(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 10


def slope(rows: list[dict[str, Any]], what: str) -> float:
    """Bytes of memory per further item between the first and the last rung."""
    return float((rows[-1]["memory_bytes"] - rows[0]["memory_bytes"]) / max(1, rows[-1][what] - rows[0][what]))


def slowdowns(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Ladder and verb -> largest cost on the ladder over the cost on its first rung."""
    found = {}
    for ladder in ("jobs", "groups"):
        steps = [row for row in rows if row["ladder"] == ladder]
        for column, name in COSTS.items():
            costs = [row[column] for row in steps]
            found[f"{name}/{ladder}"] = max(costs) / costs[0]
    return found


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    jobs: Annotated[int, typer.Option(help="Most queued jobs.")] = 1_000_000,
    groups: Annotated[int, typer.Option(help="Most buffered groups.")] = 100_000,
    cycles: Annotated[int, typer.Option(help="Measured cycles on each rung.")] = 25,
) -> None:
    """Cost of admit, lease, commit and cut with few and with many queued jobs and buffered groups."""
    with redis_server() as url, connect(url, timeout_s=120.0) as client:
        rows, job_bytes, group_bytes = climb(client, url, jobs, groups, cycles)
        seen_versions = versions(client)
    each = slowdowns(rows)
    Report(
        title="scale: us per job or group; admit to retire are Redis' own time, the last two the buffer's on the clock",
        columns={"ladder": "ladder", "jobs": "queued jobs", "groups": "groups", **COSTS},
        rows=rows,
        keys={
            "slowdown_max": max(each.values()),
            "slowdown": each,
            "bytes_per_job": job_bytes,
            "bytes_per_group": group_bytes,
        },
        versions=seen_versions,
        notes=[
            f"A job: a prompt of {len(PROMPT)} token ids, {len(pack(BODY))} bytes as a record.",
            f"A group: its state and the metadata of {SAMPLES} samples and the keys of their payloads; "
            f"their bytes come on top ({9 * TOKENS:,} bytes for a sample of {TOKENS} tokens).",
        ],
    ).finish(json_file)


if __name__ == "__main__":
    execute(main)
