"""A run on one screen: its figures, its parts with the flows between them, and the cause of each wait."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.console.cli.inspect import ledger_lines, rollback_line
from penstock.console.read.why import Chain, chains
from penstock.console.web.runs import Look
from penstock.consumers.grpo.rows import Row, Rows
from penstock.names import Lane
from penstock.protocol.gate import Room
from penstock.protocol.presence import FRESH_S, WorkerPresence, WorkerState
from penstock.protocol.snapshot import jobs_to_train, main_trainer
from penstock.protocol.tokens import ledgers_of, of_training
from penstock.records.cause import Cause
from penstock.records.worker_causes import Working

# The parts of a run as a graph: their state, what they wait for, and the flows between them.
#
#     producer ── jobs ──> queue ── leases ──> workers ── samples ──> buffer ── batches ──> trainer
#         ^                                       ^                                            │
#         └─────────────── gate ──────────────────┴────────────────── weights ─────────────────┘
#
# Pure: computed from a snapshot, the chains of its waits and the places at its gates.

PARTS = ("producer", "queue", "workers", "buffer", "trainer")
#: Prefix of a waiter's name, or kind of a part in a cause -> the part.
_PLACES = {
    "producer": "producer",
    "queue": "queue",
    "redis": "queue",
    "worker": "workers",
    "verifiers": "workers",
    "buffer": "buffer",
    "trainer": "trainer",
    "subscription": "trainer",
    "scorer": "trainer",
}


def place_of(who: str) -> str:
    """Return the part of a waiter (``worker:w0:intake``); '' if it belongs to none."""
    return _PLACES.get(who.partition(":")[0], "")


def place_of_cause(cause: Cause) -> str:
    """Return the part that a cause is about; '' if it names none."""
    return _PLACES.get(cause.part.kind, "") if cause.part is not None else ""


def parts_of(
    state: Mapping[str, Any], found: Sequence[Mapping[str, Any]], rooms: Mapping[str, Room]
) -> list[dict[str, Any]]:
    """Return a map per part: ``id``, ``is`` (well, waits, sick, gone), ``facts`` in order, ``cause``: text, if any.

    Args:
        found: the chains; if one does not end in a working part, its end is the cause.
        rooms: places at each gate.
    """
    causes = {one["part"]: one["end"] or one["links"][-1]["what"] for one in reversed(found) if not one["at_work"]}
    waiting = {link["part"] for one in found for link in one["links"]}
    made = (_producer(state, rooms), _queue(state), _workers(state), _buffer(state), _trainer(state))
    return [_judged(part, part["id"] in waiting, causes.get(part["id"], "")) for part in made]


def edges_of(state: Mapping[str, Any], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the flows between parts: ``rate`` per second (None: not known yet) of ``what``, and the number queued."""

    def edge(begin: str, end: str, what: str, counter: str, depth: int | None, of: str = "") -> dict[str, Any]:
        rate = rates.get(counter, 0.0) if rates else None
        return {"from": begin, "to": end, "what": what, "rate": rate, "depth": depth, "of": of}

    leased, queued = (jobs_to_train(state, name) for name in ("leased", "queued"))
    behind = sum(one.version < state["version"] for one in state["workers"])
    return [
        edge("producer", "queue", "jobs", "admitted", queued, "queued"),
        edge("queue", "workers", "groups", "completed", leased, "leased"),
        edge("workers", "buffer", "samples", "committed", state["ready"], "groups ready"),
        edge("buffer", "trainer", "batches", "cut", _uncommitted(state), "not committed"),
        edge("trainer", "workers", "versions", "published", behind, "workers behind"),
    ]


def _judged(part: dict[str, Any], waits: bool, cause: str) -> dict[str, Any]:
    is_ = part["is"]
    return {**part, "is": "waits" if is_ == "well" and waits else is_, "cause": cause}


def _part(name: str, is_: str, *facts: tuple[str, Any]) -> dict[str, Any]:
    return {"id": name, "is": is_, "facts": [[label, value] for label, value in facts if value is not None]}


def _producer(state: Mapping[str, Any], rooms: Mapping[str, Room]) -> dict[str, Any]:
    there = [one for one in state["parts"] if one["part"] == "producer" and one["age_s"] < FRESH_S]
    return _part(
        "producer",
        "well" if there else "gone",
        ("host", there[0]["host"] if there else None),
        ("admitted", state["counters"].get("admitted", 0)),
        *((f"gate of {name}", f"{room.taken} of {room.places} groups") for name, room in list(rooms.items())[:4]),
    )


def _queue(state: Mapping[str, Any]) -> dict[str, Any]:
    lanes = [
        (lane, f"{counts['queued']} queued, {counts['leased']} leased{' (paused)' if lane in state['paused'] else ''}")
        for lane, counts in state["lanes"].items()
        if counts["queued"] or counts["leased"] or lane in state["paused"] or lane == "train"
    ]
    later = [(name, state[name]) for name in ("delayed", "dead") if state[name]]
    return _part("queue", "sick" if state["paused"] else "well", *lanes, *later)


