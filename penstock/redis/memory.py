"""Memory limit of a Redis: above a share of its maxmemory nothing more is admitted or written."""

from collections.abc import Mapping
from typing import Any

#: The share. The buffer and the trainers need the rest to free memory.
FULL = 0.85


def is_full(info: Mapping[str, Any]) -> bool:
    """Return whether the limit is reached.

    Args:
        info: answer of ``INFO memory``; without a maxmemory it is never full.
    """
    return bool(info["maxmemory"]) and info["used_memory"] > FULL * info["maxmemory"]
