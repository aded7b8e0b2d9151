"""The network between the parts and their Redis: cuts, delays, one direction stopped, outages longer than a lease."""

import hashlib
import time
from functools import cache, partial
from pathlib import Path
from random import Random

from penstock.redis.lua_scripts import verb_text
from tests.chaos.cluster.proxy import DOWN, MID_REPLY, REPLY, REQUEST, UP
from tests.chaos.nemesis.act import Facts, Ground, Kind, NotStruck, names_of, pick

#: Those that reach Redis.
CLIENTS = ("producer", "worker", "buffer", "trainer", "recorder")
#: Verb -> who sends it. A cut is keyed to one of these, or to any request.
VERBS = {
    "admit": "producer", "lease": "worker", "renew": "worker", "commit": "worker", "release": "worker",
    "cut": "buffer", "seal": "buffer", "sweep": "buffer", "reclaim": "buffer", "ask": "trainer",
    "commit_batch": "trainer", "publish": "trainer", "checkpointed": "trainer", "rewind": "trainer",
    "record": "recorder", "recorded": "recorder", "unrecorded": "buffer",
}  # fmt: skip
#: Longest wait for a request of that kind.
SPRUNG_S = 15.0


@cache
def digest_of(source: Path, verb: str) -> str:
    """How requests name a verb: the digest of its script, as ``source`` has it."""
    text = verb_text(verb, source / "penstock" / "protocol" / "lua")
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _cut(ground: Ground, rng: Random) -> Facts | None:
    if ground.proxy is None:
        return None
    verb = rng.choice(["", *(verb for verb, kind in VERBS.items() if ground.cluster.of(kind))])
    name = pick(rng, names_of(ground, VERBS[verb] if verb else rng.choice(_clients(ground))))
    return name and {"ways": [name], "verb": verb, "count": rng.choice([1, 1, 1, 3])}


def _clients(ground: Ground) -> list[str]:
    """Those that the workload has."""
    return [kind for kind in CLIENTS if ground.cluster.of(kind)]


def _ways(ground: Ground, rng: Random) -> Facts | None:
    """One part, or all of them; and for how long."""
    if ground.proxy is None:
        return None
    kind = rng.choice(_clients(ground))
    name = pick(rng, names_of(ground, kind))
    if name is None:
        return None
    longest = ground.past_lease_s("trainer" if rng.random() < 0.5 else kind, rng)
    return {"ways": [] if rng.random() < 0.3 else [name], "hold_s": longest}


def _delayed(ground: Ground, rng: Random) -> Facts | None:
    facts = _ways(ground, rng)
    return facts and facts | {"delay_s": round(rng.choice([0.02, 0.1, 0.5]), 3)}


def _strike_cut(where: str, ground: Ground, facts: Facts) -> None:
    assert ground.proxy is not None
    match = digest_of(ground.cluster.source, facts["verb"]) if facts["verb"] else ""
    trap = ground.proxy.trap(where, match, facts["count"], facts["ways"])
    deadline = time.monotonic() + SPRUNG_S
    try:
        while not ground.proxy.sprung(trap):
            if time.monotonic() > deadline:
                raise NotStruck(f"no {facts['verb'] or 'request'} came in {SPRUNG_S:g} s")
            time.sleep(0.02)
    finally:
        if facts["count"] == 1:
            ground.proxy.open(facts["ways"])


def _strike_hold(directions: tuple[str, ...], ground: Ground, facts: Facts) -> None:
    assert ground.proxy is not None
    ground.proxy.hold(directions, facts["ways"])
    _leave_for(ground, facts)


def _strike_refuse(ground: Ground, facts: Facts) -> None:
    assert ground.proxy is not None
    ground.proxy.refuse(facts["ways"])
    _leave_for(ground, facts)


def _strike_delay(ground: Ground, facts: Facts) -> None:
    assert ground.proxy is not None
    ground.proxy.delay(facts["delay_s"], facts["ways"])
    _leave_for(ground, facts)


def _leave_for(ground: Ground, facts: Facts) -> None:
    assert ground.proxy is not None
    try:
        time.sleep(facts["hold_s"])
    finally:
        ground.proxy.open(facts["ways"])


def kinds() -> dict[str, Kind]:
    """By name."""
    cuts = {
        f"net:cut_{where}": Kind(_cut, partial(_strike_cut, where), moments=()) for where in (REQUEST, REPLY, MID_REPLY)
    }
    return cuts | {
        "net:stop_up": Kind(_ways, partial(_strike_hold, (UP,))),
        "net:stop_down": Kind(_ways, partial(_strike_hold, (DOWN,))),
        "net:silence": Kind(_ways, partial(_strike_hold, (UP, DOWN))),
        "net:refuse": Kind(_ways, _strike_refuse),
        "net:delay": Kind(_delayed, _strike_delay),
    }
