"""Does a cut cost more when the buffer is full? Cut latency, ingest and memory at 10^3 ... 10^6 buffered samples.

The leader's real state and cutter on a real Redis, AOF with fsync every second. On every rung the buffer is filled with
complete groups of 8 samples (keys as commits leave them, payloads of one byte), which the leader takes in; then batches
of 32 groups are cut, each after 32 new groups, so that the size stays. At the first and at each later rung every other
sampler is tried too, by a subscription that comes late and is dropped again.

    cut_slowdown        largest median latency of a cut on any rung over that on the first, worst sampler
    ingest_per_s        samples per second that the leader takes in (metadata read, payloads made permanent), last rung
    bytes_per_sample    memory of the leader per buffered sample; Redis' own (without payload bytes) stands beside it

    python -m benchmarks.buffer --json FILE
"""

import gc
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, percentile, redis_server, versions
from benchmarks.scale import GROUPS_PER_BATCH, OWNER, SAMPLES, SUB, Queue, open_queue, settle
from penstock.protocol import scripts
from penstock.records.sample_meta import SampleMeta
from penstock.redis.commands import Client
from penstock.redis.connect import connect

TOKENS = 2560
#: Groups written per round trip.
CHUNK = 500
OTHERS = ("fifo", "newest_version", "uniform", "prioritized")


def records(index: int) -> bytes:
    """Metadata of one group, as eight commits leave it."""
    found = b""
    for k in range(SAMPLES):
        length = 64 + (index * 7919 + k * 104729) % TOKENS
        found += SampleMeta(
            k=k, token="t", server="control", checksum=1, num_bytes=9 * length, length=length, prompt_length=64,
            num_generated=length - 64, loss_by_version=[[1, length - 64]], oldest=1, newest=1, reward=float(k % 2),
            status="completed", finish_reason="stop", temperature=1.0, worker="bench-worker",
        ).to_bytes()  # fmt: skip
    return found


def fill(queue: Queue, groups: int) -> float:
    """Make so many more groups ready and take them in; the seconds that the leader needed for its part."""
    keys, seconds = queue.keys, 0.0
    for first in range(queue.admitted, queue.admitted + groups, CHUNK):
        jobs = [f"bench/0/{i}" for i in range(first, min(first + CHUNK, queue.admitted + groups))]
        with queue.client.pipeline(transaction=False) as pipe:
            for place, job in enumerate(jobs, first + 1):
                state: dict[Any, Any] = {"st": "ready", "ln": "train", "n": SAMPLES, "c": SAMPLES, "seq": place, "o": 1}
                pipe.hset(keys.group(job), mapping={**state, **{f"s:{k}": "t" for k in range(SAMPLES)}})
                pipe.set(keys.meta(job), records(place))
                pipe.zadd(keys.ready, {job: place})
                for k in range(SAMPLES):
                    pipe.set(keys.payload(f"{job}/{k}", "t"), b"p", ex=86400)
            pipe.execute()
        began = time.perf_counter()
        queue.state.ingest(jobs)
        seconds += time.perf_counter() - began
    queue.admitted += groups
    return seconds


def cuts(queue: Queue, name: str, count: int) -> list[float]:
    """Latencies of ``count`` cuts of one subscription, in ms; the first two are not counted."""
    found = []
    for _ in range(count + 2):
        fill(queue, GROUPS_PER_BATCH)
        began = time.perf_counter()
        why = queue.cutter.try_cut(queue.state.subs[name])
        found.append(1000 * (time.perf_counter() - began))
        if why:
            raise SystemExit(f"Nothing was cut for {name}: it waits for {why}.")
        if name != SUB:  # the other one stays as large as it is
            queue.cutter.try_cut(queue.state.subs[SUB])
    return found[2:]


def late_comer(queue: Queue, sampler: str, count: int) -> float:
    """Median latency of a cut by another sampler, in ms."""
    name = f"{sampler}-{queue.admitted}"
    fields: dict[str, scripts.Value] = {"lanes": "train", "size": GROUPS_PER_BATCH, "sampler": sampler, "driving": 0}
    scripts.run(queue.client, scripts.subscribe(queue.keys, name, fields))
    scripts.run(queue.client, scripts.join(queue.keys, name, OWNER, 3_600_000))
    queue.state.refresh()
    found = percentile(cuts(queue, name, count), 50)
    scripts.run(queue.client, scripts.unsubscribe(queue.keys, name))
    queue.state.refresh()
    return found


def resident() -> int:
    """Bytes of memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rung(queue: Queue, samples: int, count: int, before: tuple[int, int]) -> dict[str, Any]:
    missing = samples // SAMPLES - len(queue.state.subs[SUB].pool)
    seconds = fill(queue, missing)
    memory, redis_memory = resident() - before[0], settle(queue.client) - before[1]
    found = cuts(queue, SUB, count)
    row: dict[str, Any] = {
        "samples": samples,
        "p50_ms": percentile(found, 50),
        "p99_ms": percentile(found, 99),
        "ingest_per_s": SAMPLES * missing / seconds,
        "leader_mib": memory / 2**20,
        "redis_mib": redis_memory / 2**20,
    }
    return row | {sampler: late_comer(queue, sampler, count // 2) for sampler in OTHERS}


def climb(client: Client, url: str, most: int, count: int) -> list[dict[str, Any]]:
    queue = open_queue(client, url)
    fill(queue, GROUPS_PER_BATCH)
    before = resident(), settle(client)
    rows, samples = [], 1000
    while samples <= most:
        rows.append(rung(queue, samples, count, before))
        samples *= 10
    return rows


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    samples: Annotated[int, typer.Option(help="Most buffered samples.")] = 1_000_000,
    count: Annotated[int, typer.Option(help="Cuts measured on each rung.")] = 60,
) -> None:
    """Latency of a cut, speed of ingest and memory with few and with many buffered samples."""
    with redis_server() as url, connect(url, timeout_s=120.0) as client:
        rows = climb(client, url, samples, count)
        seen = versions(client)
    slowdown = {name: max(row[name] for row in rows) / rows[0][name] for name in ("p50_ms", "p99_ms", *OTHERS)}
    more = rows[-1]["samples"] - rows[0]["samples"]
    per_sample = {
        name: 2**20 * (rows[-1][f"{name}_mib"] - rows[0][f"{name}_mib"]) / max(1, more) for name in ("leader", "redis")
    }
    Report(
        title=f"buffer: latency of a cut of {GROUPS_PER_BATCH} groups of {SAMPLES} samples, in ms; other samplers: p50",
        columns={
            "samples": "buffered samples",
            "p50_ms": "p50",
            "p99_ms": "p99",
            **{name: name for name in OTHERS},
            "ingest_per_s": "ingest/s",
            "leader_mib": "leader MiB",
            "redis_mib": "Redis MiB",
        },
        rows=rows,
        keys={
            "cut_slowdown": max(value for name, value in slowdown.items() if name != "p99_ms"),
            "slowdown": slowdown,
            "ingest_per_s": rows[-1]["ingest_per_s"],
            "bytes_per_sample": per_sample["leader"],
            "redis_bytes_per_sample": per_sample["redis"],
        },
        versions=seen,
        notes=["p50 and p99: sampler oldest_version. Redis MiB holds metadata and payloads of one byte each."],
    ).finish(json_file)


if __name__ == "__main__":
    execute(main)
