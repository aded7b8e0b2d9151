"""Trainers: figures last reported by their ranks, and what they wait for."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.subscription import ASKED
from penstock.console.resources import TRAINERS
from penstock.names import Lane
from penstock.protocol.snapshot import snapshot
from penstock.protocol.subs import list_subscriptions
from penstock.records.keys import Keys
from penstock.redis.commands import Client


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
