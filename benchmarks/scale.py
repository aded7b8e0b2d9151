"""Does the queue cost more when it is long? Admit, lease, commit and cut, with few and with many jobs and groups.

The verbs run against a real Redis, AOF with fsync every second. Two ladders: 10^3 ... 10^6 queued jobs beside 10^2
buffered groups, and 10^2 ... 10^5 buffered groups beside 10^3 queued jobs. On every rung the system turns over at
constant size: a cycle admits 32 jobs, leases and commits the 32 oldest (8 samples each), cuts a batch of 32 groups,
commits it, seals and sweeps it. Costs are Redis' own microseconds inside the verb (``INFO commandstats``), so that
neither Python nor the socket hides a slope; the median over the cycles counts. ``plan`` is the buffer's own work in
Python for one cut of 32 groups.

``slowdown_max``: the largest cost of a verb on any rung over its cost on the first rung of that ladder.

    python -m benchmarks.scale --json FILE
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import redis
import typer

from benchmarks.common import Report, median, redis_server, run_cli, versions
from penstock import scripts
from penstock.connect import connect
from penstock.keys import Keys
from penstock.messages import Job, SampleMeta, pack
from penstock.scripts import Call, Leadership

MODEL, SUB, OWNER, WORKER = "policy", "actor", "bench-trainer", "bench-worker"
SAMPLES, GROUPS_PER_BATCH, TOKENS = 8, 32, 2560
#: Jobs of one admit, and calls in flight, while a ladder is climbed.
FILL_JOBS, FILL_CALLS = 500, 16
VERBS = ("admit", "lease", "commit", "cut")


@dataclass(slots=True)
class Queue:
    """A run with one driving subscription, and the state of those who work on it."""

    client: redis.Redis
    keys: Keys
    lead: Leadership
    revision: int
    gen: int
    #: Jobs admitted, leased and batches cut so far.
    admitted: int = 0
    leases: int = 0
    batches: int = 0
    #: Groups that are ready, oldest first.
    ready: list[str] = field(default_factory=list)


def open_queue(client: redis.Redis) -> Queue:
    """A fresh run whose gate stands wide open, with leadership and ownership taken for an hour."""
    keys = Keys("bench")
    for name in ("admit", "lease", "commit", "keep"):  # pipelines do not load what is missing
        client.script_load(scripts.script(name).text)
    scripts.ensure_lanes(client, keys)
    definition: dict[str, scripts.Value] = {
        "model": MODEL, "lanes": "train", "reuse": 1, "bound": 0, "gb": 2**40, "sampler": "fifo", "mode": "async",
    }  # fmt: skip
    revision = scripts.run(client, scripts.subscribe(keys, SUB, definition))
    joined = scripts.run(client, scripts.join(keys, SUB, OWNER, 3_600_000))
    epoch = scripts.run(client, scripts.lead(keys, "bench-leader", 3_600_000))
    return Queue(client, keys, Leadership(epoch, "bench-leader"), revision, joined.gen)


def admit(queue: Queue, count: int) -> Call[scripts.Admission]:
    """Admit the next ``count`` jobs: a prompt of 64 token ids, a label, a sampling section."""
    jobs = []
    for index in range(queue.admitted, queue.admitted + count):
        job = Job(id=f"bench/0/{index}", n=SAMPLES, prompt_ids=PROMPT, label="42", sampling=SAMPLING)
        jobs.append((job, pack({**BODY, "id": job.id})))
    position = queue.admitted
    queue.admitted += count
    return scripts.admit(
        queue.keys, jobs, lane="train", source="bench", position=position, model=MODEL, gate=(queue.revision, [SUB])
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
        num_generated=TOKENS - 64, loss_by_version=[[1, TOKENS - 64]], oldest=1, newest=1, reward=1.0,
        status="completed", finish_reason="stop", worker=WORKER,
    )  # fmt: skip
    record = meta.to_bytes()
    return scripts.commit(queue.keys, held.job, held.token, [(k, 1, record) for k in range(SAMPLES)])


def cut(queue: Queue, jobs: list[str]) -> Call[scripts.Cut]:
    """Cut a batch; its manifest has the size of a real one."""
    queue.batches += 1
    manifest = b"m" * (GROUPS_PER_BATCH * SAMPLES * 280)
    return scripts.cut(
        queue.keys, queue.lead, SUB, revision=queue.revision, n=queue.batches, manifest=manifest, digest="d",
        consumes=len(jobs), model=MODEL, version=0, oldest_allowed=-1, jobs=jobs,
    )  # fmt: skip


def cycle(queue: Queue, costs: dict[str, list[float]]) -> None:
    """Admit 32 jobs, lease and commit the oldest 32, cut and retire the oldest 32 groups; adds the costs in us."""
    client, keys, size = queue.client, queue.keys, GROUPS_PER_BATCH
    with cost_of("admit", costs, client, size):
        scripts.run(client, admit(queue, size))
    with cost_of("lease", costs, client, size):
        held = scripts.run(client, lease(queue, size))
    with cost_of("commit", costs, client, size):
        for one in held:
            scripts.run(client, commit(queue, one))
    queue.ready += [one.job for one in held]
    scripts.run(client, scripts.keep(keys, queue.lead, [(one.job, SAMPLES) for one in held]))
    jobs, queue.ready = queue.ready[:size], queue.ready[size:]
    with cost_of("cut", costs, client, size):
        done = scripts.run(client, cut(queue, jobs))
    if len(held) != size or done.outcome != "cut":
        raise SystemExit(f"The cycle broke: {len(held)} of {size} jobs leased, cut says {done}.")
    with cost_of("retire", costs, client, size):
        retire(queue, jobs)


def retire(queue: Queue, jobs: list[str]) -> None:
    """Commit the batch, declare it durable, seal and sweep its groups."""
    client, keys, n = queue.client, queue.keys, queue.batches
    gen = queue.gen
    scripts.run(client, scripts.commit_batch(keys, SUB, owner=OWNER, gen=gen, n=n, digest="d", rank=0, ranks=1))
    scripts.run(client, scripts.checkpointed(keys, SUB, owner=OWNER, gen=gen, n=n))
    sealed = scripts.run(client, scripts.seal(keys, queue.lead, revision=queue.revision, subs=[SUB], jobs=jobs))
    if sealed != jobs:
        raise SystemExit(f"The cycle broke: {len(jobs)} groups to retire, seal says {sealed}.")
    scripts.run(client, scripts.sweep(keys, queue.lead, [(job, SAMPLES) for job in jobs]))
    client.xdel(keys.batches(SUB), f"{n}-0")
    client.xtrim(keys.samples, maxlen=0)


@contextmanager
def cost_of(verb: str, costs: dict[str, list[float]], client: redis.Redis, items: int) -> Iterator[None]:
    """Redis' own time inside scripts, in us per item."""
    client.config_resetstat()
    yield
    stats: Any = client.info("commandstats")
    spent = sum(value["usec"] for name, value in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))
    costs.setdefault(verb, []).append(spent / items)


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
    """Make ``total`` ready groups through the verbs: admit as many jobs, lease and commit the oldest."""
    for first in range(0, total, FILL_JOBS):
        step = min(FILL_JOBS, total - first)
        scripts.run(queue.client, admit(queue, step))
        held = scripts.run(queue.client, lease(queue, step))
        with queue.client.pipeline(transaction=False) as pipe:
            for one in held:
                call = commit(queue, one)
                pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
            pipe.execute()
        scripts.run(queue.client, scripts.keep(queue.keys, queue.lead, [(one.job, SAMPLES) for one in held]))
        queue.ready += [one.job for one in held]
    queue.client.xtrim(queue.keys.samples, maxlen=0)


