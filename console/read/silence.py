"""Parts of a run that say nothing any more, as those that were killed or are frozen. Pure: reads a snapshot alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.protocol.presence import SILENT_S
from penstock.protocol.records.causes import PartSilent

#: Kinds of parts without which a run stalls, by what their waits begin with.
_PARTS = ("producer", "buffer")


def silences(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Yield (who, cause, for how many seconds) of each silent part, the longest silence first."""
    yield from sorted((*_parts(state), *_trainers(state), *_workers(state)), key=lambda one: -one[2])


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Kinds of which every process is silent: one that was started again has another record."""
    for kind in _PARTS:
        newest = min((one for one in state["parts"] if one["part"] == kind), key=lambda one: one["age_s"], default=None)
        if newest is not None and newest["age_s"] >= SILENT_S:
            yield kind, PartSilent(newest["pid"], newest["host"]), float(newest["age_s"])


def _trainers(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    for sub in state["subs"]:
        if sub.get("silent_s", 0.0) >= SILENT_S:
            yield f"trainer:{sub['name']}", PartSilent(), float(sub["silent_s"])


def _workers(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Workers, but for those whose heartbeat says that their event loop is stuck: that is the cause."""
    waits = {one["who"] for one in state["waits"] if one.get("age_s", 0.0) < SILENT_S}
    for one in state["workers"]:
        if one.age_s >= SILENT_S and f"worker:{one.name}:loop" not in waits:
            yield f"worker:{one.name}", PartSilent(one.pid, one.host), float(one.age_s)
