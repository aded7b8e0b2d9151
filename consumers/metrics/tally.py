"""Count one trainer's totals of training, publication and waits, and metrics of the last batch."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

from penstock.metrics.series import Histogram
from penstock.protocol.staleness import Lineage
from penstock.records.manifest import Manifest, Row, first_rows
from penstock.records.sample import SampleStatus

log = logging.getLogger(__name__)

#: Ratio of trained to generated length below which a warning is logged (T4).
LEAST_LENGTH = 0.95


class Lengths:
    """Compare the length of trained answers with that of all answers generated for a subscription (T4).

    Disposing of groups because of their age (``on_expiry: drop``, rewinds, retention) removes long answers first; the
    ratio of mean lengths since this process started shows the effect. Groups disposed of unfinished
    (``rollout.on_group_timeout: drop``) are excluded, since their final length is unknown.
    """

    def __init__(self) -> None:
        self._last = 0
        #: Totals disposed of before this process started.
        self._before = (0, 0)
        self._trained = (0, 0)
        self._warned = False

    def ratio(self, manifest: Manifest) -> float | None:
        """Return the ratio of trained to generated length; None before any disposal. Warns below 0.95."""
        aged = (int(manifest.ledger.get("aged_samples", 0)), int(manifest.ledger.get("aged_tokens", 0)))
        if not self._last and manifest.n > 1:
            self._before = aged
        if manifest.n > self._last:
            samples, tokens = self._trained
            generated = sum(row.num_generated for row in manifest.rows)
            self._trained = (samples + len(first_rows(manifest.rows)), tokens + generated)
            self._last = manifest.n
        gone = (aged[0] - self._before[0], aged[1] - self._before[1])
        made = (self._trained[0] + gone[0], self._trained[1] + gone[1])
        if gone[0] <= 0 or not self._trained[0] or made[1] <= 0:
            return None
        ratio = (self._trained[1] / self._trained[0]) / (made[1] / made[0])
        self._warn(ratio, manifest.on_expiry)
        return ratio

    def _warn(self, ratio: float, on_expiry: str) -> None:
        if ratio < LEAST_LENGTH and not self._warned:
            log.warning(
                "trained answers are %.2f times as long as generated answers, because groups disposed of for their "
                "age are the long ones (staleness.on_expiry is %s): choose wait or mask, raise "
                "staleness.bound, or lower max_new_tokens",
                ratio,
                on_expiry,
            )
        self._warned = ratio < LEAST_LENGTH


class Ledger:
    """Compute differences of ledger totals; a redelivered batch, or the first after a restart, counts known changes."""

    def __init__(self) -> None:
        self._last: tuple[int, dict[str, Any]] = (0, {})
        self._lengths = Lengths()

    def metrics(self, manifest: Manifest) -> dict[str, float]:
        """Return the disposal metrics of one batch by slime's names; {} without disposals.

        ``rollout/dynamic_filter/drop_REASON``: groups dropped by filters since the previous batch;
        ``rollout/dynamic_filter/raised``: groups whose filter raised; ``rollout/drop_REASON``: groups disposed of for
        other reasons (stale, rewound, or timed_out: unfinished, by ``rollout.on_group_timeout``);
        ``rollout/reward_before_filters``: mean over the samples of this batch and the samples filtered meanwhile;
        ``rollout/partial_groups`` and ``rollout/missing_samples``: incomplete groups of this batch, and number of
        missing samples (T11); ``rollout/trained_over_generated_length``: see ``Lengths``.
        """
        (before_n, before), self._last = self._last, (manifest.n, manifest.ledger)
        out: dict[str, float] = {}
        if manifest.num_partial_groups:
            out["rollout/partial_groups"] = manifest.num_partial_groups
            out["rollout/missing_samples"] = manifest.num_missing_samples
        if (ratio := self._lengths.ratio(manifest)) is not None:
            out["rollout/trained_over_generated_length"] = ratio
        if before_n + 1 != manifest.n or not manifest.ledger:
            return out
        for reason, total in sorted(manifest.ledger["dropped"].items()):
            if count := total - before.get("dropped", {}).get(reason, 0):
                kind, _, rest = reason.partition("/")
                name = f"dynamic_filter/drop_{rest}" if kind == "filter" else f"drop_{reason}"
                out[f"rollout/{name}"] = count
        if raised := manifest.ledger["raised"] - before.get("raised", 0):
            out["rollout/dynamic_filter/raised"] = raised
        num = manifest.ledger["rejected_samples"] - before.get("rejected_samples", 0)
        if num and manifest.rows:
            reward = manifest.ledger["rejected_reward"] - before.get("rejected_reward", 0.0)
            trained = [row.reward for row in first_rows(manifest.rows)]
            out["rollout/reward_before_filters"] = (reward + sum(trained)) / (num + len(trained))
        return out


#: Upper bounds of histogram buckets: staleness in versions, lengths in tokens.
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
LENGTHS = tuple(2**power for power in range(4, 18))


class Tally:
    """Count the totals of one rank; the trainer's and evaluation's threads write, the metrics server reads."""

    def __init__(self) -> None:
        #: batches, groups, samples, generated_tokens, loss_tokens, partial_groups, missing_samples, lost_payloads
        self.sums: Counter[str] = Counter()
        self.staleness = Histogram(STALENESS)
        self.lengths = Histogram(LENGTHS)
        #: Seconds of waiting by reason.
        self.waits: dict[str, float] = {"batch": 0.0, "ranks": 0.0}
        #: Published versions, their bytes, seconds to write and to send; refused publications.
        self.published: dict[str, float] = dict.fromkeys(("versions", "bytes", "write_s", "send_s", "skipped"), 0.0)
        self.last_publish_s = 0.0
        #: Manifest of the last committed batch; None before the first.
        self.manifest: Manifest | None = None
        #: Seconds between the last two commits, and the part spent waiting for a batch.
        self.step_s = self.step_wait_s = 0.0
        #: Disposals reported with that batch, by slime's names.
        self.drops: Mapping[str, float] = {}
        #: Metrics reported by the trainer.
        self.reported: Mapping[str, float] = {}
        #: Dataset -> numeric fields of the row of its last evaluation.
        self.evaluations: dict[str, Mapping[str, float]] = {}
        self._ledger = Ledger()
        self._committed_at, self._waited_before = 0.0, 0.0

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Count the time inside the ``with`` as a wait."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waits[reason] = self.waits.get(reason, 0.0) + time.monotonic() - began

    def commit(self, manifest: Manifest) -> None:
        """Add a trained batch. Takes about a microsecond per sample."""
        rows = manifest.rows
        self.sums.update(
            batches=1,
            groups=manifest.num_groups,
            samples=manifest.num_samples,
            generated_tokens=sum(row.num_generated for row in rows if row.status != SampleStatus.GIVEN),
            loss_tokens=manifest.num_loss_tokens,
            partial_groups=manifest.num_partial_groups,
            missing_samples=manifest.num_missing_samples,
            lost_payloads=sum(row.lost for row in first_rows(rows)),
        )
        self._add(manifest)
        self.drops = self._ledger.metrics(manifest)
        self.manifest = manifest
        now, waited = time.monotonic(), self.waits["batch"]
        if self._committed_at:
            self.step_s, self.step_wait_s = now - self._committed_at, waited - self._waited_before
        self._committed_at, self._waited_before = now, waited

    def _add(self, manifest: Manifest) -> None:
        lineage = Lineage(tuple((first, last) for first, last in manifest.abandoned))
        oldest = {row.oldest_loss for row in manifest.rows}
        lags = {version: lineage.lag(version, manifest.train_version) for version in oldest}
        for row in manifest.rows:
            self.lengths.add(row.num_generated)
            if row.oldest_loss >= 0:
                self.staleness.add(lags[row.oldest_loss])

    def publish(self, num_bytes: int, write_s: float, send_s: float) -> None:
        """Add a written and announced version."""
        for name, value in (("versions", 1), ("bytes", num_bytes), ("write_s", write_s), ("send_s", send_s)):
            self.published[name] += value
        self.last_publish_s = write_s + send_s

    def skip_publication(self) -> None:
        """Count a publication refused because of non-finite weights."""
        self.published["skipped"] += 1

    def report(self, figures: Mapping[str, Any]) -> None:
        """Store the last number of each reported metric; remove metrics that are no longer numbers."""
        self.reported = numbers_of({**self.reported, **figures})

    def evaluate(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of ``eval.jsonl``, keeping the newest version of each dataset."""
        for row in rows:
            numbers, known = numbers_of(row), self.evaluations.get(str(row["dataset"]), {})
            if numbers.get("version", -1) >= known.get("version", -1):
                self.evaluations[str(row["dataset"])] = numbers


def numbers_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers."""
    numbers = {name: float(value) for name, value in figures.items() if type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def lengths_of(rows: list[Row]) -> dict[str, float]:
    """Return mean, median, max and min of the generated tokens of a batch's rows; {} without rows."""
    found = [row.num_generated for row in rows]
    return {kind.__name__: float(kind(found)) for kind in (mean, median, max, min)} if found else {}


def truncated_ratio(rows: list[Row]) -> float:
    return sum(row.status == SampleStatus.TRUNCATED for row in rows) / len(rows)


def same_rewards(rows: list[Row]) -> Counter[str]:
    """Count groups whose samples all have the same reward, by that reward to one decimal."""
    rewards: dict[str, set[float]] = {}
    for row in rows:
        rewards.setdefault(row.job, set()).add(row.reward)
    return Counter(f"{next(iter(one)):.1f}" for one in rewards.values() if len(one) == 1)