def settle(client: redis.Redis) -> int:
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
    row: dict[str, Any] = {"ladder": ladder, "jobs": jobs, "groups": len(queue.ready), "memory_bytes": memory}
    return row | {f"{verb}_us": median(values) for verb, values in costs.items()}


def climb(
    client: redis.Redis, most_jobs: int, most_groups: int, cycles: int
) -> tuple[list[dict[str, Any]], float, float]:
    """Both ladders; the rows, bytes per queued job, bytes per buffered group."""
    client.flushall()
    queue = open_queue(client)
    rows = []
    fill_jobs(queue, 1000)
    for groups in tens(100, most_groups):
        fill_groups(queue, groups - len(queue.ready))
        rows.append(rung(queue, cycles, "groups", 1000))
    group_bytes = slope(rows, "groups")
    client.flushall()
    queue = open_queue(client)
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
        for verb in (*VERBS, "retire"):
            costs = [row[f"{verb}_us"] for row in steps]
            found[f"{verb}/{ladder}"] = max(costs) / costs[0]
    return found


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    jobs: Annotated[int, typer.Option(help="Most queued jobs.")] = 1_000_000,
    groups: Annotated[int, typer.Option(help="Most buffered groups.")] = 100_000,
    cycles: Annotated[int, typer.Option(help="Measured cycles on each rung.")] = 25,
) -> None:
    """Cost of admit, lease, commit and cut with few and with many queued jobs and buffered groups."""
    with redis_server() as url, connect(url, timeout_s=120.0) as client:
        rows, job_bytes, group_bytes = climb(client, jobs, groups, cycles)
        seen_versions = versions(client)
    each = slowdowns(rows)
    names = {"jobs": "queued jobs", "groups": "groups", **{f"{verb}_us": f"{verb} us" for verb in (*VERBS, "retire")}}
    Report(
        title="scale: Redis' time per job or group in each verb",
        columns={"ladder": "ladder", **names},
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
            f"A group: its state and the metadata of {SAMPLES} samples; payloads come on top "
            f"({9 * TOKENS:,} bytes for a sample of {TOKENS} tokens).",
        ],
    ).finish(json_file)


if __name__ == "__main__":
    run_cli(main)
