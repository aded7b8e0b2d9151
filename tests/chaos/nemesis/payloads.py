"""A payload server that is lost for good: its data is gone, the operator gives it up, and another takes its place."""

import shutil
from random import Random

import redis

from tests.chaos.nemesis.act import Facts, Ground, Kind, names_of, pick
from tests.chaos.nemesis.operator import command


def _choose(ground: Ground, rng: Random) -> Facts | None:
    """There is another one that lives, so that work goes on meanwhile."""
    names = names_of(ground, "payload")
    return {"part": pick(rng, names)} if len(names) > 1 else None


def _strike(ground: Ground, facts: Facts) -> None:
    cluster = ground.cluster
    part = cluster.parts[facts["part"]]
    cluster.supervisor.retire(part, 9)
    cluster.wait(f"{part.name} to be dead", lambda: not part.is_alive)
    shutil.rmtree(cluster.folder / part.name)
    command(ground, "payloads", "lose", part.name)
    new = cluster.start("payload").name
    with redis.Redis(port=cluster.ports[new], retry=None) as client:
        cluster.wait(f"{new} to answer", lambda: _answers(client))
    command(ground, "payloads", "add", new, f"redis://127.0.0.1:{cluster.ports[new]}/0")


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


#: Kinds that lose what was acknowledged, by their nature.
LOSSY = frozenset({"payloads:lost"})


def kinds() -> dict[str, Kind]:
    """By name."""
    return {"payloads:lost": Kind(_choose, _strike, weight=0.5)}
