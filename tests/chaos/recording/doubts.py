"""What was acknowledged while a fault was at work that loses data by its nature: it may be there or not.

An append-only file that is cut, and a replica that is behind, lose what was acknowledged from the fault's beginning to
its end, and nothing that was acknowledged before.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tests.chaos.recording.history import History, Operation

Spans = Sequence[tuple[int, int]]

#: Operations that Redis acknowledged; the others are what a process did itself.
BY_REDIS = frozenset((
    "admit", "lease", "commit", "release", "fail", "crash", "cut", "dispose", "park", "seal", "grant", "requeue",
    "unsubscribe", "subscribe", "commit_batch", "publish", "checkpoint", "rewind", "report", "record",
    "recorded", "whole",
))  # fmt: skip


def doubted(history: History, spans: Spans) -> History:
    """The same history, where what ended in one of these spans (ns of ``mono``) has the outcome unknown."""
    is_within = within(spans)
    return History(_doubt(one) if is_within(one) else one for one in history.all()) if spans else history


def within(spans: Spans) -> Callable[[Operation], bool]:
    """Whether an operation was acknowledged by Redis in one of these spans."""
    ordered = sorted(spans)
    begins = [began for began, _ in ordered]

    def is_within(one: Operation) -> bool:
        if one.op not in BY_REDIS or not one.happened or one.ended is None:
            return False
        at = bisect_right(begins, one.ended) - 1
        return at >= 0 and one.ended <= ordered[at][1]

    return is_within


def known_at(history: History, read_at: Sequence[int]) -> History:
    """Return the part of a history that an account can contain, which was read from ``read_at[0]`` to ``read_at[1]``.

    Operations that began after the reading are left out: a part may still act then, such as a trainer that takes long
    to restart. What Redis acknowledged during the reading, or after it, has the outcome unknown.
    """
    if not read_at:
        return history
    first, last = read_at
    return History(
        _doubt(one) if one.op in BY_REDIS and one.ended is not None and one.ended >= first else one
        for one in history.all()
        if one.began <= last
    )


def begun_in(operations: Iterable[Operation], spans: Spans) -> list[Operation]:
    """Those that may have happened in one of these spans: told so, or never told at all and begun before its end."""
    return [one for one in operations if one.may_have_happened and any(_may_be_in(one, *span) for span in spans)]


def _may_be_in(one: Operation, first: int, last: int) -> bool:
    return one.began <= last and (one.ended is None or one.ended >= first)


def _doubt(one: Operation) -> Operation:
    return replace(one, outcome="unknown", ended=None)
