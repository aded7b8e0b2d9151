"""Trace a batch and its jobs, or the jobs of one prompt."""

from typing import Any

from penstock.console.read.trace.job import first_of, trace_job
from penstock.console.read.trace.sources import Asked, Sources
from penstock.errors import ProtocolError
from penstock.history.filters import Filters
from penstock.history.row import SampleRow, id_of, place_of
from penstock.names import HOME_LANES
from penstock.records.job import tries_of

#: Most samples of a batch that are shown.
MOST_SAMPLES = 20_000


def find_trace(sources: Sources, asked: Asked) -> tuple[str, dict[str, Any] | None]:
    """Return the kind of a target (batch, job or prompt), and its trace; None if it is unknown. Blocks."""
    if asked.batch is not None:
        return "batch", trace_batch(sources, asked)
    if asked.job:
        return "job", trace_job(sources, asked.job, asked.sample)
    jobs = trace_prompt(sources, asked)
    return "prompt", {"jobs": jobs} if jobs else None


def trace_batch(sources: Sources, asked: Asked) -> dict[str, Any] | None:
    """Return a batch: its times, its trainer's step, and a row per job; None if it is unknown. Blocks.

    ``problems`` says if only some of its samples are shown.
    """
    subscription = asked.subscription or _whose(sources, asked.batch)
    filters = Filters(batch=asked.batch, subscription=subscription)
    page = sources.samples.rows(filters, limit=MOST_SAMPLES)
    if not (rows := page.rows):
        return None
    left = f"It has {sources.samples.count(filters)} samples: {len(rows)} of them are shown." if page.next else ""
    key = subscription, asked.batch
    use = next((one for one in sources.samples.uses(rows[0].id) if (one.subscription, one.batch) == key), None)
    own = subscription == sources.subscription
    step = next((one for one in sources.steps if own and one.batch == asked.batch), None)
    jobs: dict[str, list[SampleRow]] = {}
    for row in rows:
        jobs.setdefault(row.job, []).append(row)
    return {
        "batch": asked.batch,
        "subscription": subscription,
        "version": use.version if use else -1,
        "step": step.step if step else None,
        "cut_s": first_of(row.cut_s for row in rows),
        "trained_s": first_of(row.trained_s for row in rows) or (step.ended_s if step else 0.0),
        "wait_s": step.wait_s if step else None,
        "train_s": step.train_s if step else None,
        "publish_s": step.publish_s if step else None,
        "jobs": [_job(name, jobs[name]) for name in sorted(jobs, key=place_of)],
        "problems": [left] if left else [],
    }


def _whose(sources: Sources, batch: int | None) -> str:
    """Find the subscription of a batch number: each has its own numbers; the run's trainer is preferred."""
    for filters in (Filters(batch=batch, subscription=sources.subscription), Filters(batch=batch)):
        for row in sources.samples.rows(filters, limit=1).rows:
            names = {use.subscription for use in sources.samples.uses(row.id) if use.batch == batch}
            return sources.subscription if sources.subscription in names else min(names, default="")
    return ""


def trace_prompt(sources: Sources, asked: Asked) -> list[dict[str, Any]]:
    """Return a row per job that asked this prompt, by epoch (of an evaluation: by version).

    Blocks for the disk.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for lane in HOME_LANES:
        for job, k, part in sources.samples.scores(Filters(lane=lane, dataset=asked.dataset)):
            if place_of(job)[2] == asked.line:
                found.setdefault(job, []).append((k, part))
    jobs = sorted(found, key=place_of)
    samples = {job: [sources.samples.row(id_of(job, *key)) for key in sorted(found[job])] for job in jobs}
    return [_job(job, [row for row in rows if row is not None]) for job, rows in samples.items() if any(rows)]


def _job(job: str, rows: list[SampleRow]) -> dict[str, Any]:
    rewards = list({row.k: row.reward for row in rows if row.reward is not None}.values())
    admitted, ready = first_of(row.admitted_s for row in rows), first_of(row.ready_s for row in rows)
    return {
        "job": job,
        "lane": rows[0].lane,
        "samples": len({row.k for row in rows}),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "oldest": min(row.oldest for row in rows),
        "newest": max(row.newest for row in rows),
        "workers": ", ".join(sorted({row.worker for row in rows if row.worker})),
        "tries": max(_num_tries(row) for row in rows),
        "admitted_s": admitted,
        "ready_s": ready,
        "took_s": ready - admitted if 0 < admitted <= ready else None,
        "fate": rows[0].fate or f"({rows[0].reason})",
    }


def _num_tries(row: SampleRow) -> int:
    try:
        tries = tries_of(row.tries, row.job)
    except ProtocolError:
        return 1
    return tries[-1].number if tries else 1
