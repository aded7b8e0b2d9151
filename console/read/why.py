"""Waits followed to the last one (I8): who waits for what, and what that waits for, down to a cause.

    trainer:actor ─ batch 40 of buffer:actor ─> buffer:actor ─ groups ─> workers ─ jobs ─> producer ─ gate ─> trainer

Every wait names the next part in its words, or none where it is the end. A chain ends in a part that is gone or silent,
in a person's pause, in a cause (a closed gate, a full disk, an engine in a crash loop), in a part that is at work, or
where it comes back to itself. A part that is silent is reported before all waits; an engine that refuses a version is a
cause. Pure: it reads a snapshot (``penstock.protocol.snapshot``) and nothing else.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from console.read.silence import silences
from console.read.trainers import only_evaluates
from penstock.protocol.presence import SILENT_S, WorkerPresence, WorkerState

#: The first part that a wait names is the one that it waits for; a folder of a path is none.
_PART = re.compile(r"(?<![\w/.\-])(trainer|buffer|producer|worker)s?\b(?![/\-])(?::([\w.\-]+))?")
#: Of a buffer that is short of groups: those that there are may be held back.
_NOTHING_COMES = re.compile(r"\b0( jobs)? are queued or running")
#: Where a part that fell silent ends a chain.
_SILENT = re.compile(r"\bhas been silent for\b")
#: What waits of a worker say whose engine refuses a version.
_REFUSALS = ("that can be loaded;", "to be loaded once more", "to be announced again")
#: States of a worker in which it draws nothing until somebody mends it.
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
    what: str
    since_s: float


@dataclass(slots=True)
class Chain:
    """Waits from the first to the last, and what the last one comes down to; '' where its own words are the cause."""

    links: list[Link] = field(default_factory=list)
    end: str = ""

    def to_map(self) -> dict[str, Any]:
        """As ``penstock why --json`` has it: the first wait, those behind it, and the cause."""
        first, *rest = [asdict(link) for link in self.links]
        return {**first, "then": rest, "cause": self.end or self.links[-1].what}

    def lines(self) -> Iterator[str]:
        """As people read it, a step deeper with every line."""
        for depth, link in enumerate(self.links):
            yield f"{'  ' * depth}{link.who} has waited {link.since_s:.0f} s for {link.what}"
        if self.end:
            yield f"{'  ' * len(self.links)}{self.end}"


def chains(state: Mapping[str, Any]) -> list[Chain]:
    """A chain for every wait that no other chain holds, longest wait first."""
    silent = [Link(*one) for one in silences(state)]
    # What nobody confirms is the wait of a process that was killed, or is frozen.
    live = [one for one in state["waits"] if one.get("age_s", 0.0) < SILENT_S]
    waits = silent + [Link(one["who"], one["what"], float(one["since_s"])) for one in live]
    found = [_follow(state, waits, first) for first in waits]
    held = {link.who for chain in found for link in chain.links[1:]}
    roots = [chain for chain in found if chain.links[0].who not in held]
    # In a circle each is held by another one: its longest wait stands for it.
    shown = {link.who for chain in roots for link in chain.links}
    for chain in found:
        if chain.links[0].who not in shown:
            roots.append(chain)
            shown |= {link.who for link in chain.links}
    # A part whose absence ends a chain needs none of its own.
    absent = {kind for chain in roots for kind in _LOOKS if _SILENT.search(chain.end) and f": {kind} on " in chain.end}
    roots = [chain for chain in roots if chain.links[0] not in silent or chain.links[0].who not in absent]
    return sorted(roots, key=lambda chain: chain.links[-1] not in silent and not _SILENT.search(chain.end))


def _follow(state: Mapping[str, Any], waits: Sequence[Link], first: Link) -> Chain:
    chain, seen = Chain([first]), {first.who}
    while True:
        last = chain.links[-1]
        if (cause := _storage(waits, last)) is not None:
            chain.links.append(cause)
            return chain
        part, name = _next(state, last)
        if not part:
            chain.end = _suspects(state, last)
            return chain
        step = _LOOKS[part](state, waits, name)
        if isinstance(step, str):
            chain.end = step
            return chain
        if step.who == last.who:
            return chain  # it names its own kind, as in "start the producer again": its words are the cause
        if step.who in seen:
            refusal = _refusal(state, waits)
            if isinstance(refusal, Link) and refusal.who not in seen:
                chain.links.append(refusal)
            else:
                circle = f"which leads back to {step.who}: these wait for one another"
                chain.end = refusal if isinstance(refusal, str) else circle
            return chain
        seen.add(step.who)
        chain.links.append(step)


def _storage(waits: Sequence[Link], last: Link) -> Link | None:
    """What holds back whoever it is, whatever the words say: nothing can be written, or nothing can be read."""
    found = {link.who: link for link in waits}
    if last.who != "redis" and "redis" in found:
        return found["redis"]
    away = found.get("buffer:payloads")
    if last.who.startswith("buffer:") and last is not away and _NOTHING_COMES.search(last.what):
        return away
    return None


def _suspects(state: Mapping[str, Any], last: Link) -> str:
    """Where an engine does not come up: the jobs that engines died of before, which may be why."""
    suspects = state.get("suspects", ())
    if not suspects or not last.who.startswith("worker:") or "its engine" not in last.what:
        return ""
    return (
        f"engines died of {', '.join(suspects)} before, in lane suspect: `penstock jobs show {suspects[0]}`, and "
        "`penstock jobs cancel` if it is the prompt"
    )


def _next(state: Mapping[str, Any], link: Link) -> tuple[str, str]:
    """(part, name) that a wait is for; ('', '') where it is the end."""
    kind, _, name = link.who.partition(":")
    if kind == "subscription":
        return "trainer", name
    named = _PART.search(link.what)
    if named is not None:
        return named[1], named[2] or ""
    if kind != "buffer":
        return "", ""
    if "publication of model" in link.what:
        return "trainer", name
    if "to be admitted" in link.what or ("queued or running" in link.what and not _num_open(state)):
        return "producer", ""
    words = ("queued or running", "running groups", "jobs of the cohort to be finished")
    return ("worker", "") if any(one in link.what for one in words) else ("", "")


def _num_open(state: Mapping[str, Any]) -> int:
    lanes = state["lanes"]
    return int(sum(lane["queued"] + lane["leased"] for lane in lanes.values()) + state["delayed"])


def _look_at_buffer(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | str:
    if state["leader"] is None:
        return _absence(state, "buffer", "no buffer leads")
    told = _longest(waits, f"buffer:{name}" if name else "buffer:") or _longest(waits, "buffer:state")
    return _named(waits, "buffer") or told or "the buffer is at work"


def _look_at_producer(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | str:
    if not any(one["part"] == "producer" and one["age_s"] < SILENT_S for one in state["parts"]):
        return _absence(state, "producer", "there is no producer")
    return _longest(waits, "producer") or "the producer is at work"


def _look_at_trainer(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | str:
    subs = [sub for sub in state["subs"] if (sub["name"] == name if name else sub.get("driving"))]
    if not subs:
        return f"no trainer{f' of subscription {name}' if name else ''} has joined yet: start one"
    sub = subs[0]
    shown = [one["age_s"] for one in state["trainers"] if one.get("name") == sub["name"]]
    last = f"; its last step was {min(shown):.0f} s ago" if shown else ""
    if not sub["owned"] and only_evaluates(sub):
        return f"no trainer reads evaluations: start the trainer again, or drop subscription {sub['name']}"
    if not sub["owned"]:
        return f"trainer {sub['name']} is gone{last}: start it again, or drop its subscription"
    return _longest(waits, f"trainer:{sub['name']}") or f"trainer {sub['name']} is at work{last}"


def _look_at_worker(state: Mapping[str, Any], waits: Sequence[Link], name: str) -> Link | str:
    if name:
        return _longest(waits, f"worker:{name}") or f"worker {name} is at work"
    if paused := paused_lanes(state):
        return paused[0]
    workers: list[WorkerPresence] = state["workers"]
    if not workers:
        return "there is no worker: start one"
    present = [one for one in workers if _named(waits, f"worker:{one.name}") is None or one.age_s < SILENT_S]
    if not present:
        return _named(waits, f"worker:{workers[0].name}") or "there is no worker: start one"
    if all(one.state in _SICK for one in present):
        worst = min(present, key=lambda one: _SICK.index(WorkerState(one.state)))
        told = _longest(waits, f"worker:{worst.name}", but=(":intake",)) or _longest(waits, f"worker:{worst.name}")
        return _refusal(state, waits) or told or f"worker {worst.name} is in the state {worst.state}{_because(worst)}"
    if running := sum(one.running for one in present):
        # One that hangs has said so.
        stuck = _longest(waits, "worker:", ("sent nothing for", "its event loop"))
        return stuck or f"workers are at work: {running} samples are being drawn"
    # Who has taken jobs and draws none of them knows more than who looks for some.
    return (
        _silent_worker(state, waits)
        or _refusal(state, waits)
        or _longest(waits, "worker:", but=(":intake",))
        or _longest(waits, "worker:")
        or (f"{state['delayed']} jobs are tried again later" if state["delayed"] else "workers are at work")
    )


def _silent_worker(state: Mapping[str, Any], waits: Sequence[Link]) -> Link | None:
    """A worker that says nothing any more: jobs that it holds are not taken over before their leases end."""
    silent = (one for one in state["workers"] if one.age_s >= SILENT_S)
    return next((link for one in silent if (link := _named(waits, f"worker:{one.name}"))), None)


def _refusal(state: Mapping[str, Any], waits: Sequence[Link]) -> Link | str | None:
    """That an engine refuses a version: its worker's wait for another one, or what it shows of itself."""
    if (link := _longest(waits, "worker:", _REFUSALS)) is not None:
        return link
    refusing = (one for one in state["workers"] if one.state == WorkerState.CANNOT_LOAD and one.age_s < SILENT_S)
    return next((f"worker {one.name} is in the state {one.state}{_because(one)}" for one in refusing), None)


