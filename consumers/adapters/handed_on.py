"""Convert a row of a trainer's own dataset to the label and metadata that a run's rewards get."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.errors import ConfigError

#: Deepest nesting of a value.
MAX_DEPTH = 16


def label(value: Any) -> dict[str, Any]:
    """Return ``label`` and ``label_value`` of a ``Request``: text unchanged, anything else as JSON and as the value.

    None becomes an empty label. Raises ConfigError for values that a record cannot hold.
    """
    found = plain(value, "the label")
    if found is None or isinstance(found, str):
        return {"label": found or ""}
    return {"label": json.dumps(found, ensure_ascii=False), "label_value": found}


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """Convert a value to plain types that msgpack can encode. Raises ConfigError for any other type."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name} is nested more than {MAX_DEPTH} deep: it cannot be handed on to a reward.")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(item, name, depth + 1) for item in value]
    raise ConfigError(
        f"{name} holds a {type(value).__name__}, which cannot be handed on to a reward: keep to numbers, text, lists "
        "and maps."
    )
