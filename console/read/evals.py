"""Evaluation: scores of held-out prompts over versions. The epoch of a job of lane ``eval`` is the version it is of."""

from typing import Any

from console.read.samples import listed
from penstock.history.filters import Filters
from penstock.history.reader import HistoryReader
from penstock.history.row import id_of, place_of
from penstock.names import Lane


def list_evals(samples: HistoryReader, dataset: str = "") -> list[dict[str, Any]]:
    """A row per dataset and version that was evaluated, in this order. Blocks for the disk."""
    found: dict[tuple[str, int], list[tuple[int, float | None]]] = {}
    for (job, _, _), reward in samples.scores(Filters(lane=Lane.EVAL, dataset=dataset)).items():
        name, version, line = place_of(job)
        found.setdefault((name, version), []).append((line, reward))
    return [_row(name, version, found[name, version]) for name, version in sorted(found)]


def answers_to(samples: HistoryReader, dataset: str, line: int) -> list[dict[str, Any]]:
    """How each version answered one prompt, by version, as rows of a list of samples. Blocks for the disk."""
    scores = samples.scores(Filters(lane=Lane.EVAL, dataset=dataset))
    wanted = sorted((place_of(job)[1], k, part, job) for job, k, part in scores if place_of(job)[2] == line)
    rows = [samples.row(id_of(job, k, part)) for _, k, part, job in wanted]
    return [{"version": row.epoch, **listed(row)} for row in rows if row is not None]


def _row(dataset: str, version: int, answers: list[tuple[int, float | None]]) -> dict[str, Any]:
    rewards = [reward for _, reward in answers if reward is not None]
    return {
        "dataset": dataset,
        "version": version,
        "prompts": len({line for line, _ in answers}),
        "answers": len(answers),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
    }
