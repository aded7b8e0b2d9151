"""Redis: killed each second, full, its append-only file cut in the middle; its scripts and connections forgotten."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import redis

from tests.chaos.nemesis.act import Facts, Ground, Kind, NotStruck

#: Room that a full Redis has left, in bytes: what is written first after it is another verb each time.
LEFT_BYTES = (0, 4096, 65536)


def _kills(ground: Ground, rng: Random) -> Facts | None:
    return {"part": "redis", "times": rng.randint(3, 6), "apart_s": 1.0} if ground.failover is None else None


def _strike_kills(ground: Ground, facts: Facts) -> None:
    part = ground.cluster.parts[facts["part"]]
    for _ in range(facts["times"]):
        ends = len(part.exits)
        ground.cluster.wait(f"{part.name} to live", lambda: part.is_alive)
        time.sleep(facts["apart_s"])
        ground.cluster.kill(part)
        ground.cluster.wait(f"{part.name} to die", lambda: len(part.exits) > ends)  # noqa: B023


def _full(ground: Ground, rng: Random) -> Facts | None:
    return {"left_bytes": rng.choice(LEFT_BYTES), "hold_s": ground.past_lease_s("worker", rng)}


def _strike_full(ground: Ground, facts: Facts) -> None:
    """Full for a while, then room again; a server that dies meanwhile has its own setting again."""
    client = ground.cluster.client()
    before = client.config_get("maxmemory")["maxmemory"]
    try:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + facts["left_bytes"])
        time.sleep(facts["hold_s"])
    finally:
        ground.cluster.wait("room in Redis", lambda: ground.cluster.ask(lambda one: _give_room(one, before)))


def _give_room(client: redis.Redis, max_memory: str) -> bool:
    return bool(client.config_set("maxmemory", max_memory))


def _once(ground: Ground, rng: Random) -> Facts | None:
    return {} if ground.failover is None else None


def _strike_flush(ground: Ground, facts: Facts) -> None:
    ground.cluster.client().script_flush()


def _strike_disconnect(ground: Ground, facts: Facts) -> None:
    ground.cluster.client().client_kill_filter(_type="normal", skipme=True)


def _strike_rewrite(ground: Ground, facts: Facts) -> None:
    """Killed while its append-only file is rewritten."""
    with contextlib.suppress(redis.ResponseError):  # one is under way
        ground.cluster.client().bgrewriteaof()
    ground.cluster.kill(ground.cluster.parts["redis"])


# --- the append-only file cut ------------------------------------------------------------------------------------


def append_only_file(folder: Path) -> Path:
    """What a server writes to now: of several (Redis 7) the newest increment."""
    many = sorted(folder.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    return many[-1] if many else folder / "appendonly.aof"


def _aof(ground: Ground, rng: Random) -> Facts | None:
    path = append_only_file(ground.cluster.folder / "redis")
    if not path.exists() or ground.failover is not None:
        return None
    # The last second or two of work; where in a record the cut falls is left to chance.
    return {"part": "redis", "window_s": round(rng.uniform(0.3, 2.5), 3), "share": round(rng.random(), 6)}


def _strike_aof(ground: Ground, facts: Facts) -> None:
    path = append_only_file(ground.cluster.folder / "redis")
    before = path.stat().st_size
    time.sleep(facts["window_s"])
    with _down(ground, facts["part"]):
        if append_only_file(ground.cluster.folder / "redis") != path or path.stat().st_size < before:
            raise NotStruck("the append-only file was rewritten meanwhile, and Redis only killed")
        cut_file(path, before, facts["share"])
    rewrite(ground)


def rewrite(ground: Ground) -> None:
    """The append-only file is written anew; blocks until it is.

    As whoever runs a Redis 6.2 has to after a power loss, and as penstock's own does at its start.
    """
    cluster = ground.cluster
    cluster.wait("Redis to answer", lambda: cluster.ask(lambda client: client.ping()))
    cluster.wait("a rewrite to begin", lambda: cluster.ask(lambda client: client.bgrewriteaof()))
    cluster.wait("a rewrite to end", lambda: cluster.ask(_is_rewritten))


def _is_rewritten(client: redis.Redis) -> bool:
    now = client.info("persistence")
    return not (now["aof_rewrite_in_progress"] or now["aof_rewrite_scheduled"])


def cut_file(path: Path, keep: int, share: float) -> int:
    """Cut ``path`` between its first ``keep`` bytes and its end, at that share of the way; the bytes it lost."""
    size = path.stat().st_size
    keep = min(keep, size)
    length = keep + int((size - keep) * share)
    with path.open("r+b") as file:
        file.truncate(length)
    return size - length


@contextlib.contextmanager
def _down(ground: Ground, name: str) -> Iterator[None]:
    """The part is dead meanwhile, and is started again."""
    part = ground.cluster.parts[name]
    ground.cluster.hold_down(part)
    try:
        ground.cluster.kill(part)
        ground.cluster.wait(f"{name} to be dead", lambda: not part.is_alive)
        yield
    finally:
        ground.cluster.let_up(part)


#: Kinds that lose what was acknowledged, by their nature: what is lost must be what is reported.
LOSSY = frozenset({"redis:aof_cut"})


def kinds() -> dict[str, Kind]:
    """By name."""
    return {
        "redis:kill_each_second": Kind(_kills, _strike_kills, weight=0.5),
        "redis:full": Kind(_full, _strike_full),
        "redis:aof_cut": Kind(_aof, _strike_aof),
        "redis:rewrite_killed": Kind(_once, _strike_rewrite, weight=0.5),
        "redis:scripts_flushed": Kind(_once, _strike_flush, weight=0.3),
        "redis:disconnected": Kind(_once, _strike_disconnect, weight=0.5),
    }
