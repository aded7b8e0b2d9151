"""The policy in Python and the scripts that judge by it, on random states: the same places, and the same groups."""

import random

import pytest
import redis

from penstock.protocol import scripts
from penstock.protocol.gate import read_rooms
from penstock.protocol.scripts import run
from penstock.protocol.staleness import UNBOUNDED, Lineage, Policy
from penstock.records.keys import Keys
from penstock.redis.lua_scripts import with_helpers
from tests.integration import play

STATES = 1200
#: Jobs that are offered to the gate in each state.
OFFERED = 4
MODES = {"sync": 0, "one_step": 1, "async": None}


def counted(rng: random.Random, mode: str, pool: str) -> dict[str, str]:
    """A subscription's fields as the gate may find them; some were never set."""
    bound = MODES[mode] if MODES[mode] is not None else rng.randint(0, 6)
    cohort = mode != "async" and not pool and rng.random() < 0.8
    fields: dict[str, object] = {
        "bound": bound,
        "sampler": "cohort" if cohort else rng.choice(["fifo", "oldest_version", "uniform"]),
        "share": pool,
        "gb": rng.randint(1, 12),
        "p": rng.randint(0, 30),
    }
    seldom = {"disposed": 9, "start": 9, "skipped": 9, "over": 5, "owed": 5, "parked": 1}
    fields |= {name: rng.randint(0, most) for name, most in seldom.items() if rng.random() < 0.5}
    return {name: str(value) for name, value in fields.items() if value != "" or rng.random() < 0.5}


def write_state(client: redis.Redis, keys: Keys, rng: random.Random, mode: str) -> list[list[str]]:
    """A random state of counters and subscriptions; the names that each gate counts together."""
    gates: list[list[str]] = []
    pipe = client.pipeline(transaction=False)
    pipe.delete(keys.counters, keys.subs, keys.source, keys.cohorts, keys.jobs("train"), keys.of("queued:train"))
    for number in range(rng.randint(1, 3)):
        pool = f"pool{number}" if rng.random() < 0.4 else ""
        gates.append([f"sub{number}{letter}" for letter in "abc"[: rng.randint(1, 3) if pool else 1]])
        for name in gates[-1]:
            pipe.delete(keys.sub(name))
            pipe.hset(keys.sub(name), mapping=counted(rng, mode, pool))
        if pool:
            left = {f"start:{pool}": rng.randint(0, 9), f"gone:{pool}": rng.randint(0, 9)}
            pipe.hset(keys.subs, mapping={name: many for name, many in left.items() if rng.random() < 0.7} | {"x": 1})
    many = {"seq:train": rng.randint(0, 120), "buried:train": rng.randint(0, 9), "cancelled:train": rng.randint(0, 9)}
    pipe.hset(keys.counters, mapping={name: value for name, value in many.items() if rng.random() < 0.9} | {"x": 1})
    pipe.execute()
    return gates


@pytest.mark.parametrize("mode", MODES)
def test_T3_places_in_python_are_those_that_the_gate_lets_in_by(client: redis.Redis, keys: Keys, mode: str) -> None:
    rng = random.Random(f"gate/{mode}")
    counts = client.register_script(
        f"{with_helpers('stock_of', 'places')}local members = {{}}\nfor i = 2, #KEYS do members[i - 1] = KEYS[i] end\n"
        "return {places(KEYS[1], members, stock_of(ARGV[1]))}"
    )
    outcomes = set()
    for state in range(STATES):
        gates = write_state(client, keys, rng, mode)
        rooms = read_rooms(client, keys, gates)
        for members in gates:
            known = rooms[members[0]]
            found = counts(keys=[keys.subs, *map(keys.sub, members)], args=[keys.prefix])
            assert [known.free, known.places] == found, f"state {state}, gate {members}"
        jobs = [play.job(OFFERED * state + i) for i in range(OFFERED)]
        answer = play.admit(client, keys, jobs, gate=(0, gates))  # type: ignore[arg-type]
        tightest = min(rooms, key=lambda name: rooms[name].free)
        assert answer.admitted == max(0, min(OFFERED, rooms[tightest].free))
        assert answer.sub == ("" if answer.admitted else tightest)
        outcomes.add(answer.admitted)
        client.delete(*(keys.group(one.id) for one in jobs))
    assert outcomes == set(range(OFFERED + 1)), "the states lie on both sides of the gate"


def lineage_of(rng: random.Random, at: int) -> Lineage:
    spans = []
    for _ in range(rng.randint(0, 2)):
        first = rng.randint(1, at)
        spans.append((first, rng.randint(first, at)))
    return Lineage(tuple(spans), frozenset(rng.sample(range(1, at + 1), rng.randint(0, 1))))


@pytest.mark.parametrize("on_expiry", ["wait", "mask", "drop"])
def test_I6_the_cut_refuses_the_groups_that_the_policy_gives_up(
    client: redis.Redis, keys: Keys, on_expiry: scripts.Value
) -> None:
    rng = random.Random(f"cut/{on_expiry}")
    play.subscribe(client, keys)
    leader, n, outcomes = play.lead(client, keys), 1, set()
    for state in range(STATES):
        at = rng.randint(1, 12)
        bound = rng.choice([UNBOUNDED, 0, 0, 1, 1, 2, 3, 4, 5])
        policy = Policy(rng.choice(["sync", "one_step", "async"]), bound, on_expiry, "fifo")  # type: ignore[arg-type]
        floor = policy.floor(lineage_of(rng, at), at)
        near = max(-1, floor - 1)
        drawn = [rng.choice([-1, at, rng.randint(near, at), rng.randint(-1, at)]) for _ in range(rng.randint(1, 3))]
        jobs = [f"d/0/{10 * state + i}" for i in range(len(drawn))]
        pipe = client.pipeline(transaction=False)
        pipe.hset(keys.clock, scripts.version_field(play.MODEL), at)
        for job, oldest in zip(jobs, drawn, strict=True):
            pipe.hset(keys.group(job), mapping={"st": "ready", "ln": "train", "n": 1, "kept": 1, "o": oldest})
        pipe.execute()
        allowed = policy.oldest_allowed(floor)
        answer = play.cut(client, keys, leader, n, jobs, oldest_allowed=allowed, version=at)
        refused = [
            job for job, oldest in zip(jobs, drawn, strict=True)
            if not policy.masks and policy.gives_up(oldest, oldest, floor)
        ]  # fmt: skip
        assert answer == (scripts.CutAnswer("group", refused[0], "stale") if refused else scripts.CutAnswer("cut")), (
            f"state {state}"
        )
        n += not refused
        outcomes.add(answer.outcome)
        client.delete(*map(keys.group, jobs))
    assert outcomes == ({"cut"} if on_expiry == "mask" else {"cut", "group"})
    assert run(client, scripts.resign(keys, leader))
