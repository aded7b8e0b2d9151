"""Figures of one committed batch, as a row of ``steps.jsonl`` has them: computed from the manifest alone."""

import math
from contextlib import suppress
from typing import Any

from penstock.consumers.metrics.tally import lengths_of, same_rewards, truncated_ratio
from penstock.protocol.records.manifest import Manifest
from penstock.text import utf8_safe

#: Most characters of a reported text.
MAX_TEXT = 1000


def batch_figures(manifest: Manifest) -> dict[str, Any]:
    """Return what every trainer knows of a batch: version, rewards, staleness, counts; None for a mean of nothing."""
    rows = manifest.samples()
    return {
        "version": manifest.train_version,
        "batch": manifest.n,
        "reward_mean": sum(one.reward for one in rows) / len(rows) if rows else None,
        # A manifest holds 0 where no token bears loss; that is no staleness.
        "staleness_max": manifest.staleness_max if manifest.num_loss_tokens else None,
        "staleness_mean": manifest.staleness_mean if manifest.num_loss_tokens else None,
        "samples": manifest.num_samples,
        "tokens": sum(one.length for one in rows),
        "generated_tokens": sum(one.num_generated for one in rows),
        "loss_tokens": manifest.num_loss_tokens,
    }


def answer_figures(manifest: Manifest) -> dict[str, float]:
    """Return figures of the answers: lengths, the share that was truncated, groups whose rewards are all equal."""
    if not (rows := manifest.samples()):
        return {}
    return {
        **{f"rollout/response_len/{kind}": value for kind, value in lengths_of(rows).items()},
        "rollout/truncated_ratio": truncated_ratio(rows),
        **{f"rollout/zero_std/count_{reward}": float(count) for reward, count in same_rewards(rows).items()},
    }


def plain_figure(value: Any) -> float | int | str | bool | None:
    """Return a reported value as JSON and msgpack can hold it: a 0-d tensor becomes a number, other objects a text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if not isinstance(value, str):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            return float(value)
    return utf8_safe(str(value)[:MAX_TEXT])


def finite_or_none(value: Any) -> Any:
    """Return ``value``, or None if it is not finite: JSON has no such number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
