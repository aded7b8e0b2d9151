"""Settings in a model's folder: config.json and generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of the model's settings; empty if it does not exist or cannot be read."""
    try:
        value = json.loads(Path(folder, name).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_eos_token_ids(folder: str | Path) -> frozenset[int]:
    """Return the ids that end an answer, from the model's config and generation config."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_config(folder, name).get("eos_token_id")
        found.update(one for one in (value if isinstance(value, list) else [value]) if type(one) is int)
    return frozenset(found)


def read_vocab_size(folder: str | Path) -> int:
    """Return the vocabulary size from a model's config; 0 if it has none."""
    config = read_config(folder)
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0


def count_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts of a mixture layer, from the model's config.json; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if isinstance(count := config.get(name), int) and count), 0)
