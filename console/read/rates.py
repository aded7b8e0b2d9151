"""Success rates of prompts in datasets with a curriculum: a row for each dataset, and one prompt."""

from typing import Any

from penstock.console.resources import DATA
from penstock.errors import ConfigError
from penstock.names import is_name
from penstock.protocol.pass_rate import MOST_GROUPS, PARTS, PromptRate, read_chunks, read_prompt_rate
from penstock.records.codec import count_shown, name_shown
from penstock.records.keys import Keys
from penstock.redis.commands import Client

_SKIPPED = ("skipped_easy", "skipped_hard")


def list_datasets(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return a row for each dataset with a counted group or a skipped prompt. Blocks for each 4,096 prompts.

    ``prompts`` have a counted group; of those ``always``, ``between`` and ``never`` count prompts by whether all,
    some or none of the answers in their kept groups are right; ``mean`` is the mean share of right answers per prompt.
    """
    rows: dict[str, dict[str, Any]] = {}
    sums: dict[str, float] = {}
    for dataset, _, data in read_chunks(client, keys):
        row = rows.setdefault(dataset, _empty(dataset))
        counts, total = _sum_up(data)
        for kind, count in counts.items():
            row[kind] += count
        sums[dataset] = sums.get(dataset, 0.0) + total
    for name, value in client.hgetall(keys.counters).items():
        kind, _, dataset = name_shown(name).partition(":")
        if kind in _SKIPPED:
            rows.setdefault(dataset, _empty(dataset))[kind] = count_shown(value)
    for dataset, total in sums.items():
        if not rows[dataset]["prompts"]:
            continue
        rows[dataset]["mean"] = round(total / rows[dataset]["prompts"], 6)
    return [rows[dataset] for dataset in sorted(rows)]


def _sum_up(data: bytes) -> tuple[dict[str, int], float]:
    """Count the prompts of a string that have groups, and are always, sometimes and never right; sum their means."""
    import numpy as np

    padded = data + bytes(-len(data) % MOST_GROUPS)
    shares = np.frombuffer(padded, dtype=np.uint8).reshape(-1, MOST_GROUPS).astype(np.int64)
    groups = (shares > 0).sum(axis=1)
    shares, groups = shares[groups > 0], groups[groups > 0]
    parts = np.maximum(shares - 1, 0).sum(axis=1)
    always, never = int((parts == PARTS * groups).sum()), int((parts == 0).sum())
    counts = {"prompts": len(groups), "always": always, "never": never, "between": len(groups) - always - never}
    return counts, float((parts / (PARTS * groups)).sum())


def _empty(dataset: str) -> dict[str, Any]:
    return dict.fromkeys(DATA.fields, 0) | {"dataset": dataset, "mean": None}


def state_of(rate: PromptRate) -> str:
    """Return whether a prompt's kept groups are ``always``, ``never`` or ``between`` right."""
    return "always" if min(rate.shares) == 1 else "never" if max(rate.shares) == 0 else "between"


def prompt_of(text: str) -> tuple[str, int]:
    """Parse DATASET/LINE to dataset and line. Raises ConfigError."""
    dataset, _, line = text.rpartition("/")
    if not is_name(dataset) or not (line.isascii() and line.isdigit() and len(line) < 16):
        raise ConfigError(f"invalid prompt {text!r}: give DATASET/LINE, such as gsm8k/17.")
    return dataset, int(line)


def show_prompt(client: Client, keys: Keys, prompt: str) -> dict[str, Any] | None:
    """Return one prompt (DATASET/LINE); None if no group of it was counted. Blocks for a round trip."""
    dataset, index = prompt_of(prompt)
    found = read_prompt_rate(client, keys, dataset, index)
    if found is None:
        return None
    words = {"always": "always right", "never": "never right", "between": "sometimes right"}
    return {
        "dataset": dataset,
        "line": index,
        "state": words[state_of(found)],
        "mean": found.mean,
        "shares": list(found.shares),
    }
