"""Trace one job with its leases, attempts and samples, in order of time; a batch and its jobs; the jobs of one prompt.

Shared by command line and page.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.console.read.samples import LiveJob, read_live_job
from penstock.console.read.stages import Asked, Sources, Step, known_tries, own_try, stages_of
from penstock.errors import ProtocolError
from penstock.history.filters import Filters
from penstock.history.reader import HistoryReader
from penstock.history.row import SCORES, WHOLE_JOB, SampleRow, Use, id_of, place_of
from penstock.names import HOME_LANES
from penstock.records.job import Try, tries_of

_OF_A_SAMPLE = (
    *("id", "k", "part", "worker", "status", "finish_reason", "reward", "reward_info", "oldest", "newest"),
    *("prompt_length", "num_generated", "cached_tokens", "num_turns", "num_aborts", "fate", "reason"),
    *(
        "first_token_s",
        "drawn_s",
        "rewarded_s",
        "committed_s",
        "cut_s",
        "trained_s",
        "generate_s",
        "reward_s",
        "pauses",
    ),
)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a job or a sample."""

    #: Unix seconds.
    at_s: float
    event: str
    #: A part, a worker, a subscription.
    who: str
    what: str
    #: Id of its sample; '': an event of the job.
    sample: str = ""


def trace_job(sources: Sources, job: str, sample: str = "") -> dict[str, Any] | None:
    """Return all that is known of a job, as plain values; None if it is unknown. Blocks for the disk, and for Redis.

    Args:
        sample: id of one of its samples, to leave out the others; '': all of them.

    Returns:
        its lane, state, prompt and times; ``tries``; ``samples``, each with its ``stages`` and the number of its
        attempt; ``batches``; ``events`` by time; ``problems``: records that could not be read.
    """
    live = read_live_job(*sources.live, job) if sources.live else None
    rows, uses = _rows(sources.samples, job, live)
    if not rows:
        return None
    problems = [live.broken] if live and live.broken else []
    tries = _tries(rows, job, problems)
    batches = _batches(uses, live, sources, rows)
    there = [row for row in rows if row.k != WHOLE_JOB and sample in ("", row.id)]
    if sample and not there:
        return None
    events = in_order(_events(rows, tries, batches))
    begin = events[0].at_s if events else 0.0
    return {
        "job": job,
        "lane": rows[0].lane,
        "state": live.state if live else rows[0].fate,
        "prompt": next((row.prompt for row in rows if row.prompt), ""),
        "label": next((row.label for row in rows if row.label), ""),
        "failed_tries": max(row.attempts for row in rows),
        "crashes": max(row.crashes for row in rows),
        "admitted_s": first_of(row.admitted_s for row in rows),
        "ready_s": first_of(row.ready_s for row in rows),
        "tries": [asdict(one) for one in tries],
        "samples": [_sample(row, tries) for row in there],
        "batches": batches,
        "events": [
            {**asdict(event), "after_s": round(event.at_s - begin, 3)}
            for event in events
            if not sample or event.sample in ("", sample)
        ],
        "problems": problems,
    }


def _rows(samples: HistoryReader, job: str, live: LiveJob | None) -> tuple[list[SampleRow], list[Use]]:
    """Merge rows of the history with rows that are still in Redis only."""
    found = {row.key: row for row in samples.each(Filters(job=job))}
    uses = {
        (use.k, use.part, use.subscription, use.batch): use for row in found.values() for use in samples.uses(row.id)
    }
    # A job in Redis is still live: its row is newer than any of an earlier life of the job.
    for row in live.rows if live else ():
        if row.key not in found or not row.fate:
            found[row.key] = row
    for use in live.uses if live else ():
        uses.setdefault((use.k, use.part, use.subscription, use.batch), use)
    rows = sorted(found.values(), key=lambda row: row.key)
    ended = [row for row in rows if row.k != WHOLE_JOB]
    return ended or rows, [use for use in uses.values() if use.k != WHOLE_JOB]


def _tries(rows: Sequence[SampleRow], job: str, problems: list[str]) -> list[Try]:
    text = max((row.tries for row in rows), key=len)
    try:
        return tries_of(text, f"job {job}", ready_s=first_of(row.ready_s for row in rows))
    except ProtocolError as exc:
        problems.append(str(exc))
        return []


def _sample(row: SampleRow, tries: Sequence[Try]) -> dict[str, Any]:
    held, stages = own_try(row, tries), stages_of(row, tries)
    longest = max(stages, key=lambda one: one.end_s - one.begin_s, default=None)
    return {
        **{name: getattr(row, name) for name in _OF_A_SAMPLE},
        "try": held.number if held else None,
        "stages": [asdict(stage) for stage in stages],
        "longest": f"{longest.name} {longest.end_s - longest.begin_s:.3f} s" if longest else "",
    }


