"""A run as large as ``benchmarks.page`` shows it: its folder with steps and a history, and its Redis."""

import contextlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis

from penstock.history.row import SampleRow, Use
from penstock.history.writer import HistoryWriter
from penstock.protocol import scripts
from penstock.protocol.presence import WorkerPresence
from penstock.records.codec import pack
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.commands import Client

RUN, MODEL, SUB = "bench", "policy", "actor"
GROUP, PROMPT, ANSWER, WORDS = 8, 32, 96, 60
#: Groups of a batch; prompts of an evaluation.
BATCH, HELD_OUT = 32, 400
STEPS, JOBS, PUBLICATIONS = 1000, 10_000, 200
#: Distinct samples, which are used in turns; rows of one commit; jobs of one admit.
DISTINCT, COMMIT, ADMIT = 512, 512, 500


def lay_out(folder: Path, samples: int) -> None:
    """Write a folder that is not there yet. Blocks, for long with many samples."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "run: bench\nstaleness: {bound: 4}\ntrainer: {steps: 2000}\n" + "".join(f"extra_{n}: {n}\n" for n in range(200))
    )
    _write_rows(folder)
    rng = np.random.default_rng(0)
    pool = [_sample(rng) for _ in range(DISTINCT)]
    writer = HistoryWriter(folder / "history", 1, max_bytes=2**40)
    with contextlib.closing(writer):
        rows = (_row(pool, at, samples) for at in range(samples))
        while some := list(itertools.islice(rows, COMMIT)):
            writer.write(some, [use for row in some if row.lane == "train" for use in [_use(row)]])


def _write_rows(folder: Path) -> None:
    rng = np.random.default_rng(1)
    noise = rng.random(STEPS).tolist()
    steps = [
        {"step": n, "version": n, "samples": GROUP * BATCH, "generated_tokens": 24_576, "loss_tokens": 24_000,
         "reward_mean": 1 - 0.9 * 0.99**n, "staleness_max": 3, "staleness_mean": 1 + noise[n], "time_s": 1e9 + 3 * n,
         "wait_s": noise[n], "step_s": 1.5, "publish_s": 0.3, "entropy": 2 - noise[n], "loss": noise[n] - 0.5,
         "ratio_p01": 0.9, "ratio_p50": 1.0, "ratio_p99": 1.1, "grad_norm": noise[n]} for n in range(STEPS)
    ]  # fmt: skip
    _write(folder / "steps.jsonl", steps)
    held = [
        {"dataset": "heldout", "version": n, "accuracy": n / STEPS, "time_s": 1e9 + 3 * n} for n in range(0, STEPS, 20)
    ]
    _write(folder / "eval.jsonl", held)
    queue = [
        {"time_s": 1e9 + n, "queued": n % 97, "leased": 64, "ready": n % 31, "dead": 0, "tokens_per_s": 9e4 + n}
        for n in range(3 * STEPS)
    ]
    _write(folder / "queue.jsonl", queue)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(pool: list[SampleRow], at: int, samples: int) -> SampleRow:
    """One of the pool as a sample of its own: the last fifth are answers to held-out prompts."""
    train = samples * 4 // 5
    version = at // (GROUP * BATCH) if at < train else (at - train) // HELD_OUT
    job = f"math/0/{at // GROUP}" if at < train else f"heldout/{version}/{(at - train) % HELD_OUT}"
    one, first = pool[at % DISTINCT], pool[at // GROUP * GROUP % DISTINCT]
    assert one.tokens is not None
    assert first.tokens is not None
    fields: dict[str, Any] = {name: getattr(one, name) for name in one.__slots__} | {
        "job": job, "k": at % GROUP if at < train else 0, "lane": "train" if at < train else "eval",
        "prompt": first.prompt, "tokens": np.concatenate([first.tokens[:PROMPT], one.tokens[PROMPT:]]),
        "reward": (at * 2_654_435_761 % 2**32) / 2**32, "oldest": version, "newest": version,
        "fate": "filtered" if at % 10 == 0 else "trained" if at < train else "evaluated",
    }  # fmt: skip
    return SampleRow(**fields)


def _use(row: SampleRow) -> Use:
    return Use(row.job, row.k, SUB, row.newest + 1, version=row.newest, staleness=0, loss_tokens=ANSWER)


def _sample(rng: np.random.Generator) -> SampleRow:
    length = PROMPT + ANSWER
    generated = (np.arange(length) >= PROMPT).astype(np.uint8)
    return SampleRow(
        "pool/0/0",
        0,
        prompt=_text(rng, WORDS // 3),
        answer=_text(rng, WORDS),
        label="42",
        tokens=rng.integers(0, 150_000, length, dtype=np.int32),
        logprobs=np.where(generated, np.log(rng.uniform(0.1, 1, length)), 0).astype(np.float32),
        versions=np.where(generated, 1, -1).astype(np.int32),
        generated=generated,
        loss_mask=generated,
        prompt_length=PROMPT,
        num_generated=ANSWER,
        status="completed",
        finish_reason="stop",
        worker="worker-0",
        admitted_s=1e9,
        drawn_s=1e9 + 10,
        trained_s=1e9 + 100,
    )


def _text(rng: np.random.Generator, count: int) -> str:
    """Words that occur as often as those of a language: that of rank r about as often as 1 / r."""
    return " ".join(f"w{word}" for word in (30_000 ** rng.random(count)).astype(np.int64))


def fill(client: Client, raw: redis.Redis, keys: Keys, workers: int) -> None:
    """Have an empty Redis hold what the run would."""
    scripts.ensure_lanes(client, keys)
    definition: dict[str, scripts.Value] = {
        "model": MODEL, "lanes": "train", "reuse": 1, "bound": 4, "gb": 2**40, "sampler": "oldest_version",
        "mode": "async", "on_expiry": "mask", "size": BATCH, "per_version": 1, "driving": 1,
    }  # fmt: skip
    scripts.run(client, scripts.subscribe(keys, SUB, definition))
    for version in range(1, PUBLICATIONS + 1):
        told = Publication(MODEL, version, "disk", f"/weights/v{version:08d}", step=version, published_s=time.time())
        raw.xadd(keys.weights(MODEL), {"p": told.to_bytes()}, id=f"{version}-0")
    raw.hset(keys.clock, f"version:{MODEL}", str(PUBLICATIONS))
    _admit(client, keys)
    renew(client, keys, workers)


def _admit(client: Client, keys: Keys) -> None:
    prompt = " ".join(f"word{n}" for n in range(WORDS))
    for begin in range(0, JOBS, ADMIT):
        jobs = [Job(id=f"math/1/{n}", n=GROUP, prompt=prompt, label="42") for n in range(begin, begin + ADMIT)]
        records = [(job, job.to_bytes()) for job in jobs]
        call = scripts.admit(keys, records, lane="train", source="train", position=begin, model=MODEL, gate=None)
        scripts.run(client, call)


def renew(client: Client, keys: Keys, workers: int) -> None:
    """Have the workers be there for the next hour."""
    shown = {}
    for at in range(workers):
        one = WorkerPresence(
            name=f"worker-{at}.{at:08x}", at=time.time() + 3600, host=f"node{at // 8}", engine="sglang 0.5.20",
            version=PUBLICATIONS - at % 3, state="crash loop" if at % 100 == 99 else "serving",
            why="engine died: out of memory" if at % 100 == 99 else "", held=8, running=at % 64, slots=64,
            tokens_per_s=1234.5, samples=1000 + at, generated_tokens=10**6,
        )  # fmt: skip
        shown[one.name] = pack(one.to_record())
    pipe = client.pipeline(transaction=False)
    pipe.hset(keys.workers, mapping=shown)
    pipe.execute()
