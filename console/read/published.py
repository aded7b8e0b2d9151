"""Durations of publications, from the trainer's rows; available after the run, too."""

from collections.abc import Mapping, Sequence
from typing import Any

#: Most steps returned, the latest ones.
MOST = 2000


def list_published(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per step that was published, latest first: ``step``, ``took_s`` and ``time_s``."""
    rows = [
        {"step": step["step"], "took_s": step.get("publish_s"), "time_s": step.get("time_s")}
        for step in steps[-MOST:]
        if isinstance(step.get("publish_s"), int | float) and step["publish_s"] > 0
    ]
    return rows[::-1]
