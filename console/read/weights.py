"""Weights: publications as rows, with their folders and sizes, and the workers that use them."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.console.resources import WEIGHTS
from penstock.errors import ProtocolError
from penstock.protocol.presence import GONE_S, WorkerPresence, read_workers
from penstock.protocol.scripts import whole_of
from penstock.records.codec import count_of, name_shown, unpack_map
from penstock.records.keys import Keys
from penstock.records.publication import Publication, Whole
from penstock.records.record import readable
from penstock.redis.commands import Client, Entry

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


#: Publications read per round trip.
CHUNK = 16


def list_weights(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return the publications that Redis remembers, newest first. Blocks for a few round trips, and for the disk.

    Returns:
        ``folder``: here, not seen from this machine, or still to come; ``num_bytes``: of its files if they are here,
        else of its tensors; ``write_s``: the time to write them. None if unknown.
    """
    workers = [one for one in read_workers(client, keys) if one.age_s < GONE_S]
    models = (name_shown(one[8:]) for one in client.hkeys(keys.clock) if one.startswith(b"version:"))
    return [row for model in models for row in _of_model(client, keys, model, workers)]


def _of_model(client: Client, keys: Keys, model: str, workers: list[WorkerPresence]) -> Iterator[dict[str, Any]]:
    has = {one.name: one.version for one in workers}
    loading = dict(readable(client.hgetall(keys.loading(model)), _loading))
    pins = dict(
        readable(client.hgetall(keys.pins(model)), lambda name, raw: (name_shown(name), count_of(raw, "A pin")))
    )

    def holders(version: int) -> dict[str, list[str]]:
        return {
            "workers": sorted(name for name, held in has.items() if held == version),
            "loading": sorted(name for name in has if version in loading.get(name, ()) and has[name] != version),
            "pinned_by": sorted(name for name, held in pins.items() if held == version),
        }

    aside = client.hgetall(keys.aside(model))
    whole = dict(readable(client.hgetall(keys.whole(model)), lambda name, raw: _whole(name, raw, model)))
    newest = True
    for entry in _entries(client, keys, model):
        yield _row(entry, model, holders, aside, whole, newest)
        newest = False


def _entries(client: Client, keys: Keys, model: str) -> Iterator[Entry]:
    end = "+"
    while entries := client.xrevrange(keys.weights(model), end, "-", CHUNK):
        yield from entries
        end = f"({name_shown(entries[-1][0])}"


def _row(
    entry: Entry,
    model: str,
    holders: Callable[[int], dict[str, list[str]]],
    aside: Mapping[bytes, bytes],
    whole: Mapping[int, Whole],
    newest: bool,
) -> dict[str, Any]:
    name = name_shown(entry[0])
    row: dict[str, Any] = dict.fromkeys(WEIGHTS.fields) | {"id": name, "model": model}
    try:
        told = Publication.from_bytes(entry[1].get(b"p", b""), f"publication {name} of model {model}")
    except ProtocolError as exc:
        return row | {"state": str(exc)}
    if told.version in whole:
        told = whole[told.version].of_publication(told)
    size = _size(told.path) if told.is_whole else None
    row |= {field: getattr(told, field) for field in ("version", "step", "through", "transport", "path")}
    missing = "not seen from here" if told.is_whole else "still to come"
    row |= {"path": told.path or None, "folder": missing if size is None else "here"}
    row |= {"num_bytes": size or told.num_bytes or None, "write_s": told.write_s or None}
    row |= {"age_s": max(0.0, time.time() - told.published_s)}
    return row | holders(told.version) | {"state": _state(aside.get(entry[0]), newest)}


def _state(aside: bytes | None, newest: bool) -> str:
    if aside is not None:
        return f"set aside, engines died of it: {name_shown(aside)}"
    return "newest" if newest else ""


def _size(path: str) -> int | None:
    """Return the size of the files in a folder; None if it is missing or unreadable."""
    try:
        with os.scandir(path) as entries:
            return sum(one.stat().st_size for one in entries if one.is_file())
    except (OSError, ValueError):
        return None


def _whole(name: bytes, raw: bytes, model: str) -> tuple[int, Whole]:
    version = count_of(name, "A version whose folder was announced")
    return version, whole_of(raw, version, model)


def _loading(name: bytes, raw: bytes) -> tuple[str, list[int]]:
    what = f"What worker {name_shown(name)} loads"
    versions = unpack_map(raw, what).get("versions")
    if not isinstance(versions, list) or not set(map(type, versions)) <= {int}:
        raise ProtocolError(f"{what} is not a list of versions.")
    return name_shown(name), versions
