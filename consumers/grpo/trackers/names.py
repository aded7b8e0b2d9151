"""Names of a run's figures at trackers, which follow slime's if it has one."""

import math
import re
from collections.abc import Mapping
from typing import Any

#: Keys of a row of ``steps.jsonl`` -> other names than ``train/KEY``; '' are not shown.
NAMES = {
    **dict.fromkeys(("step", "total_steps", "time_s"), ""),
    "wait_s": "perf/train_wait_time",
    "step_s": "perf/train_time",
    "publish_s": "perf/update_weights_time",
    "reward_mean": "rollout/raw_reward",
    **{
        key: f"rollout/{key}"
        for key in ("version", "batch", "staleness_max", "staleness_mean", "samples", "tokens", "generated_tokens",
                    "loss_tokens")
    },
}  # fmt: skip
#: Fields of a row of ``eval.jsonl`` that are shown as ``eval/DATASET-FIELD``.
EVAL_FIELDS = ("truncated_ratio", "mean_version", "oldest", "newest", "asked_share")
#: Characters not allowed in names at some tracker, except the slash.
_UNNAMED = re.compile(r"[^\w.() -]", re.ASCII)


def of_row(row: Mapping[str, Any]) -> dict[str, float]:
    """Return figures of a row of ``steps.jsonl`` by their names; a key with a slash is a name already."""
    named = {key if "/" in key else NAMES.get(key, f"train/{key}"): value for key, value in row.items()}
    return numbers({name: value for name, value in named.items() if name})


def of_evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    """Return figures of an ``eval.jsonl`` row: accuracy as ``eval/DATASET``, ``eval/DATASET/CATEGORY`` a category's."""
    name, categories = f"eval/{row['dataset']}", row.get("categories")
    found = {f"{name}-{key}": row.get(key) for key in EVAL_FIELDS} | _of_scores(name, row)
    for category, scores in categories.items() if isinstance(categories, Mapping) else ():
        if isinstance(scores, Mapping):
            found |= _of_scores(f"{name}/{_UNNAMED.sub('_', str(category))}", scores)
    return numbers(found)


def _of_scores(name: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    rates = {f"{name}-{key}": value for key, value in scores.items() if key.startswith(("pass@", "maj@"))}
    return {name: scores.get("accuracy"), **rates}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers, as floats: trackers differ in their handling of others."""
    found = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
        if not isinstance(value, str) and math.isfinite(number):
            found[str(name)] = number
    return found
