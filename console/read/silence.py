"""Parts of a run that say nothing any more, as those that were killed or are frozen. Pure: reads a snapshot alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.protocol.presence import SILENT_S

#: Kinds of parts without which a run stalls, by what their waits begin with.
_PARTS = ("producer", "buffer")


def silences(state: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield (who, what it needs, for how many seconds) of each silent part, the longest silence first."""
    found = [*_parts(state), *_trainers(state), *_workers(state)]
    yield from sorted(((who, _need(about), age_s) for who, about, age_s in found), key=lambda one: -one[2])


def _need(about: str) -> str:
    return f"a start: it has been silent since then, killed or frozen{about and f' ({about})'}"


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Kinds of which every process is silent: one that was started again has another record."""
    for kind in _PARTS:
        newest = min((one for one in state["parts"] if one["part"] == kind), key=lambda one: one["age_s"], default=None)
        if newest is not None and newest["age_s"] >= SILENT_S:
            yield kind, f"pid {newest['pid']} on {newest['host']}", float(newest["age_s"])


def _trainers(state: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for sub in state["subs"]:
        if sub.get("silent_s", 0.0) >= SILENT_S:
            yield f"trainer:{sub['name']}", "", float(sub["silent_s"])


def _workers(state: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Workers, but for those whose heartbeat says that their event loop is stuck: that is the cause."""
    waits = {one["who"] for one in state["waits"] if one.get("age_s", 0.0) < SILENT_S}
    for one in state["workers"]:
        if one.age_s >= SILENT_S and f"worker:{one.name}:loop" not in waits:
            yield f"worker:{one.name}", f"pid {one.pid} on {one.host}", float(one.age_s)
