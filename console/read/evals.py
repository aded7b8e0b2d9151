"""Evaluation: scores of held-out prompts by version. The epoch of a job of lane ``eval`` is its version."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.console.read.samples import listed
from penstock.errors import ConfigError
from penstock.history.eval_rows import NONE, Answer, by_category, pass_rates, scores_of
from penstock.history.filters import Filters
from penstock.history.reader import HistoryReader
from penstock.history.row import WHOLE_JOB, SampleRow, id_of, place_of
from penstock.names import Lane
from penstock.text import safe_repr as in_short

#: Most versions side by side, and prompts of a page.
MAX_VERSIONS = 32
PAGE = 40


def list_evals(
    samples: HistoryReader, dataset: str = "", records: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return a row per dataset and requested version that was evaluated, in this order. Blocks for the disk.

    Args:
        records: rows of ``eval.jsonl`` with the number of tokens that each version generated. Without one, these are
            None for an evaluation in which a sample has several versions.
    """
    filters = Filters(lane=Lane.EVAL, dataset=dataset)
    versions = samples.versions(filters)
    told = {(one.get("dataset"), one.get("version")): one for one in records}
    found: dict[tuple[str, int], list[tuple[str, int, float | None]]] = {}
    spans: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for key, reward in samples.scores(filters).items():
        name, version, _ = place_of(key[0])
        answers = found.setdefault((name, version), [])
        answers += [] if key[2] else [(key[0], key[1], reward)]
        if (span := versions.get(key)) is not None and span[0] >= 0:
            spans.setdefault((name, version), []).append(span)
    return [
        {**_row(*key, found[key]), **_versions(key[1], spans.get(key, []), told.get(key, {}))} for key in sorted(found)
    ]