def _workers(state: Mapping[str, Any]) -> dict[str, Any]:
    workers: Sequence[WorkerPresence] = state["workers"]
    states = Counter(one.state for one in workers)
    serving = states.pop(WorkerState.SERVING.value, 0)
    slots = sum(one.slots for one in workers)
    return _part(
        "workers",
        "gone" if not workers else "well" if serving else "sick",
        ("serving", f"{serving} of {len(workers)}"),
        *((name or "unknown", count) for name, count in states.most_common(4)),
        ("samples", f"{sum(one.running for one in workers)} of {slots} slots"),
        ("tokens/s", round(sum(one.tokens_per_s for one in workers))),
        ("versions", _span([one.version for one in workers if one.version >= 0])),
        ("verifiers", len(state["verifiers"]) or None),
        ("checks queued", state["checks"] or None),
    )


def _span(versions: Sequence[int]) -> str | None:
    if not versions:
        return None
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low} to {high}"


def _buffer(state: Mapping[str, Any]) -> dict[str, Any]:
    leader = state["leader"]
    return _part(
        "buffer",
        "well" if leader else "gone",
        ("epoch", leader["epoch"] if leader else None),
        ("groups ready", state["ready"]),
        *((f"ready in {lane}", n) for lane, n in state.get("ready_lanes", {}).items() if n and lane != Lane.TRAIN),
        ("groups kept", state.get("kept")),
        ("groups in flight", state["inflight"]),
        ("batches cut", state["counters"].get("cut", 0)),
    )


def _trainer(state: Mapping[str, Any]) -> dict[str, Any]:
    subs = state["subs"]
    owned = [sub for sub in subs if sub["owned"]]
    share = main_trainer(state).get("wait_share")
    return _part(
        "trainer",
        "well" if owned else "gone",
        ("subscriptions", f"{len(owned)} of {len(subs)} have their trainer" if len(subs) != 1 else None),
        ("step", state["step"]),
        ("version", state["version"]),
        ("waits", f"{100 * share:.0f} % of its time" if isinstance(share, float) else None),
    )


def _uncommitted(state: Mapping[str, Any]) -> int:
    counts = [(sub.get("cut"), sub.get("cursor")) for sub in state["subs"]]
    return sum(max(0, cut - cursor) for cut, cursor in counts if isinstance(cut, int) and isinstance(cursor, int))


#: Most chains shown.
MAX_CHAINS = 20
#: Figures that the trainer's presence has earlier than its rows.
_OF_TRAINER = ("reward_mean", "staleness_mean", "staleness_max")


def overview(look: Look, rows: Rows, steps: int | None) -> dict[str, Any]:
    """Return the overview of a run whose Redis answers.

    Args:
        steps: ``trainer.steps``, used until the trainer reports how many it will make.
    """
    state = look.state
    found = [_chain(one) for one in chains(state)[:MAX_CHAINS]]
    return {
        "figures": _live_figures(state, rows, steps),
        "parts": parts_of(state, found, look.rooms),
        "edges": edges_of(state, look.rates),
        "chains": found,
        "notes": [line for line in (*ledger_lines(state["subs"]), rollback_line(state["counters"])) if line],
    }


def overview_of_files(rows: Rows, summary: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    """Return the overview of a run that is over, from its files.

    Args:
        steps: ``trainer.steps``, used if the rows do not have the number of steps.
    """
    last = rows.steps[-1] if rows.steps else {}
    # A step has its batch's version; its end publishes the next one, which the last evaluation names.
    versions = [row["version"] for row in (last, *rows.evals[-1:]) if isinstance(row.get("version"), int)]
    total = last.get("total_steps", steps) or None
    shown = {**_step_figures(last, rows), "steps": total, "version": max(versions, default=None)}
    shown |= {
        "tokens_per_s": summary.get("tokens_per_s"),
        "goodput": summary.get("goodput"),
        "trainer_wait": summary.get("trainer_wait_share"),
    }
    shown |= {name: summary.get(name) for name in ("samples", "tokens", "weight_updates", "audit")}
    return {"figures": shown, "parts": [], "edges": [], "chains": [], "notes": []}


def _live_figures(state: Mapping[str, Any], rows: Rows, steps: int | None) -> dict[str, Any]:
    trainer = main_trainer(state)
    last = rows.steps[-1] if rows.steps else {}
    shown = _step_figures({**last, **{key: trainer[key] for key in trainer if key in _OF_TRAINER}}, rows)
    return shown | {
        "step": state["step"],
        "steps": trainer.get("total_steps", steps) or None,
        "version": state["version"],
        "tokens_per_s": sum(one.tokens_per_s for one in state["workers"]),
        "trainer_wait": trainer.get("wait_share"),
        "goodput": of_training(ledgers_of(state)).goodput,
        "ready": state["ready"],
        "dead": state["dead"],
    }


def _step_figures(last: Row, rows: Rows) -> dict[str, Any]:
    evaluated = rows.evals[-1] if rows.evals else {}
    return {
        "step": last.get("step"),
        "version": last.get("version"),
        "reward": last.get("reward_mean"),
        "held_out": evaluated.get("accuracy"),
        "staleness_mean": last.get("staleness_mean"),
        "staleness_max": last.get("staleness_max"),
    }


def _chain(chain: Chain) -> dict[str, Any]:
    """Return a chain with the part of each wait, and of its end; ``at_work``: whether it ends in a working part."""
    links = [{**link.to_map(), "part": place_of(link.who)} for link in chain.links]
    return {
        "links": links,
        "end": str(chain.end or ""),
        "part": (chain.end is not None and place_of_cause(chain.end)) or links[-1]["part"],
        "at_work": isinstance(chain.end, Working),
    }
