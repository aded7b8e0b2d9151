"""Transfer weights to engines without the disk: which workers are ready, which take part, and the results.

    trainer     open ─> announce ─> wait ─────────────────────> decide ─> send buckets ─> continue
    worker                  └─> read the publication ─> enroll ───┴─────> receive ─> serve
                                  └ not enrolled, not in the decision, or failed: load the folder

The folder of a version is complete before the announcement, or is written after the transfer, so a failed transfer
costs time, never a version. Every wait is bounded by ``trainer.transfer_timeout_s``.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.protocol.scripts import Call, Value, script
from penstock.records.codec import name_in
from penstock.records.keys import Keys
from penstock.records.record import Record

#: How long the record of a transfer is kept after it.
LIFE_MS = 3_600_000


class Word(StrEnum):
    """Kinds of reports between trainer and worker during a transfer, each with a text."""

    #: By the worker: its engine is paused; the address to send to, or ''.
    HELD = "f"
    #: By the trainer: what the worker needs to know, such as the location of the weights.
    KNOW = "h"
    #: By the trainer: the transfer to it ended; '' or the error.
    SENT = "s"
    #: By the worker: the result; '' is success.
    TOOK = "r"


@dataclass(frozen=True, slots=True)
class Enrollment(Record):
    """A worker that is ready."""

    worker: str
    #: Its engine; for the trainer on the same machine.
    url: str
    #: Processes of the engine that hold weights.
    num_ranks: int
    #: What the sender needs to know of its engine: the process group that it is in already; '' for nothing.
    group: str = ""


@dataclass(frozen=True, slots=True)
class Decision(Record):
    """The workers that receive a version, and how."""

    id: str
    #: Worker -> its first rank in the group. Other workers load the folder.
    ranks: dict[str, int] = field(default_factory=dict)
    #: Transport of the publication; '' if no worker receives.
    transport: str = ""
    #: Process group and its rendezvous; '' for other transports.
    group: str = ""
    address: str = ""
    port: int = 0
    #: Size of the group, including the trainer's rank 0.
    world_size: int = 0
    bucket_bytes: int = 0


def open_(keys: Keys, sub: str, model: str, id_: str, *, owner: str, gen: int) -> Call[bool]:
    """Let workers enroll; False if the caller does not own the subscription."""
    args: list[Value] = [keys.prefix, owner, gen, id_, LIFE_MS]
    return Call(script("transfer_open"), [keys.transfer(model), keys.sub(sub)], args, bool)


def enroll(keys: Keys, model: str, id_: str, enrollment: Enrollment) -> Call[bool]:
    """Enroll a worker; False if the transfer was decided already."""
    args: list[Value] = [keys.prefix, id_, enrollment.worker, enrollment.to_bytes()]
    return Call(script("transfer_enroll"), [keys.transfer(model)], args, lambda answer: answer == b"open")


def decide(keys: Keys, model: str, decision: Decision) -> Call[bool]:
    """Decide which workers receive; False if the transfer is no longer open."""
    args: list[Value] = [keys.prefix, decision.id, decision.to_bytes()]
    return Call(script("transfer_decide"), [keys.transfer(model), keys.transfers(model)], args, bool)


def report(keys: Keys, model: str, id_: str, word: Word, worker: str, text: str) -> Call[bool]:
    """Report to the other side of a transfer; False if the current transfer is of another version."""
    args: list[Value] = [keys.prefix, id_, f"{word}:{worker}", text]
    return Call(script("transfer_report"), [keys.transfer(model)], args, bool)


def enrolled(state: dict[bytes, Any]) -> dict[str, Enrollment]:
    """Parse the enrolled workers of the hash ``transfer:MODEL``."""
    return {
        worker: Enrollment.from_bytes(value, f"enrollment of {worker}")
        for name, value in state.items()
        if name.startswith(b"m:") and (worker := name_in(name[2:], "A worker that enrolled"))
    }
