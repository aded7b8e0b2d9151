"""Names of figures at trackers: slime's if it has one, else penstock's own in the same groups."""

import math
import re
from collections.abc import Mapping
from typing import Any

#: Keys of a row of ``steps.jsonl`` -> other names than ``train/KEY``; '' are not shown.
NAMES = {
    "step": "",
    "total_steps": "",
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

#: Characters not allowed in names at some tracker, except the slash.
_UNNAMED = re.compile(r"[^\w.() -]", re.ASCII)


def of_row(row: Mapping[str, Any]) -> dict[str, float]:
    """Return figures of a row of ``steps.jsonl`` by their names; a key with a slash is a name already."""
    named = {key if "/" in key else NAMES.get(key, f"train/{key}"): value for key, value in row.items()}
    return numbers({name: value for name, value in named.items() if name})


#: Fields of a row of ``eval.jsonl`` that are shown as ``eval/DATASET-FIELD``.
EVAL_FIELDS = ("truncated_ratio", "mean_version", "oldest", "newest", "asked_share")


def of_evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    """Return figures of an ``eval.jsonl`` row: accuracy as ``eval/DATASET``, ``eval/DATASET/CATEGORY`` a category's."""
    name = f"eval/{row['dataset']}"
    categories = row.get("categories")
    named = categories.items() if isinstance(categories, Mapping) else ()
    return numbers(
        {name: row["accuracy"], **{f"{name}-{key}": row.get(key) for key in EVAL_FIELDS}, **_rates(name, row)}
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


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Flatten a nested map to texts by dotted keys."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = str(value)
    return found
