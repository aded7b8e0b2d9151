"""Follow waits to their cause (I8): which part waits for which, down to the last one.

    trainer:actor ─ batch 40 of buffer:actor ─> buffer:actor ─ groups ─> workers ─ jobs ─> producer ─ gate ─> trainer

The cause of every wait is an edge to the next part, or the end. A chain ends in a part that is gone or silent, in a
user's pause, in a cause (a full disk, an engine in a crash loop), in a part that is at work, or if it returns to
itself. A silent part is reported before all waits; an engine that refuses a version is a cause. Pure: it reads a
snapshot (``penstock.protocol.snapshot``) only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.console.read.parts import only_evaluates
from penstock.protocol.presence import SILENT_S, WorkerPresence, WorkerState
from penstock.protocol.waits import describe
from penstock.records.cause import EDGE, About, Cause, Part
from penstock.records.causes import decode
from penstock.records.worker_causes import (
    Circle,
    CrashSuspects,
    JobsDelayed,
    LanePaused,
    NoPart,
    NoTrainer,
    PartGone,
    PartSilent,
    PartStarting,
    TrainerGone,
    WorkerSick,
    Working,
)

#: Kinds of parts without which a run stalls -> prefix of their waits.
_PARTS = ("producer", "buffer", "gateway")


def silences(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Yield (who, cause, for how many seconds) of each silent part, the longest silence first."""
    yield from sorted((*_parts(state), *_trainers(state), *_workers(state)), key=lambda one: -one[2])


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Yield kinds of which every process is silent; a restarted process has a new record."""
    for kind in _PARTS:
        newest = min((one for one in state["parts"] if one["part"] == kind), key=lambda one: one["age_s"], default=None)
        if newest is not None and newest["age_s"] >= SILENT_S:
            yield kind, PartSilent(newest["pid"], newest["host"]), float(newest["age_s"])


def _trainers(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    for sub in state["subs"]:
        if sub.get("silent_s", 0.0) >= SILENT_S:
            yield f"trainer:{sub['name']}", PartSilent(), float(sub["silent_s"])


def _workers(state: Mapping[str, Any]) -> Iterator[tuple[str, PartSilent, float]]:
    """Yield silent workers, except those whose heartbeat reports a stuck event loop, which is the cause."""
    waits = {one["who"] for one in state["waits"] if one.get("age_s", 0.0) < SILENT_S}
    for one in state["workers"]:
        if one.age_s >= SILENT_S and f"worker:{one.name}:loop" not in waits:
            yield f"worker:{one.name}", PartSilent(one.pid, one.host), float(one.age_s)


#: States of a worker in which it generates nothing until they end, the worst first.
_SICK = (
    WorkerState.CRASH_LOOP,
    WorkerState.CANNOT_LOAD,
    WorkerState.ENGINE_AWAY,
    WorkerState.RESTARTING_ENGINE,
    WorkerState.NO_WEIGHTS,
    WorkerState.STARTING,
    WorkerState.OFFLOADED,
)


@dataclass(frozen=True, slots=True)
class Link:
    """One wait of a chain."""

    who: str
    cause: Cause
    since_s: float

    def to_map(self) -> dict[str, Any]:
        """Return the JSON form: ``who``, ``since_s``, ``what`` in words, and ``name`` and ``fields`` of the cause."""
        return {"who": self.who, "since_s": self.since_s, **describe(self.cause)}


@dataclass(slots=True)
class Chain:
    """Waits from the first to the last, and the cause of the last; None: its own cause is the end."""

    links: list[Link] = field(default_factory=list)
    end: Cause | None = None

    def to_map(self) -> dict[str, Any]:
        """Return the form of ``penstock why --json``: the first wait, those behind it, and the final cause."""
        first, *rest = [link.to_map() for link in self.links]
        end = describe(self.end or self.links[-1].cause)
        return {**first, "then": rest, "cause": end["what"], "cause_name": end["name"], "cause_fields": end["fields"]}

    def lines(self) -> Iterator[str]:
        """Yield text lines, each a step deeper than the one before."""
        for depth, link in enumerate(self.links):
            yield f"{'  ' * depth}{link.who} has waited {link.since_s:.0f} s for {link.cause}"
        if self.end is not None:
            yield f"{'  ' * len(self.links)}{self.end}"


def chains(state: Mapping[str, Any]) -> list[Chain]:
    """Return a chain for every wait that is in no other chain, longest first, after those of silent parts."""
    silent = [Link(*one) for one in silences(state)]
    # A wait without heartbeat belongs to a process that was killed, or is frozen.
    live = [one for one in state["waits"] if one.get("age_s", 0.0) < SILENT_S]
    waits = silent + [Link(one["who"], decode(one["name"], one["fields"], "A wait"), one["since_s"]) for one in live]
    found = [_follow(state, waits, first) for first in waits]
    held = {link.who for chain in found for link in chain.links[1:]}
    roots = [chain for chain in found if chain.links[0].who not in held]
    # In a circle every wait is in another chain: the longest one represents it.
    shown = {link.who for chain in roots for link in chain.links}
    for chain in found:
        if chain.links[0].who not in shown:
            roots.append(chain)
            shown |= {link.who for link in chain.links}
    # A part whose absence ends a chain needs no chain of its own.
    absent = {chain.end.component for chain in roots if isinstance(chain.end, PartGone)}
    roots = [chain for chain in roots if chain.links[0] not in silent or chain.links[0].who not in absent]
    return sorted(roots, key=lambda chain: chain.links[-1] not in silent and not isinstance(chain.end, PartGone))


def _follow(state: Mapping[str, Any], waits: Sequence[Link], first: Link) -> Chain:
    chain, seen = Chain([first]), {first.who}
    while True:
        last = chain.links[-1]
        part = last.cause.part if last.cause.kind is EDGE else None
        if (storage := _storage(waits, last, part)) is not None:
            chain.links.append(storage)
            return chain
        if part is None:
            chain.end = _suspects(state, last)
            return chain
        step = _STEPS[part.kind](state, waits, part.name)
        if isinstance(step, Cause):
            chain.end = step
            return chain
        if step.who == last.who:
            return chain  # it waits for another process of its kind, which reports nothing: its own cause is the end
        if step.who in seen:
            refusal = _refusal(state, waits)
            if isinstance(refusal, Link) and refusal.who not in seen:
                chain.links.append(refusal)
            else:
                chain.end = refusal if isinstance(refusal, Cause) else Circle(step.who)
            return chain
        seen.add(step.who)
        chain.links.append(step)


def _storage(waits: Sequence[Link], last: Link, part: Part | None) -> Link | None:
    """Return a wait for storage that blocks ``last`` whatever its cause: no writes, or groups that cannot be read."""
    if last.who != "redis" and (redis := _named(waits, "redis")) is not None:
        return redis
    # A buffer that needs more jobs from the producer may have groups that it cannot read.
    is_short = last.who.startswith("buffer:") and part is not None and part.kind == "producer"
    return _named(waits, "buffer:payloads") if is_short else None


def _suspects(state: Mapping[str, Any], last: Link) -> Cause | None:
    """Return the jobs that engines died of, which may be why an engine does not start."""
    suspects = state.get("suspects", ())
    if not suspects or not last.who.startswith("worker:") or last.cause.about is not About.ENGINE_DOWN:
        return None
    return CrashSuspects(tuple(suspects))


def _at_buffer(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | Cause:
    if state["leader"] is None:
        return _absence(state, "buffer")
    own = _longest(waits, f"buffer:{name}" if name else "buffer:") or _longest(waits, "buffer:state")
    return _named(waits, "buffer") or own or Working("buffer")


def _at_producer(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | Cause:
    if not any(one["part"] == "producer" and one["age_s"] < SILENT_S for one in state["parts"]):
        return _absence(state, "producer")
    return _longest(waits, "producer") or Working("producer")


def _at_trainer(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | Cause:
    subs = [sub for sub in state["subs"] if (sub["name"] == name if name else sub.get("driving"))]
    if not subs:
        return NoTrainer(name)
    sub = subs[0]
    idle_s = min((one["age_s"] for one in state["trainers"] if one.get("name") == sub["name"]), default=None)
    if not sub["owned"]:
        return TrainerGone(sub["name"], idle_s, only_evaluates(sub), bool(sub.get("driving")))
    return _longest(waits, f"trainer:{sub['name']}") or Working("trainer", sub["name"], idle_s=idle_s)


def _at_worker(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | Cause:
    if name:
        return _longest(waits, f"worker:{name}") or Working("worker", name)
    if paused := paused_lanes(state):
        return paused[0]
    workers: list[WorkerPresence] = state["workers"]
    if not workers:
        return NoPart("worker")
    present = [one for one in workers if _named(waits, f"worker:{one.name}") is None or one.age_s < SILENT_S]
    if not present:
        return _named(waits, f"worker:{workers[0].name}") or NoPart("worker")
    if all(one.state in _SICK for one in present):
        worst = min(present, key=lambda one: _SICK.index(WorkerState(one.state)))
        own = _longest(waits, f"worker:{worst.name}", but=":intake") or _longest(waits, f"worker:{worst.name}")
        return _refusal(state, waits) or own or WorkerSick(worst.name, worst.state, worst.why)
    if running := sum(one.running for one in present):
        return _longest(waits, "worker:", about=About.HANG) or Working("worker", samples=running)
    # A worker that has jobs and runs none of them knows more than one that looks for some.
    return (
        _silent_worker(state, waits)
        or _refusal(state, waits)
        or _longest(waits, "worker:", but=":intake")
        or _longest(waits, "worker:")
        or (JobsDelayed(state["delayed"]) if state["delayed"] else Working("worker"))
    )


def _silent_worker(state: Mapping[str, Any], waits: Sequence[Link]) -> Link | None:
    """Return a silent worker: jobs that it holds are not taken over before their leases end."""
    silent = (one for one in state["workers"] if one.age_s >= SILENT_S)
    return next((link for one in silent if (link := _named(waits, f"worker:{one.name}"))), None)


def _refusal(state: Mapping[str, Any], waits: Sequence[Link]) -> Link | Cause | None:
    """Return that an engine refuses a version: its worker's wait for another one, or what its presence shows."""
    if (link := _longest(waits, "worker:", about=About.REFUSAL)) is not None:
        return link
    refusing = (one for one in state["workers"] if one.state == WorkerState.CANNOT_LOAD and one.age_s < SILENT_S)
    return next((WorkerSick(one.name, one.state, one.why) for one in refusing), None)


