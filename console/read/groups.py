"""Ready groups: their age, and for each subscription whether they are cut, or why not yet."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.buffer.group import Group, read_group
from penstock.buffer.samplers import make_pool
from penstock.buffer.view import View
from penstock.config.subscription import Definition
from penstock.console.read.jobs import reason_of
from penstock.console.read.samples import read_groups
from penstock.console.resources import GROUPS
from penstock.errors import ProtocolError
from penstock.protocol.position import Position
from penstock.protocol.waits import read_waits
from penstock.records.codec import count_of, name_in, name_shown
from penstock.records.keys import Keys
from penstock.records.record import readable
from penstock.records.sample_meta import SampleMeta, iter_metas
from penstock.redis.commands import Client


@dataclass(frozen=True, slots=True)
class _Reader:
    """A subscription, and what its next batch waits for ('' if the buffer reports nothing)."""

    name: str
    view: View
    waits_for: str
    asked: bool


def list_groups(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return a row per ready group and subscription of its lane, by completion; one row if there is no subscription.

    Blocks for a round trip per ``CHUNK`` groups, and a few more. ``staleness``: in versions, of the oldest token, if
    the next batch of that subscription held it. ``state``: ready, cut, given up, or unreadable.
    """
    readers = _readers(client, keys)
    ready = client.zrangebyscore(keys.ready, "-inf", "+inf", withscores=True)
    places = {name_shown(name): int(place) for name, place in ready}
    rows: list[dict[str, Any]] = []
    for job, raw, meta in read_groups(client, keys, [*places]):
        rows += _rows(*_group(job, raw, meta, places[job]), readers)
    return rows


def _readers(client: Client, keys: Keys) -> list[_Reader]:
    clock = {name_shown(name): count_of(value, "A clock") for name, value in client.hgetall(keys.clock).items()}
    waits = {wait.who: str(wait.cause) for wait in read_waits(client, keys)}
    named = {field: b"" for field in client.hkeys(keys.subs) if field.startswith(b"sub:")}
    return readable(named, lambda field, _: _reader(client, keys, name_in(field[4:], "A subscription"), clock, waits))


def _reader(client: Client, keys: Keys, name: str, clock: Mapping[str, int], waits: Mapping[str, str]) -> _Reader:
    raw = client.hgetall(keys.sub(name))
    definition, position = Definition.read(raw, name), Position.read(raw, name)
    newest = max((version for field, version in clock.items() if field.startswith("version:")), default=0)
    pool = make_pool(
        definition.sampler, seed=definition.seed, priority=definition.priority, exponent=definition.exponent
    )
    own = clock.get(f"version:{definition.model}", 0) if definition.model else 0
    view = View(name, definition, position, pool, clock=own, newest=newest)
    return _Reader(name, view, waits.get(f"buffer:{name}", ""), position.ask > position.cut)


def _group(job: str, raw: Mapping[bytes, bytes], meta: bytes, place: int) -> tuple[Group | None, dict[str, Any]]:
    about: dict[str, Any] = dict.fromkeys(GROUPS.fields) | {"job": job, "lane": name_shown(raw.get(b"ln", b""))}
    try:
        group = read_group(job, raw, place)
        group.kept = count_of(raw.get(b"kept"), f"What is kept of group {job}")
        records = list(iter_metas(meta, f"metadata of group {job}"))
    except ProtocolError as exc:
        return None, about | {"state": "unreadable", "why": str(exc)}
    group.versions = tuple(sorted({v for one in records for v in _versions(one)}))
    done_s = max((one.drawn_s + one.reward_s for one in records), default=0.0)
    about |= {"seq": group.seq, "samples": group.n, "wanted": group.wanted, "kept": group.kept}
    about |= {"oldest": group.oldest, "newest": group.newest, "tokens": sum(one.length for one in records)}
    about |= {"num_bytes": sum(one.num_bytes for one in records)}
    about |= {"reward_mean": sum(one.reward for one in records) / len(records) if records else None}
    return group, about | {"age_s": max(0.0, time.time() - done_s) if done_s else None}


def _versions(record: SampleMeta) -> set[int]:
    named = {version for version, _ in record.loss_by_version} | {record.oldest, record.newest}
    return {version for version in named if version >= 0}


def _rows(group: Group | None, about: dict[str, Any], readers: Sequence[_Reader]) -> list[dict[str, Any]]:
    if group is None:
        return [about]
    rows = [about | _stands(group, one) for one in readers if group.lane in one.view.definition.lanes]
    return rows or [about | {"state": "ready", "why": f"no subscription is of lane {group.lane}"}]


def _stands(group: Group, reader: _Reader) -> dict[str, Any]:
    """Return the state of a group in one subscription."""
    view, uses = reader.view, group.uses.get(reader.view.definition.account(reader.name), 0)
    state, why = _judge(group, reader, uses)
    return {
        "subscription": reader.name,
        "staleness": view.position.lineage.lag(group.oldest, view.train_version),
        "bound": view.policy.bound if view.policy.bound >= 0 else None,
        "batch": group.batches.get(reader.name),
        "state": state,
        "why": why,
    }


def _judge(group: Group, reader: _Reader, uses: int) -> tuple[str, str]:
    view = reader.view
    batch, position = group.batches.get(reader.name), view.position
    if reason := reason_of(uses):
        return "given up", reason
    if uses >= view.definition.reuse:
        return "cut", _in_batch(batch, position)
    if group.kept < group.n:
        return "ready", f"the buffer has yet to keep the payloads of {group.n - group.kept} samples"
    if not all(map(position.lineage.lives, group.versions)):
        return "ready", "it holds a version that a rewind abandoned, and is about to be given up"
    if view.policy.gives_up(group.oldest, group.newest, view.floor):
        return "ready", "it is too old, and is about to be given up"
    return "ready", _next_batch(reader)


def _in_batch(batch: int | None, position: Position) -> str:
    if batch is None:
        return "another member of its pool had it"
    if batch > position.cursor:
        return f"batch {batch} is not committed yet"
    return f"batch {batch} is committed" + ("" if batch <= position.ckpt else ", and no checkpoint is past it yet")


def _next_batch(reader: _Reader) -> str:
    n = reader.view.n
    if reader.waits_for:
        return f"batch {n} waits for {reader.waits_for}"
    return f"batch {n} is about to be cut" if reader.asked else f"its trainer has not asked for batch {n}"
