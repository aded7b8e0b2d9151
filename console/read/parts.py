"""Parts of a run as rows: workers and the fleet, trainers and their subscriptions, payload servers."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redis.exceptions import RedisError

from penstock.config.subscription import ASKED
from penstock.console.read.jobs import list_jobs
from penstock.console.resources import TRAINERS
from penstock.errors import ConfigError, PenstockError
from penstock.names import Lane
from penstock.payloads.servers import Server, read
from penstock.payloads.store import open_store
from penstock.protocol.presence import GONE_S, WorkerPresence, read_workers
from penstock.protocol.snapshot import snapshot
from penstock.protocol.subs import list_subscriptions
from penstock.protocol.waits import read_waits
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.text import redact

_DECISION = ("at", "before", "engines", "wanted", "binds", "terms")


def read_fleet(client: Client, keys: Keys) -> dict[str, Any] | None:
    """Return ``fleet_of`` the running fleet; None if no fleet runs. Blocks for a round trip. Raises ProtocolError."""
    from penstock.workers.fleet.state import read_state

    try:
        return fleet_of(read_state(client, keys))
    except ConfigError:
        return None


def fleet_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state published by ``penstock fleet up`` for views.

    ``groups`` and ``processes`` as rows; ``autoscale``: the current limit, {} if nothing is scaled; ``decisions``:
    changes of its size, latest first; unreadable ones are skipped.
    """
    auto = state["autoscale"]
    decisions = auto.get("decisions", [])
    readable = [one for one in decisions if isinstance(one, dict)] if isinstance(decisions, list) else []
    return {
        "host": state["host"],
        "age_s": state["age_s"],
        "groups": [{"group": name, **group} for name, group in state["groups"].items()],
        "processes": state["processes"],
        "endpoints": state["endpoints"],
        "autoscale": {name: value for name, value in auto.items() if name != "decisions"},
        "decisions": [{name: one.get(name) for name in _DECISION} for one in reversed(readable)],
    }


def list_workers(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return the live workers as rows, by name. Blocks for a round trip."""
    return [worker_row(one) for one in read_workers(client, keys) if one.age_s < GONE_S]


def worker_row(one: WorkerPresence) -> dict[str, Any]:
    """Return what a worker reports of itself: ``leased`` jobs; versions are None if it has none."""
    row = asdict(one)
    versions = {name: row[name] if row[name] >= 0 else None for name in ("version", "awaits")}
    # The rate of an idle worker decays without end.
    return {
        **row,
        **versions,
        "started_as": one.started_as,
        "leased": row.pop("held"),
        "tokens_per_s": round(one.tokens_per_s, 1),
    }


def read_worker(client: Client, keys: Keys, name: str) -> dict[str, Any] | None:
    """Return a worker by its name or its start name, None if it does not exist. Blocks like ``list_jobs``.

    Returns:
        the fields of its presence; ``jobs``: rows of those that it has leased; ``waits``: what its tasks wait for.
    """
    live = (one for one in read_workers(client, keys) if one.age_s < GONE_S)
    found = next((one for one in live if name in (one.name, one.started_as)), None)
    if found is None:
        return None
    jobs = [row for row in list_jobs(client, keys) if row["worker"] in (found.name, found.started_as)]
    mine = f"worker:{found.name}"
    waits = [one.to_map() for one in read_waits(client, keys) if one.who == mine or one.who.startswith(f"{mine}:")]
    return {**worker_row(found), "jobs": jobs, "waits": waits}


def head_line(state: Mapping[str, Any]) -> str:
    """Return the policy, version and step of a run, from a snapshot."""
    match state["mode"]:
        case "":
            policy = "no trainer has joined yet"
        case mode if mode == ASKED:
            policy = f"prompts of {state['trainer']}"
        case mode:
            policy = f"{mode}, bound {state['bound']}"
    return f"{policy}, version {state['version']}, step {state['step']}"


def list_trainers(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return a row per rank that has reported figures, and one per subscription whose trainer has not yet.

    Subscriptions that only read evaluations have no row (``penstock subs ls`` lists them). Blocks for round trips.
    """
    return trainer_rows(snapshot(client, keys))


def trainer_rows(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of ``list_trainers`` from a snapshot."""
    subs = {sub["name"]: sub for sub in state["subs"]}
    rows = [_row(one, subs.get(one.get("name", "")), state["waits"]) for one in state["trainers"]]
    shown = {row["name"] for row in rows}
    silent = (sub for name, sub in subs.items() if name not in shown and not only_evaluates(sub))
    rows += [_row({"name": sub["name"]}, sub, state["waits"]) for sub in silent]
    return sorted(rows, key=lambda row: (str(row["name"]), row.get("rank") or 0))


def only_evaluates(sub: Mapping[str, Any]) -> bool:
    """Return whether a subscription only reads evaluations: none of its batches is trained."""
    return sub.get("lanes") == Lane.EVAL


def _row(shown: Mapping[str, Any], sub: Mapping[str, Any] | None, waits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    name = shown.get("name", "")
    where = {field: (sub or {}).get(field) for field in ("cursor", "ckpt")}
    waits_for = next((wait["what"] for wait in waits if wait["who"] == f"trainer:{name}"), "")
    return dict.fromkeys(TRAINERS.fields) | where | dict(shown) | {"state": _state(sub), "waits_for": waits_for}


def _state(sub: Mapping[str, Any] | None) -> str:
    if sub is None:
        return "dropped"
    if "unreadable" in sub:
        return "unreadable"
    return "running" if sub["owned"] else "parked" if sub.get("parked") else "gone"


def list_subs(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return a row per subscription, with the state of its trainer. Blocks for round trips."""
    return [{**row, "state": _state(row)} for row in list_subscriptions(client, keys)]


def list_waits(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return a row per wait. Blocks for round trips."""
    found: list[dict[str, Any]] = snapshot(client, keys)["waits"]
    return found


def list_servers(client: Client, keys: Keys) -> list[dict[str, Any]]:
    """Return the payload servers, by name. Blocks for each of them, at most two seconds per answer."""
    return [_server_row(server) for _, server in sorted(read(client, keys).servers.items())]


def _server_row(server: Server) -> dict[str, Any]:
    row = {"name": server.name, "state": server.state, "url": redact(server.url), "answers": "yes"}
    try:
        with contextlib.closing(open_store(server.url, timeout_s=2.0)) as store:
            store.check()
            used, total = store.usage()
        return row | {"used_mb": used // 2**20, "max_mb": total // 2**20}
    except (PenstockError, RedisError) as exc:
        return row | {"answers": redact(str(exc))}
