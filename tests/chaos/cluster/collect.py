"""The account of a run that is at rest: what Redis and the payload servers hold, and what the run says that it lost."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
import redis

from penstock.history.reader import HistoryReader
from penstock.protocol.presence import live_workers
from tests.chaos.parts.drawn import DRAWN, drawn_in
from tests.chaos.recording import history
from tests.chaos.recording.account import Account, Reported

if TYPE_CHECKING:
    from tests.chaos.cluster.cluster import Cluster

#: Kinds of faults after which Redis may have forgotten what it acknowledged meanwhile, and what loses a payload server.
FORGETTING = ("redis:aof_cut", "sentinel:failover_behind")
LOSING_SERVERS = ("payloads:lost",)
#: A reply that was under way at the end of a fault may be read so much later.
AFTERWARDS_NS = 500_000_000
#: Keys of one look at a server.
COUNT = 1000


def collect(cluster: "Cluster") -> Account:
    """Read the account of a run whose parts are all up and at rest, and leave it beside its histories. Blocks."""
    client, keys = cluster.client(), cluster.keys
    assert cluster.watch is not None
    began = time.monotonic_ns()
    account = Account(
        jobs=dict(_jobs(client, keys.prefix)),
        done=list(_done(client, keys.prefix)),
        subscriptions=_subscriptions(client, keys.prefix),
        clock=_clock(client, keys.clock),
        workers=[worker.name for worker in live_workers(client, keys)],
        keys=_keys(cluster),
        memory=cluster.watch.memory,
        tokens={name.decode(): int(value) for name, value in client.hgetall(keys.tokens).items()},
        unheard=sum(int(n) for name, n in client.hgetall(keys.counters).items() if name.startswith(b"unheard:")),
        drawn=sum(map(drawn_in, cluster.history.glob(f"*{DRAWN}"))),
        reported=_reported(cluster),
        rolled_back=dict(_rolled_back(client, keys.counters)),
        rows=_rows(cluster) if client.exists(keys.history) else None,
        unrecorded=int(client.hget(keys.counters, "unrecorded") or 0),
        forgotten=list(forgotten(cluster)),
        lost_servers=list(lost_servers(cluster)),
    )
    account.read_at = (began, time.monotonic_ns())
    (cluster.history / "account.json").write_bytes(orjson.dumps(asdict(account)))
    return account


def _jobs(client: redis.Redis, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in _scan(client, f"{prefix}group:*"):
        group = {name.decode(): value.decode(errors="replace") for name, value in client.hgetall(key).items()}
        if group:
            samples = {name[2:]: token for name, token in group.items() if name.startswith("s:")}
            about = {"state": group.get("st", ""), "lane": group.get("ln", ""), "worker": group.get("own", "")}
            yield key.removeprefix(f"{prefix}group:"), about | {"samples": samples}


def _done(client: redis.Redis, prefix: str) -> Iterator[str]:
    for key in _scan(client, f"{prefix}done:*"):
        bitmap = client.get(key) or b""
        of = key.removeprefix(f"{prefix}done:")
        for place in range(8 * len(bitmap)):
            if bitmap[place // 8] >> (7 - place % 8) & 1:
                yield f"{of}/{place}"


def _subscriptions(client: redis.Redis, prefix: str) -> dict[str, dict[str, Any]]:
    names = (field[4:].decode() for field in client.hkeys(f"{prefix}subs") if field.startswith(b"sub:"))
    return {name: _subscription(client.hgetall(f"{prefix}sub:{name}")) for name in names}


def _subscription(raw: dict[bytes, bytes]) -> dict[str, Any]:
    def number(name: str) -> int:
        return int(raw.get(name.encode()) or 0)

    where = {"cut": number("cut"), "cursor": number("cursor"), "checkpoint": number("ckpt")}
    text = {name: (raw.get(name.encode()) or b"").decode() for name in ("lanes", "share")}
    return where | {"lanes": text["lanes"].split(","), "reuse": number("reuse") or 1, "pool": text["share"]}


def _clock(client: redis.Redis, key: str) -> dict[str, int]:
    fields = client.hgetall(key)
    return {name[8:].decode(): int(value) for name, value in fields.items() if name.startswith(b"version:")}


def _keys(cluster: "Cluster") -> dict[str, int]:
    """Keys of the control Redis and of payload servers, with their seconds to live."""
    found: dict[str, int] = {}
    ports = [cluster.redis_port, *(cluster.ports[part.name] for part in cluster.of("payload"))]
    for port in ports:
        with redis.Redis(port=port, socket_timeout=10.0) as client:
            for key in _scan(client, f"{cluster.keys.prefix}*"):
                ttl = int(client.ttl(key))
                if ttl != -2:  # it went meanwhile
                    found[key.removeprefix(cluster.keys.prefix)] = ttl
    return found


def _rows(cluster: "Cluster") -> list[tuple[str, int, str]]:
    """Rows of the history as everybody reads them; of a sample that has several parts the first stands for all."""
    reader = HistoryReader(cluster.folder / "runs" / cluster.keys.run / "history")
    with contextlib.closing(reader):
        rows = [(row.job, row.k, str(row.fate)) for row in reader.each() if not row.part]
        if problems := reader.problems:
            raise RuntimeError(f"the history cannot be read: {'; '.join(problems)}")
    return rows


def _scan(client: redis.Redis, pattern: str) -> Iterator[str]:
    escaped = pattern.replace("[", "\\[").replace("]", "\\]")
    return (key.decode() for key in set(client.scan_iter(escaped, count=COUNT)))


def _reported(cluster: "Cluster") -> dict[str, Reported]:
    """Samples whose payload is gone as far as Redis was told, each once."""
    reports = [one for one in history.read(cluster.history).of("report") if "samples" in one.facts]
    told = (one.answer if one.happened else one.facts for one in reports if one.may_have_happened)
    samples = sorted({name for said in told for name in said["samples"]})
    return {"samples": Reported(len(samples), list(samples))} if samples else {}


def _rolled_back(client: redis.Redis, key: str) -> Iterator[tuple[str, int]]:
    for name, value in client.hgetall(key).items():
        kind, _, counter = name.decode().partition(":")
        if kind == "rolled_back" and counter:
            yield counter, int(value)


def forgotten(cluster: "Cluster") -> Iterator[tuple[int, int]]:
    """When faults that lose what was acknowledged were at work, by the log of the nemesis."""
    for record, end in _struck(cluster):
        if record["act"]["kind"] in FORGETTING:
            yield record["mono"], int(end["ended"] * 1e9) + AFTERWARDS_NS


def lost_servers(cluster: "Cluster") -> Iterator[str]:
    """Payload servers that are lost for good, by the log of the nemesis."""
    return (record["act"]["facts"]["part"] for record, _ in _struck(cluster) if record["act"]["kind"] in LOSING_SERVERS)


def _struck(cluster: "Cluster") -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The acts of the nemesis, each with its end."""
    path = cluster.folder / "nemesis.jsonl"
    records = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    ends = {record["end"]["number"]: record["end"] for record in records if "end" in record}
    acts = (record for record in records if "act" in record)
    return ((act, ends[act["act"]["number"]]) for act in acts if act["act"]["number"] in ends)
