"""Whether a Redis has room: above a share of its maxmemory nothing more is admitted or written."""

from collections.abc import Mapping
from typing import Any

#: That share. The buffer and the trainers need the rest to make room.
FULL = 0.85


def is_full(info: Mapping[str, Any]) -> bool:
    """Whether there is no room for more.

    Args:
        info: what ``INFO memory`` says; without a maxmemory there is always room.
    """
    return bool(info["maxmemory"]) and info["used_memory"] > FULL * info["maxmemory"]
