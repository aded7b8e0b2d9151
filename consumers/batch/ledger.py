"""Report the groups that a subscription disposed of between two batches, from running totals in their manifests."""

import logging
from typing import Any

from penstock.protocol.records.manifest import Manifest

log = logging.getLogger(__name__)

#: Trained over generated length below which a warning is logged (T4).
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
        """Return trained over generated length, including this batch; None before any disposal. Warns below 0.95."""
        aged = (int(manifest.ledger.get("aged_samples", 0)), int(manifest.ledger.get("aged_tokens", 0)))
        if not self._last and manifest.n > 1:
            self._before = aged
        if manifest.n > self._last:
            samples, tokens = self._trained
            self._trained = (samples + len(manifest.rows), tokens + sum(row.num_generated for row in manifest.rows))
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
                "answers trained on are %.2f times as long as those that were generated, since groups given up for "
                "their age are the long ones (staleness.on_expiry is %s): choose wait or mask, raise "
                "staleness.bound, or lower max_new_tokens",
                ratio,
                on_expiry,
            )
        self._warned = ratio < LEAST_LENGTH


class Ledger:
    """Differences of totals; a redelivered batch, or the first after a restart, counts only known changes."""

    def __init__(self) -> None:
        self._last: tuple[int, dict[str, Any]] = (0, {})
        self._lengths = Lengths()

    def metrics(self, manifest: Manifest) -> dict[str, float]:
        """Return the metrics of one batch, by slime's names; {} without disposals.

        ``rollout/dynamic_filter/drop_REASON``: groups dropped by filters since the batch before;
        ``rollout/dynamic_filter/raised``: groups whose filter raised; ``rollout/drop_REASON``: groups disposed of for
        another reason (stale, rewound, or timed_out: unfinished, by ``rollout.on_group_timeout``);
        ``rollout/reward_before_filters``: mean over the samples of this batch and of those filtered meanwhile;
        ``rollout/partial_groups`` and ``rollout/missing_samples``: groups of this batch that are short, and the number
        of missing samples (T11); ``rollout/trained_over_generated_length``: see ``Lengths``.
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
            trained = sum(row.reward for row in manifest.rows)
            out["rollout/reward_before_filters"] = (reward + trained) / (num + len(manifest.rows))
        return out