def _named(waits: Sequence[Link], who: str) -> Link | None:
    return next((link for link in waits if link.who == who), None)


def paused_lanes(state: Mapping[str, Any]) -> list[str]:
    """Of each paused lane that jobs wait in: who paused it, and how it goes on."""
    told = {one["lane"]: one for one in state.get("pauses", ())}
    lines = []
    for lane in state["paused"]:
        if queued := state["lanes"].get(lane, {}).get("queued"):
            one = told.get(lane, {})
            who = f"{one['by']}, {one['since_s']:.0f} s ago" if one.get("by") else "a person"
            lines.append(
                f"lane {lane} is paused by {who}, with {queued} jobs in it: `penstock resume {lane}` lets it go on"
            )
    return lines


def _because(worker: WorkerPresence) -> str:
    return f": {worker.why}" if worker.why else ""


def _longest(
    waits: Sequence[Link], prefix: str, words: tuple[str, ...] = ("",), *, but: tuple[str, ...] = ("\0",)
) -> Link | None:
    """The longest wait of ``prefix``, or of what is below it, that holds one of ``words``; None where there is none."""
    below = (prefix,) if prefix.endswith(":") else (f"{prefix}/", f"{prefix}:")
    for link in waits:
        theirs = link.who == prefix or link.who.startswith(below)
        if theirs and not link.who.endswith(but) and any(word in link.what for word in words):
            return link
    return None


def _absence(state: Mapping[str, Any], part: str, said: str) -> str:
    """That a part is not there, with the ones that were and went silent."""
    silent = [one for one in state["parts"] if one["part"] == part and one["age_s"] >= SILENT_S]
    beating = [one for one in state["parts"] if one["part"] == part and one["age_s"] < SILENT_S]
    if beating:
        return f"{said}: {part} on {beating[0]['host']} (pid {beating[0]['pid']}) has just started, or was just killed"
    if not silent:
        return f"{said}: start it with `penstock {part}`"
    last = min(silent, key=lambda one: float(one["age_s"]))
    who = f"{part} on {last['host']} (pid {last['pid']})"
    return f"{said}: {who} has been silent for {last['age_s']:.0f} s; start it again"


_LOOKS = {
    "buffer": _look_at_buffer,
    "producer": _look_at_producer,
    "trainer": _look_at_trainer,
    "worker": _look_at_worker,
}
