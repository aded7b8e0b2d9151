"""Rows of ``eval.jsonl``: the result of an evaluation, one row per dataset and version (T18).

The reader of a finished evaluation writes its rows: the trainer's client, or the buffer if no consumer reads it.
"""

import fcntl
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ProtocolError
from penstock.records.manifest import Row, first_rows
from penstock.records.sample import SampleStatus
from penstock.records.sample_meta import iter_metas
from penstock.system.disk import append

log = logging.getLogger(__name__)

#: Most categories that are reported by name: the largest; the others are combined.
MAX_CATEGORIES = 64
#: Name of the combined categories, and of prompts without one.
OTHERS, NONE = "(others)", "(none)"


class Rewarded(Protocol):
    """An answer to the prompt of a job."""

    @property
    def job(self) -> str: ...
    @property
    def reward(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One held-out answer."""

    job: str
    k: int
    reward: float
    #: Its result as it is compared in votes; '' if it has none.
    pred: str = ""
    #: Category of its prompt; '' if it has none.
    category: str = ""


def scores_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return ``accuracy`` (mean reward), ``num`` answers, ``prompts`` answered, ``pass@K`` and ``maj@K``."""
    return {
        "accuracy": sum(one.reward for one in answers) / len(answers),
        "num": len(answers),
        "prompts": len({one.job for one in answers}),
        **rates_of(answers),
    }


def rates_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Return ``pass@K`` and ``maj@K``; {} if prompts have one answer."""
    passed = {f"pass@{k}": rate for k, rate in pass_rates(answers).items()}
    return passed | {f"maj@{k}": rate for k, rate in majority_rates(answers).items()}


def by_category(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return ``scores_of`` of each category, by name; {} if no prompt has one."""
    if not any(one.category for one in answers):
        return {}
    sizes = Counter(one.category or NONE for one in answers)
    named = {name for name, _ in sizes.most_common(MAX_CATEGORIES)}
    found: dict[str, list[Answer]] = {}
    for one in answers:
        name = one.category or NONE
        found.setdefault(name if name in named else OTHERS, []).append(one)
    return {name: scores_of(found[name]) for name in sorted(found)}


def pass_rates(answers: Iterable[Rewarded]) -> dict[int, float]:
    """Return k -> probability that one of k samples of a prompt has reward 1, mean over prompts; {} for one sample.

    k are 1, 2, 4, ..., up to the samples that each prompt has. Of n samples, c with reward 1, the unbiased estimate is
    1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    prompts: dict[str, list[bool]] = {}
    for one in answers:
        prompts.setdefault(one.job, []).append(one.reward == 1)
    counts = [(len(one), sum(one)) for one in prompts.values()]
    return {k: sum(1 - comb(n - c, k) / comb(n, k) for n, c in counts) / len(counts) for k in _sizes(prompts.values())}


def majority_rates(answers: Iterable[Answer]) -> dict[int, float]:
    """Return k -> reward of the majority result of k samples of a prompt, mean over prompts; {} without results.

    k are 2, 4, 8, ..., up to the samples that each prompt has. Unbiased: the mean over disjoint runs of k samples, in
    their order. If several results have the most votes, each counts alike; a sample without a result has no vote,
    unless none has one (self-consistency, arXiv 2203.11171).
    """
    prompts: dict[str, list[Answer]] = {}
    for one in answers:
        prompts.setdefault(one.job, []).append(one)
    if not any(one.pred for some in prompts.values() for one in some):
        return {}
    for some in prompts.values():
        some.sort(key=lambda one: one.k)
    return {
        k: sum(
            _mean_score([_vote(some[at : at + k]) for at in range(0, len(some) - k + 1, k)])
            for some in prompts.values()
        )
        / len(prompts)
        for k in _sizes(prompts.values())[1:]
    }


def _vote(answers: Sequence[Answer]) -> float:
    voters = [one for one in answers if one.pred] or list(answers)
    votes = Counter(one.pred for one in voters)
    most = max(votes.values())
    winners = [pred for pred, count in votes.items() if count == most]
    return _mean_score([_mean_score([one.reward for one in voters if one.pred == pred]) for pred in winners])


def _sizes(prompts: Iterable[Sequence[Any]]) -> list[int]:
    """Return 1, 2, 4, ..., up to the answers that each prompt has; [] if that is one."""
    most = min(map(len, prompts), default=0)
    return [2**power for power in range(most.bit_length())] if most > 1 else []


def _mean_score(values: Sequence[float]) -> float:
    return sum(values) / len(values)


#: Fields that a reward returned beside its number, by job and k.
RewardInfo = Mapping[tuple[str, int], Mapping[str, Any]]
NOTHING: RewardInfo = {}
#: Name of the file in the run's folder.
FILE = "eval.jsonl"


def summarize(samples: Iterable[Row], asked: int, said: RewardInfo = NOTHING) -> Iterator[dict[str, Any]]:
    """Yield one row per (dataset, version) of the samples of an evaluation.

    ``version`` is the requested one. ``oldest`` and ``newest`` are the versions that generated the samples,
    ``mean_version`` is the mean version of their tokens (None if no version is known), and ``asked_share`` is the least
    share of the tokens that the requested version is proven to have generated, of all tokens whose version is known (a
    filter may have masked others). Weights that change in place, or between two prompts, make them differ. ``accuracy``
    is the mean reward over the ``num`` samples of ``prompts`` prompts of this dataset; ``asked`` is the number of
    prompts of the complete evaluation.
    ``pass@K`` and ``maj@K`` are as ``pass_rates`` and ``majority_rates``; ``categories`` has the scores of each one.

    Args:
        said: fields that the reward returned beside its number, by job and k.
    """
    by_set: dict[tuple[str, int], list[Row]] = {}
    for row in samples:
        dataset, epoch, _ = row.job.rsplit("/", 2)
        by_set.setdefault((dataset, int(epoch)), []).append(row)
    for (dataset, version), rows in sorted(by_set.items()):
        firsts = first_rows(rows)
        answers = [_answer(row, said.get((row.job, row.k), {})) for row in firsts]
        categories = by_category(answers)
        yield {
            "dataset": dataset,
            "version": version,
            "accuracy": sum(row.reward for row in firsts) / len(firsts),
            "num": len(firsts),
            "prompts": len({row.job for row in rows}),
            "asked": asked,
            "oldest": min(row.oldest for row in rows),
            "newest": max(row.newest for row in rows),
            "mean_version": _mean_version(rows),
            "asked_share": _mean(sum(_drawn_by(version, row) for row in rows), sum(row.num_loss for row in rows)),
            "truncated_ratio": sum(row.status == SampleStatus.TRUNCATED for row in firsts) / len(firsts),
            **rates_of(answers),
            **({"categories": categories} if categories else {}),
            "time_s": time.time(),
        }


def _answer(row: Row, said: Mapping[str, Any]) -> Answer:
    return Answer(row.job, row.k, row.reward, *(str(said.get(name) or "") for name in ("pred", "category")))


def _mean(total: float, count: int) -> float | None:
    """Return ``total / count``; None if there is nothing to take the mean of."""
    return total / count if count else None


def _mean_version(rows: Iterable[Row]) -> float | None:
    """Return the mean version of the tokens whose version is known, each token counting alike; None without any."""
    pairs = [(version, tokens) for row in rows for version, tokens in _versions_of(row) if version >= 0]
    return _mean(sum(version * tokens for version, tokens in pairs), sum(tokens for _, tokens in pairs))


def _versions_of(row: Row) -> list[list[int]]:
    """Return pairs (version, tokens) of a sample. No token is stale in an evaluation, so all are listed."""
    return row.loss_versions or [[row.oldest_loss, row.num_loss]]


def _drawn_by(version: int, row: Row) -> int:
    """Return the number of tokens of a sample that ``version`` is proven to have generated.

    A token whose version is not proven carries the oldest that may have generated it (T6), and counts for none. A row
    counts those of all versions together, with or without loss: all are subtracted, so it is a lower bound.
    """
    drawn = sum(tokens for drawn_by, tokens in _versions_of(row) if drawn_by == version)
    return max(0, drawn - row.num_unproven)


def reward_info_of(job: str, data: bytes | None) -> RewardInfo:
    """Return what the reward returned beside the number of each sample of a group; {} if its records are unreadable."""
    try:
        return {(job, meta.k): meta.reward_info for meta in iter_metas(data or b"", f"metadata of group {job}")}
    except ProtocolError as exc:
        log.warning("%s: the rewards' own fields of its samples are skipped", exc)
        return {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of earlier starts; a line that a kill truncated, or that is not a row, is skipped. Blocks."""
    found = list(_parsed(path))
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        log.warning("%s has %d lines that hold no row; they are skipped", path, len(found) - len(rows))
    return rows


def _parsed(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the row of each line; None for a line that has none."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        is_row = isinstance(row, dict) and isinstance(row.get("version"), int) and isinstance(row.get("dataset"), str)
        yield row if is_row else None


def add_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append the rows of those datasets and versions that the file has none of, and make its folder if needed. Blocks.

    Several processes may do so at once, as a reader that lost its lease and its successor: each row is written once.

    Raises:
        BlockingIOError: another process is writing. DiskFull, OSError: nothing was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as exc:  # the file system has no locks
            log.debug("%s is not locked: %s", path, exc)
        written = {(row["version"], row["dataset"]) for row in _parsed(path) if row is not None}
        new = [row for row in rows if (row["version"], row["dataset"]) not in written]
        append(path, "".join(json.dumps(row) + "\n" for row in new))