def _batches(
    uses: Sequence[Use], live: LiveJob | None, sources: Sources, rows: Sequence[SampleRow]
) -> list[dict[str, Any]]:
    """Return a row per batch that held samples of the job."""
    found: dict[tuple[str, int], list[Use]] = {}
    for use in uses:
        found.setdefault((use.subscription, use.batch), []).append(use)
    # Rows know when the first batch that held them was cut and trained.
    alone = rows if len(found) == 1 else ()
    steps = {(sources.subscription, step.batch): step for step in sources.steps}
    return [_batch(found[key], live, steps.get(key), alone) for key in sorted(found)]


def _batch(uses: Sequence[Use], live: LiveJob | None, step: Step | None, alone: Sequence[SampleRow]) -> dict[str, Any]:
    key = uses[0].subscription, uses[0].batch
    cut, trained = (live.cut_s.get(key, 0.0), live.trained_s.get(key, 0.0)) if live else (0.0, 0.0)
    return {
        "subscription": key[0],
        "batch": key[1],
        "version": uses[0].version,
        "samples": len(uses),
        "staleness": max(use.staleness for use in uses),
        "loss_tokens": sum(use.loss_tokens for use in uses),
        "step": step.step if step else None,
        "cut_s": cut or first_of(row.cut_s for row in alone),
        "trained_s": trained or first_of(row.trained_s for row in alone) or (step.ended_s if step else 0.0),
    }


def _events(rows: Sequence[SampleRow], tries: Sequence[Try], batches: Sequence[dict[str, Any]]) -> Iterator[Event]:
    found = [*_of_tries(rows, tries), *_of_samples(rows), *_of_batches(rows, batches)]
    return (event for event in found if event.at_s > 0)


def in_order(events: Iterable[Event]) -> list[Event]:
    """Sort by time. Redis times are whole milliseconds: within one, keep the given order."""
    return sorted(events, key=lambda one: math.floor(round(1000 * one.at_s, 2)))


def _of_tries(rows: Sequence[SampleRow], tries: Sequence[Try]) -> Iterator[Event]:
    yield Event(first_of(row.admitted_s for row in rows), "admitted", "producer", f"lane {rows[0].lane}")
    for one in tries:
        yield Event(one.leased_s, "leased", one.worker, f"try {one.number}, from lane {one.lane}")
        yield Event(one.ended_s, one.end.partition(" ")[0], one.worker, f"end of try {one.number}{_why(one)}")
    if not tries:
        yield Event(first_of(row.leased_s for row in rows), "leased", "", "first try")


def _why(one: Try) -> str:
    why = one.end.partition(" ")[2]
    return f": {why}" if why else ""


def _of_samples(rows: Sequence[SampleRow]) -> Iterator[Event]:
    for row in rows:
        if row.k == WHOLE_JOB:
            continue
        name = f"sample {row.k}" + (f".{row.part}" if row.part else "")
        yield Event(row.first_token_s, "first token", row.worker, name, row.id)
        for begin, end in (pause for pause in row.pauses if len(pause) == 2):
            yield Event(begin, "paused", row.worker, f"{name}, for {max(0.0, end - begin):.3f} s", row.id)
        yield Event(row.drawn_s, "drawn", row.worker, f"{name}: {row.num_generated} tokens, {_versions(row)}", row.id)
        yield Event(row.rewarded_s, "rewarded", row.worker, f"{name}: {_reward(row)}", row.id)
        yield Event(row.committed_s, "committed", row.worker, name, row.id)


def _of_batches(rows: Sequence[SampleRow], batches: Sequence[dict[str, Any]]) -> Iterator[Event]:
    num_samples = len({row.k for row in rows if row.k >= 0})
    yield Event(first_of(row.ready_s for row in rows), "ready", "", _samples(num_samples))
    for batch in batches:
        who, name = batch["subscription"], f"batch {batch['batch']}"
        yield Event(batch["cut_s"], "cut", who, f"{name}{_for_version(batch['version'])}")
        step = "" if batch["step"] is None else f" in step {batch['step']}"
        done = SCORES.get(rows[0].lane)
        with_loss = "" if done else f", {batch['loss_tokens']} tokens with loss"
        yield Event(batch["trained_s"], done or "trained", who, f"{name}{step}{with_loss}")


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _for_version(version: int) -> str:
    return f", for version {version}" if version >= 0 else ""


def _versions(row: SampleRow) -> str:
    return f"version {row.newest}" if row.oldest == row.newest else f"versions {row.oldest} to {row.newest}"


def _reward(row: SampleRow) -> str:
    return "no reward" if row.reward is None else f"{row.reward:g}"


def first_of(times: Iterable[float]) -> float:
    """Return the earliest known time; 0 if none is known."""
    return min((time for time in times if time > 0), default=0.0)


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
        "tries": max((one.number for row in rows for one in known_tries(row)), default=1),
        "admitted_s": admitted,
        "ready_s": ready,
        "took_s": ready - admitted if 0 < admitted <= ready else None,
        "fate": rows[0].fate or f"({rows[0].reason})",
    }
