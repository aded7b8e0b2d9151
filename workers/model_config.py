"""What a model's folder says of it: ids that end an answer, size of the vocabulary, what it routes."""

import json
from pathlib import Path
from typing import Any

from workers.routing import Routing, routing_of


def read_config(folder: str | Path, name: str = "config.json") -> dict[str, Any]:
    """A file of the model's settings; empty where there is none that can be read."""
    try:
        value = json.loads(Path(folder, name).read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_eos_token_ids(folder: str | Path) -> frozenset[int]:
    """Ids that end an answer, from the model's config and generation config."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_config(folder, name).get("eos_token_id")
        found |= {value} if isinstance(value, int) else set(value or ())
    return frozenset(found)


def read_vocab_size(folder: str | Path) -> int:
    """Number of ids of a model, from its config; 0 where that does not say."""
    config = read_config(folder)
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else 0


def read_routing(folder: str | Path) -> Routing:
    """What a model routes. Raises ConfigError where it is no mixture of experts."""
    return routing_of(read_config(folder), str(folder))
