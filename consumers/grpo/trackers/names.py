"""Names under which figures are shown: slime's where it has one, penstock's own in the same groups elsewhere."""

import math
import re
from collections.abc import Mapping
from typing import Any

from consumers.batch.batch import Batch
from consumers.metrics.tally import lengths_of, same_rewards, truncated_ratio

#: Keys of a row of ``steps.jsonl`` that are shown under another name than ``train/KEY``; '' are not shown.
NAMES = {
    "step": "",
    "time_s": "",
    "wait_s": "perf/train_wait_time",
    "step_s": "perf/train_time",
    "publish_s": "perf/update_weights_time",
    "reward_mean": "rollout/raw_reward",
    **{
        key: f"rollout/{key}"
        for key in (
            "version",
            "batch",
            "staleness_max",
            "staleness_mean",
            "samples",
            "tokens",
            "generated_tokens",
            "loss_tokens",
        )
    },
}

#: What names of figures at all trackers are made of, the slash apart.
_UNNAMED = re.compile(r"[^\w.() -]", re.ASCII)


def of_row(row: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a row of ``steps.jsonl`` by their names; one that holds a slash is one already."""
    named = {key if "/" in key else NAMES.get(key, f"train/{key}"): value for key, value in row.items()}
    return numbers({name: value for name, value in named.items() if name})


def of_evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a row of ``eval.jsonl``: ``eval/DATASET`` is its accuracy, ``eval/DATASET/CATEGORY`` a category's."""
    name = f"eval/{row['dataset']}"
    categories = row.get("categories")
    named = categories.items() if isinstance(categories, Mapping) else ()
    return numbers(
        {name: row["accuracy"], f"{name}-truncated_ratio": row.get("truncated_ratio"), **_rates(name, row)}
    ) | {
        key: value
        for category, scores in named
        if isinstance(scores, Mapping)
        for key, value in _of_category(f"{name}/{_UNNAMED.sub('_', str(category))}", scores).items()
    }


def _of_category(name: str, scores: Mapping[str, Any]) -> dict[str, float]:
    return numbers({name: scores.get("accuracy"), **_rates(name, scores)})


def _rates(name: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}-{key}": value for key, value in scores.items() if key.startswith(("pass@", "maj@"))}


def of_manifest(batch: Batch) -> dict[str, Any]:
    """Return what every trainer knows of a batch, by the keys of ``steps.jsonl``; None for a mean of nothing."""
    manifest, rows = batch.manifest, batch.all_rows
    return {
        "version": manifest.train_version,
        "batch": batch.n,
        "reward_mean": sum(one.reward for one in rows) / len(rows) if rows else None,
        # A manifest holds 0 where no token bears loss; that is no staleness.
        "staleness_max": manifest.staleness_max if manifest.num_loss_tokens else None,
        "staleness_mean": manifest.staleness_mean if manifest.num_loss_tokens else None,
        "samples": manifest.num_samples,
        "tokens": sum(one.length for one in rows),
        "generated_tokens": sum(one.num_generated for one in rows),
        "loss_tokens": manifest.num_loss_tokens,
    }


def of_batch(batch: Batch) -> dict[str, float]:
    """Figures of a batch's answers: their lengths, how many were cut off, and groups whose rewards are all one."""
    if not (rows := batch.all_rows):
        return {}
    return {
        **{f"rollout/response_len/{kind}": value for kind, value in lengths_of(rows).items()},
        "rollout/truncated_ratio": truncated_ratio(rows),
        **{f"rollout/zero_std/count_{reward}": float(count) for reward, count in same_rewards(rows).items()},
    }


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite numbers, as floats: no tracker shows the others alike."""
    found = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
        if not isinstance(value, str) and math.isfinite(number):
            found[str(name)] = number
    return found


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A nested map as texts by dotted keys."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = str(value)
    return found
