"""Moments that a fault is keyed to: what happens in a run, as seen from Redis and from its folder of weights."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.nemesis.act import Ground

#: Between two looks, and the longest wait for a moment: after it the fault strikes all the same.
LOOK_S, PATIENCE_S = 0.004, 15.0


def _places(ground: Ground, field: str) -> Any:
    """The field of every subscription."""

    def ask(client: Any) -> Any:
        keys = ground.cluster.keys
        subs = sorted(name[4:].decode() for name in client.hkeys(keys.subs) if name.startswith(b"sub:"))
        return [client.hget(keys.sub(name), field) for name in subs]

    return ground.cluster.ask(ask)


def _leased(ground: Ground) -> Any:
    """Leases so far: each takes an entry out of the queue."""
    return ground.cluster.ask(lambda client: client.zcard(ground.cluster.keys.of("inflight")))


def _retirement(ground: Ground) -> Any:
    """Groups are done with, wait for the recorder, were recorded, or are gone."""
    keys = ground.cluster.keys

    def ask(client: Any) -> Any:
        pipe = client.pipeline(transaction=True)
        pipe.zcard(keys.unrecorded)
        pipe.scard(keys.retiring)
        pipe.hget(keys.counters, "retired")
        return pipe.execute()

    return ground.cluster.ask(ask)


def _publication(ground: Ground) -> Any:
    keys = ground.cluster.keys
    return ground.cluster.ask(lambda client: client.xrevrange(keys.weights("policy"), count=1))


def _weights(ground: Ground) -> Any:
    """What lies in the folder of weights: a version is there before it is announced, or told of as whole."""
    folder = Path(ground.cluster.folder, "runs", ground.cluster.keys.run, "weights")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None


#: Name -> what changes when the moment is there.
MOMENTS: dict[str, Callable[[Ground], Any]] = {
    "cut": lambda ground: _places(ground, "cut"),
    "commit": lambda ground: _places(ground, "cursor"),
    "checkpoint": lambda ground: _places(ground, "ckpt"),
    "lease": _leased,
    "retirement": _retirement,
    "publication": _publication,
    "weights": _weights,
}


def await_moment(ground: Ground, moment: str, after_s: float, patience_s: float = PATIENCE_S) -> bool:
    """Block until ``moment`` has come, and ``after_s`` more. False where it did not come in ``patience_s``."""
    came = not moment or _changes(lambda: MOMENTS[moment](ground), patience_s)
    time.sleep(after_s)
    return came


def _changes(look: Callable[[], Any], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    before = look()
    while (now := look()) == before or now is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True
