"""Verbs of the producer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProtocolError
from penstock.protocol.pass_rate import Skip
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.call import Call, Value, numbers, script, text, version_field


@dataclass(frozen=True, slots=True)
class Admission:
    """Result of ``admit``.

    ``outcome``: ``ok``; ``moved``: another producer advanced the position; ``subs``: the subscriptions changed, read
    them again; ``closed``: a gate is closed; ``ended``: the data has ended.
    """

    outcome: str
    admitted: int = 0
    position: int = 0
    #: The subscription whose gate is full, if the gate is closed; '' if there is no gate.
    sub: str = ""
    #: Jobs, by their place in the call from 0, that were skipped because of their prompts' results.
    skipped: frozenset[int] = frozenset()


def admit(
    keys: Keys,
    jobs: Sequence[tuple[Job | None, bytes]],
    *,
    lane: str,
    source: str,
    position: int,
    model: str,
    gate: tuple[int, Sequence[str | Sequence[str]]] | None,
    cohorts: bool = False,
    skips: Sequence[Skip | None] = (),
) -> Call[Admission]:
    """Admit jobs in order, as many as the gate admits.

    Args:
        jobs: jobs of one lane and their records; None and the name of its dataset for a line that is skipped.
        source: name of the position, which moves by one per job admitted or skipped as done.
        position: its value as far as the caller knows.
        gate: (revision of subs, driving subscriptions; for a pool all of its members as one entry), or None for lanes
            without a gate (eval, score).
        cohorts: keep the order of admission, because a subscription of this lane cuts by cohort.
        skips: when the prompt of each job is skipped (None: never); empty: none is.
    """
    gates = [[one] if isinstance(one, str) else list(one) for one in gate[1]] if gate else []
    head: list[Value] = [keys.prefix, lane, source, position, gate[0] if gate else -1, version_field(model)]
    args: list[Value] = [*head, int(cohorts), numbers(gates)]
    for (job, body), skip in zip(jobs, skips or [None] * len(jobs), strict=True):
        args += [job.id, job.n, body, str(skip or "")] if job is not None else ["", 0, body, ""]

    def parse(answer: Any) -> Admission:
        admitted, position, tightest = (*(int(v) for v in answer[1:4]), 0, 0, 0)[:3]
        skipped = frozenset(int(number) - 1 for number in text(answer[4]).split(",") if number) if answer[4:] else ()
        return Admission(
            text(answer[0]), admitted, position, gates[tightest - 1][0] if tightest else "", frozenset(skipped)
        )

    subs = [keys.sub(name) for names in gates for name in names]
    return Call(script("admit"), [keys.source, keys.subs, keys.clock, *subs], args, parse)


def identify(keys: Keys, fingerprint: str, sizes: Mapping[str, int]) -> Call[str]:
    """Record the prompts in which positions of the source are counted; return the fingerprint written first."""
    flat: list[Value] = [part for pair in sizes.items() for part in pair]
    return Call(script("identify"), [keys.source], [keys.prefix, fingerprint, *flat], text)


def span(keys: Keys, end: int | None, last_batch: str = "drop") -> Call[int]:
    """Record the position at which the train prompts end (None: never), and what happens to a short last batch.

    Returns their current position; -1 if that is past ``end`` already, and nothing is changed.

    Raises:
        ProtocolError: the position in Redis is not a number; nothing is changed.
    """
    return Call(script("span"), [keys.source], [keys.prefix, "" if end is None else end, last_batch], _position)


def _position(answer: Any) -> int:
    if (position := int(answer)) == -2:
        raise ProtocolError("The position in train is no number in Redis, which no verb writes: begin the run anew.")
    return position


def swap(keys: Keys, field: str, read: int, number: int) -> Call[int]:
    """Change a number of the source from ``read`` to ``number``, unless it changed meanwhile; return the result."""
    return Call(script("swap"), [keys.source], [keys.prefix, field, read, number], int)
