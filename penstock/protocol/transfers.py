"""Weights that reach engines without the disk: who is ready, who takes part, what came of it.

    trainer     open ─> announce ─> wait ─────────────────────> decide ─> send buckets ─> go on
    worker                  └─> read the publication ─> enroll ───┴─────> receive ─> serve
                                  └ not enrolled, not in the decision, or failed: load the folder

The folder of a version is complete before the announcement, or comes behind the send, so whatever happens to a transfer
costs time, never a version. Every wait is bounded by ``trainer.transfer_timeout_s``.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.protocol.keys import Keys
from penstock.protocol.records.record import Record
from penstock.protocol.records.small_maps import name_in
from penstock.protocol.scripts import Call, Value, script

#: A transfer's record outlives the transfer by so much.
LIFE_MS = 3_600_000


class Word(StrEnum):
    """What trainer and worker tell each other of a transfer, each with a text."""

    #: By the worker: its engine is held still; where it is written to, or ''.
    HELD = "f"
    #: By the trainer: what the worker has to know, where parameter servers are, say.
    KNOW = "h"
    #: By the trainer: it was sent to; '' or what went wrong.
    SENT = "s"
    #: By the worker: what came of it; '' is fine.
    TOOK = "r"


@dataclass(frozen=True, slots=True)
class Enrollment(Record):
    """A worker that is ready."""

    worker: str
    #: Its engine; for the trainer on the same machine.
    url: str
    #: Processes of the engine that hold weights.
    num_ranks: int
    #: What the sender has to know of its engine: the process group that it is in already; '' for nothing.
    group: str = ""


@dataclass(frozen=True, slots=True)
class Decision(Record):
    """Who receives a version, and how."""

    id: str
    #: Worker -> its first rank in the group. Whoever is not here loads the folder.
    ranks: dict[str, int] = field(default_factory=dict)
    #: As the publication has it; '' where nobody receives.
    transport: str = ""
    #: Process group and where it meets; '' for the others.
    group: str = ""
    address: str = ""
    port: int = 0
    #: Of the group, the trainer's rank 0 counted.
    world_size: int = 0
    bucket_bytes: int = 0


def open_(keys: Keys, sub: str, model: str, id_: str, *, owner: str, gen: int) -> Call[bool]:
    """Let workers enroll; False where the subscription is not the caller's."""
    args: list[Value] = [keys.prefix, owner, gen, id_, LIFE_MS]
    return Call(script("transfer_open"), [keys.transfer(model), keys.sub(sub)], args, bool)


def enroll(keys: Keys, model: str, id_: str, enrollment: Enrollment) -> Call[bool]:
    """Be ready; False when it was decided already."""
    args: list[Value] = [keys.prefix, id_, enrollment.worker, enrollment.to_bytes()]
    return Call(script("transfer_enroll"), [keys.transfer(model)], args, lambda answer: answer == b"open")


def decide(keys: Keys, model: str, decision: Decision) -> Call[bool]:
    """Say who receives it; False when the transfer is not open any more."""
    args: list[Value] = [keys.prefix, decision.id, decision.to_bytes()]
    return Call(script("transfer_decide"), [keys.transfer(model), keys.transfers(model)], args, bool)


def report(keys: Keys, model: str, id_: str, word: Word, worker: str, text: str) -> Call[bool]:
    """Tell the other side of a worker's part; False when the transfer is of another version by now."""
    args: list[Value] = [keys.prefix, id_, f"{word}:{worker}", text]
    return Call(script("transfer_report"), [keys.transfer(model)], args, bool)


def enrolled(state: dict[bytes, Any]) -> dict[str, Enrollment]:
    """Workers that are ready, of the hash ``transfer:MODEL``."""
    return {
        worker: Enrollment.from_bytes(value, f"enrollment of {worker}")
        for name, value in state.items()
        if name.startswith(b"m:") and (worker := name_in(name[2:], "A worker that enrolled"))
    }
