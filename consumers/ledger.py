"""What a subscription gave up between two batches, out of the running totals in their manifests."""

from typing import Any

from penstock.messages import Manifest


class Ledger:
    """Differences of totals; a redelivered batch, or the first after a restart, adds nothing it cannot know."""

    def __init__(self) -> None:
        self._last: tuple[int, dict[str, Any]] = (0, {})

    def metrics(self, manifest: Manifest) -> dict[str, float]:
        """Metrics of one batch, by slime's names; {} where nothing was given up.

        ``rollout/dynamic_filter/drop_REASON``: groups that filters dropped since the batch before;
        ``rollout/dynamic_filter/raised``: groups whose filter raised; ``rollout/drop_REASON``: groups given up for
        another reason (stale, rewound); ``rollout/reward_before_filters``: mean over the samples of this batch and of
        those filtered meanwhile; ``rollout/partial_groups`` and ``rollout/missing_samples``: groups of this batch that
        are short, and by how many samples (T11).
        """
        (before_n, before), self._last = self._last, (manifest.n, manifest.ledger)
        out: dict[str, float] = {}
        if manifest.num_partial_groups:
            out["rollout/partial_groups"] = manifest.num_partial_groups
            out["rollout/missing_samples"] = manifest.num_missing_samples
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