def _named(waits: Sequence[Link], who: str) -> Link | None:
    return next((link for link in waits if link.who == who), None)


def paused_lanes(state: Mapping[str, Any]) -> list[LanePaused]:
    """Return each paused lane that jobs wait in, with who paused it."""
    pauses = {one["lane"]: one for one in state.get("pauses", ())}
    found = []
    for lane in state["paused"]:
        if queued := state["lanes"].get(lane, {}).get("queued"):
            one = pauses.get(lane, {})
            found.append(LanePaused(lane, queued, one.get("by") or "", one.get("since_s") or 0.0))
    return found


def _longest(waits: Sequence[Link], prefix: str, *, about: About | None = None, but: str = "\0") -> Link | None:
    """Return the longest wait of ``prefix``, or below it, ``about`` something and not of a task ``but``, if any."""
    below = (prefix,) if prefix.endswith(":") else (f"{prefix}/", f"{prefix}:")
    for link in waits:
        theirs = link.who == prefix or link.who.startswith(below)
        if theirs and not link.who.endswith(but) and about in (None, link.cause.about):
            return link
    return None


def _absence(state: Mapping[str, Any], part: str) -> Cause:
    """Return that a part is not running, with the process that was and is silent."""
    last = min((one for one in state["parts"] if one["part"] == part), key=lambda one: one["age_s"], default=None)
    if last is None:
        return NoPart(part)
    if last["age_s"] < SILENT_S:
        return PartStarting(part, last["host"], last["pid"])
    return PartGone(part, last["host"], last["pid"], float(last["age_s"]))


_STEPS = {"buffer": _at_buffer, "producer": _at_producer, "trainer": _at_trainer, "worker": _at_worker}