def _versions(version: int, spans: Sequence[tuple[int, int, int]], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return which versions generated an evaluation, by the samples' (oldest, newest, tokens) and its record."""
    tokens = sum(count for _, _, count in spans)
    mean, share = told.get("mean_version"), told.get("asked_share")
    if tokens and all(oldest == newest for oldest, newest, _ in spans):
        mean = sum(oldest * count for oldest, _, count in spans) / tokens if mean is None else mean
        share = sum(count for oldest, _, count in spans if oldest == version) / tokens if share is None else share
    return {
        "mean_version": mean,
        "oldest": min((oldest for oldest, _, _ in spans), default=None),
        "newest": max((newest for _, newest, _ in spans), default=None),
        "asked_share": share,
    }


def list_categories(samples: HistoryReader, dataset: str = "", *, newest: bool = False) -> list[dict[str, Any]]:
    """Return a row per dataset, version and category of its prompts (``category_key``), ``(none)`` without one.

    Slower than ``list_evals``: it reads the reward entries of each answer. Blocks for the disk.

    Args:
        newest: only the newest version of each dataset.
    """
    found: dict[tuple[str, int], list[Answer]] = {}
    for row in _newest(samples, dataset) if newest else samples.each(Filters(lane=Lane.EVAL, dataset=dataset)):
        name, version, _ = place_of(row.job)
        if row.reward is not None and row.k != WHOLE_JOB and not row.part:
            pred, category = (str(row.reward_info.get(entry) or "") for entry in ("pred", "category"))
            found.setdefault((name, version), []).append(Answer(row.job, row.k, row.reward, pred, category))
    return [
        {"dataset": name, "version": version, "category": category, **_of_scores(scores)}
        for name, version in sorted(found)
        for category, scores in (by_category(found[name, version]) or {NONE: scores_of(found[name, version])}).items()
    ]


def _newest(samples: HistoryReader, dataset: str) -> Iterator[SampleRow]:
    """Yield answers of the newest version of each dataset, without reading rows of the others, which may be many."""
    keys = samples.scores(Filters(lane=Lane.EVAL, dataset=dataset)).keys()
    last: dict[str, int] = {}
    for name, version, _ in {place_of(job) for job, _, _ in keys}:
        last[name] = max(version, last.get(name, version))
    for job, k, part in keys:
        name, version, _ = place_of(job)
        if version == last[name] and (row := samples.row(id_of(job, k, part))) is not None:
            yield row


def _of_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    rates = {
        field: {key.removeprefix(begin): value for key, value in scores.items() if key.startswith(begin)}
        for field, begin in (("pass_at", "pass@"), ("majority_at", "maj@"))
    }
    return {"prompts": scores["prompts"], "answers": scores["num"], "reward_mean": scores["accuracy"], **rates}


def answers_to(samples: HistoryReader, dataset: str, line: int) -> list[dict[str, Any]]:
    """Return answers of each version to one prompt, by version, as rows of a list of samples. Blocks for the disk."""
    scores = samples.scores(Filters(lane=Lane.EVAL, dataset=dataset))
    wanted = sorted((place_of(job)[1], k, part, job) for job, k, part in scores if place_of(job)[2] == line)
    rows = [samples.row(id_of(job, k, part)) for _, k, part, job in wanted]
    return [{"version": row.epoch, **listed(row)} for row in rows if row is not None]


def prompts_over_versions(
    samples: HistoryReader, dataset: str, *, order: str = "", after: int = 0, limit: int = PAGE
) -> dict[str, Any]:
    """Return the rewards of each held-out prompt over the newest versions. Blocks for the disk.

    Args:
        order: one of ``ORDERS``; '' for the first.
        after: number of prompts to skip: ``next`` of the page before.

    Returns:
        ``versions``, the newest ``MAX_VERSIONS``, ascending, and ``versions_omitted``, the number of older ones;
        ``rows``: ``line``, ``prompt`` and ``rewards``, a mean per version or None if it was not evaluated; ``total``
        prompts; ``next``, None at the end.

    Raises:
        ConfigError: unknown order.
    """
    judge = ORDERS.get(order or next(iter(ORDERS)))
    if judge is None:
        raise ConfigError(f"invalid order {in_short(order)}: prompts can be sorted by {', '.join(ORDERS)}.")
    found, jobs = _by_prompt(samples, dataset)
    evaluated = sorted({version for rewards in found.values() for version in rewards})
    versions = evaluated[-MAX_VERSIONS:]
    lines = {line: [rewards.get(version) for version in versions] for line, rewards in found.items()}
    ordered = sorted(lines, key=lambda line: (judge(lines[line]), line))
    begin = max(0, after)
    shown = ordered[begin : begin + limit]
    rows = [{"line": line, "prompt": _prompt(samples, jobs[line]), "rewards": lines[line]} for line in shown]
    more = begin + len(shown) < len(ordered)
    return {
        "versions": versions,
        "versions_omitted": len(evaluated) - len(versions),
        "rows": rows,
        "total": len(ordered),
        "next": begin + len(shown) if more else None,
    }


def _by_prompt(
    samples: HistoryReader, dataset: str
) -> tuple[dict[int, dict[int, float | None]], dict[int, tuple[int, str]]]:
    """Return mean rewards by line and version; and a sample of the newest version of each line."""
    held: dict[int, dict[int, list[float]]] = {}
    jobs: dict[int, tuple[int, str]] = {}
    for (job, k, part), reward in samples.scores(Filters(lane=Lane.EVAL, dataset=dataset)).items():
        _, version, line = place_of(job)
        rewards = held.setdefault(line, {}).setdefault(version, [])
        if reward is not None and not part:
            rewards.append(reward)
        jobs[line] = max(jobs.get(line, (-1, "")), (version, id_of(job, k, part)))
    means = {
        line: {version: sum(some) / len(some) if some else None for version, some in versions.items()}
        for line, versions in held.items()
    }
    return means, jobs


def _prompt(samples: HistoryReader, newest: tuple[int, str]) -> str:
    row = samples.row(newest[1])
    return row.prompt if row is not None else ""


def _known(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def _fall(rewards: Sequence[float | None]) -> float:
    """Return the last reward minus the best one before."""
    known = _known(rewards)
    return known[-1] - max(known) if known else 0.0


#: Sort keys of prompts, ascending.
ORDERS: Mapping[str, Callable[[Sequence[float | None]], float]] = {
    "worst": lambda rewards: _known(rewards)[-1] if _known(rewards) else math.inf,
    "hardest": lambda rewards: sum(_known(rewards)) / len(_known(rewards)) if _known(rewards) else math.inf,
    "unlearned": _fall,
    "line": lambda rewards: 0.0,
}


def _row(dataset: str, version: int, answers: list[tuple[str, int, float | None]]) -> dict[str, Any]:
    scored = [Answer(job, k, reward) for job, k, reward in answers if reward is not None]
    rewards = [one.reward for one in scored]
    return {
        "dataset": dataset,
        "version": version,
        "prompts": len({job for job, _, _ in answers}),
        "answers": len(answers),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "pass_at": {str(k): rate for k, rate in pass_rates(scored).items()},
    }
