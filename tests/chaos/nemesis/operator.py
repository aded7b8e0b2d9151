"""What an operator does while a run goes on, by penstock's own commands."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from random import Random
from typing import Any

from tests.chaos.cluster.audits import differing, may_tell_lost
from tests.chaos.cluster.supervisor import searched
from tests.chaos.nemesis.act import Facts, Ground, Kind, NotStruck, pick
from tests.chaos.places import RECORDED, ROOT

#: Longest time that a command may take.
COMMAND_S = 400.0
#: What a command says of a Redis that is away; its operator tries again later.
AWAY = ("No Redis answers", "does not answer", "still loading", "takes no writes", "answers with an error")
#: Most keys that are looked at for a job.
LOOKED_AT = 400


class OperatorError(AssertionError):
    """A command ended as it must not."""


def command(ground: Ground, *words: str, good: tuple[int, ...] = (0,)) -> str:
    """Run ``penstock WORDS`` on the run, recorded; what it printed to its output.

    Raises:
        OperatorError: its exit code is not in ``good``, or it was not done in ``COMMAND_S``.
        NotStruck: Redis was away.
    """
    cluster = ground.cluster
    path = searched(str(RECORDED), str(cluster.folder / "source"), str(ROOT))
    own = {"PYTHONPATH": path, "CHAOS_HISTORY": str(cluster.history), "CHAOS_WHO": "operator"}
    whole = [sys.executable, "-m", "penstock.cli", *words, "--run", cluster.keys.run, "--redis", cluster.redis_url]
    try:
        done = subprocess.run(
            whole,
            cwd=cluster.folder,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise OperatorError(f"penstock {' '.join(words)} was not done in {COMMAND_S:g} s") from exc
    said = done.stdout + done.stderr
    if done.returncode not in good:
        if any(words in said for words in AWAY):
            raise NotStruck(said.strip()[-200:])
        raise OperatorError(f"penstock {' '.join(words)} ended with {done.returncode}: {said.strip()[-1000:]}")
    return done.stdout


def jobs_in(ground: Ground, *states: str) -> list[str]:
    """Some live jobs in these states, sorted."""
    keys = ground.cluster.keys

    def look(client: Any) -> list[str]:
        _, found = client.scan(0, match=keys.group("*"), count=LOOKED_AT)
        names = [key.decode().removeprefix(keys.group("")) for key in found]
        states_of = [client.hget(keys.group(name), "st") or b"" for name in names]
        return sorted(name for name, state in zip(names, states_of, strict=True) if state.decode() in states)

    return list(ground.cluster.ask(look, []))


def _cancel(ground: Ground, rng: Random) -> Facts | None:
    state = rng.choice(["queued", "leased", "leased", "ready", "delayed"])
    jobs = jobs_in(ground, state) or jobs_in(ground, "queued", "leased", "ready", "delayed")
    return {"jobs": rng.sample(jobs, min(len(jobs), rng.randint(1, 3)))} if jobs else None


def _strike_cancel(ground: Ground, facts: Facts) -> None:
    # 1: there is no such job any more, or a batch holds it.
    command(ground, "jobs", "cancel", *facts["jobs"], good=(0, 1))


def _dead(ground: Ground, rng: Random) -> Facts | None:
    jobs = jobs_in(ground, "dead")
    return {"jobs": rng.sample(jobs, min(len(jobs), 3))} if jobs else None


def _strike_requeue(ground: Ground, facts: Facts) -> None:
    for job in facts["jobs"]:
        # 2: it was requeued or cancelled meanwhile.
        command(ground, "dead", "requeue", job, good=(0, 2))


def _pause(ground: Ground, rng: Random) -> Facts | None:
    return {"lane": rng.choice(["train", "train", "resume"]), "hold_s": round(rng.uniform(0.5, 4.0), 3)}


def _strike_pause(ground: Ground, facts: Facts) -> None:
    """A lane is paused by its key, as `penstock pause` does: two commands would last longer than the pause."""
    client, key = ground.cluster.client(), ground.cluster.keys.paused
    client.sadd(key, facts["lane"])
    try:
        time.sleep(facts["hold_s"])
    finally:
        ground.cluster.wait("a lane to be resumed", lambda: _resume(ground, facts["lane"]))


def _resume(ground: Ground, lane: str) -> bool:
    return ground.cluster.ask(lambda client: client.srem(ground.cluster.keys.paused, lane)) is not None


def subscriptions(ground: Ground) -> list[str]:
    """Names of the subscriptions that are there."""

    def look(client: Any) -> list[str]:
        return sorted(one[4:].decode() for one in client.hkeys(ground.cluster.keys.subs) if one.startswith(b"sub:"))

    return list(ground.cluster.ask(look, []))


def _size(ground: Ground, rng: Random) -> Facts | None:
    sub = pick(rng, subscriptions(ground))
    return sub and {"sub": sub, "size": rng.choice([2, 3, 4, 6]), "hold_s": round(rng.uniform(0.5, 3.0), 3)}


def _strike_size(ground: Ground, facts: Facts) -> None:
    """The batch size is another one for a while."""
    before = ground.cluster.ask(lambda client: client.hget(ground.cluster.keys.sub(facts["sub"]), "size"))
    if before is None:
        raise NotStruck(f"subscription {facts['sub']} is gone")
    command(ground, "subs", "set", facts["sub"], f"size={facts['size']}")
    time.sleep(facts["hold_s"])
    command(ground, "subs", "set", facts["sub"], f"size={before.decode()}")


def _copy(ground: Ground, rng: Random) -> Facts | None:
    """A subscription that drives nothing: dropping it is no fault of the others."""
    names = [seats.name for seats in ground.cluster.workload.trainers if not seats.drives and not seats.role]
    sub = pick(rng, [name for name in names if name in subscriptions(ground)])
    return sub and {"sub": sub}


def _strike_drop(ground: Ground, facts: Facts) -> None:
    """Dropped for good; its trainer, which is started again, makes a new one."""
    command(ground, "subs", "drop", facts["sub"])


def _server(ground: Ground, rng: Random) -> Facts | None:
    names = [part.name for part in ground.cluster.of("payload") if part.is_alive]
    return {"server": pick(rng, names), "hold_s": round(rng.uniform(0.5, 3.0), 3)} if len(names) > 1 else None


def _strike_drain(ground: Ground, facts: Facts) -> None:
    """A payload server is drained for a while, and taken back."""
    command(ground, "payloads", "drain", facts["server"], "--no-wait")
    time.sleep(facts["hold_s"])
    url = f"redis://127.0.0.1:{ground.cluster.ports[facts['server']]}/0"
    command(ground, "payloads", "add", facts["server"], url)


def _anything(ground: Ground, rng: Random) -> Facts | None:
    return {}


def _strike_audit(ground: Ground, facts: Facts) -> None:
    """An audit must be ok at any moment, but for payloads that an earlier fault lost."""
    # Asked before: what is lost while the audit looks is a fault that is not over, and it may not tell of that.
    may = may_tell_lost(ground.cluster)
    found = json.loads(command(ground, "audit", "--json", good=(0, 1)))
    if wrong := differing(found, lost_is_known=may):
        raise OperatorError(f"penstock audit says: {wrong}")


def _strike_look(words: tuple[str, ...], ground: Ground, facts: Facts) -> None:
    """What only looks must change nothing."""
    command(ground, *words)


def kinds() -> dict[str, Kind]:
    """By name."""
    return {
        "operator:cancel": Kind(_cancel, _strike_cancel),
        "operator:requeue": Kind(_dead, _strike_requeue),
        "operator:pause": Kind(_pause, _strike_pause),
        "operator:size": Kind(_size, _strike_size),
        "operator:drop": Kind(_copy, _strike_drop, weight=0.5),
        "operator:drain": Kind(_server, _strike_drain),
        "operator:audit": Kind(_anything, _strike_audit, weight=0.5),
        "operator:look": Kind(_anything, partial(_strike_look, ("why",)), weight=0.2),
    }
