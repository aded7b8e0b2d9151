"""Verbs of trainers and their subscriptions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.config.subscription import Definition, Trait, fields_with
from penstock.errors import ConfigError, PublishError
from penstock.records.keys import Keys
from penstock.records.publication import MAX_ORDER_BYTES, Order
from penstock.redis.call import Call, Value, script, text, texts, version_field

#: Time to live of the orders; a clock that is set ahead by a day must not delete them.
TTL_S = 7 * 86400


class Heard(NamedTuple):
    """What a rank reads of rank 0."""

    #: None if it is not given yet.
    order: Order | None
    #: Publication of rank 0's last order; 0: none.
    call: int
    #: Whether the owner's lease runs.
    is_alive: bool


def order(
    keys: Keys, sub: str, *, owner: str, gen: int, call: int, place: int, word: str, ranks: int
) -> Call[list[int] | None]:
    """Give order ``place`` of publication ``call``; return the place that each other rank waits for.

    -1: that rank has not arrived. None: the caller does not own the subscription.
    """

    def parse(answer: Any) -> list[int] | None:
        return [int(one) for one in answer[1:]] if text(answer[0]) == "ok" else None

    args: list[Value] = [keys.prefix, owner, gen, call, place, word, ranks, TTL_S]
    return Call(script("order"), [keys.sub(sub), keys.orders(sub)], args, parse)


def hear(keys: Keys, sub: str, *, owner: str, call: int, place: int, rank: int) -> Call[Heard | None]:
    """Wait for order ``place`` of publication ``call`` as ``rank``. None: another trainer has the subscription.

    Parsing the answer raises ProtocolError if it is not an order.
    """

    def parse(answer: Any) -> Heard | None:
        if text(answer[0]) != "ok":
            return None
        given = Order.from_text(answer[1], f"What rank 0 of subscription {sub!r} orders") if answer[1] else None
        return Heard(given, int(answer[2]), bool(answer[3]))

    args: list[Value] = [keys.prefix, owner, call, place, rank, TTL_S, MAX_ORDER_BYTES + 1]
    return Call(script("hear"), [keys.sub(sub), keys.orders(sub), keys.owner(sub)], args, parse)


#: Answer to a subscribe that was planned on an old revision.
MOVED = -2


def subscribe(
    keys: Keys, sub: str, definition: Mapping[str, Value], *, revision: int | None = None, operator: bool = False
) -> Call[int]:
    """Make or change a subscription; return the revision of subs, or ``MOVED``.

    Args:
        revision: the one that the change was planned on; None: any.
        operator: these fields stay when the trainer returns with its own definition; an empty value removes one.

        Raises ConfigError if a subscription of this name was dropped, or a field cannot be changed so.
    """

    def parse(answer: Any) -> int:
        code, *what = int(answer[0]), *texts(answer[1:])
        if code == -1:
            raise _was_dropped(keys, sub)
        if code == -5:
            raise ConfigError(
                f"The pool of {sub!r} in run {keys.run!r} was dropped with its last member: name another."
            )
        if code == -6:
            raise ConfigError(
                f"Subscription {sub!r} of run {keys.run!r} is of staleness.mode {what[0]}, and is now asked for as "
                f"{what[1]}: its groups were admitted for {what[0]}, so set staleness.mode back to {what[0]}, or begin "
                "a new run."
            )
        if code == -7:
            raise ConfigError(
                f"Subscription {sub!r} of run {keys.run!r} has sampler {what[0]}, and is now asked for with {what[1]}: "
                "whole cohorts are counted by places and others by groups, so keep its sampler, or take another name."
            )
        if code == -3:
            raise ConfigError(
                f"The {what[0]} of subscription {sub!r} cannot change: groups remember it. Take another name."
            )
        if code == -4:
            raise ConfigError(
                f"Subscription {sub!r} and {what[1]!r} share one pool, so their {what[0]} must be the same."
            )
        return code

    flat: list[Value] = [part for pair in definition.items() for part in pair]
    rev: Value = "" if revision is None else revision
    agreed = ",".join(sorted(map(Definition.key_of, fields_with(Trait.AGREED))))
    args = [keys.prefix, sub, rev, int(operator), agreed, *flat]
    return Call(script("subscribe"), [keys.subs, keys.sub(sub)], args, parse)


def _was_dropped(keys: Keys, sub: str) -> ConfigError:
    return ConfigError(f"Subscription {sub!r} of run {keys.run!r} was dropped: take another name.")


@dataclass(frozen=True, slots=True)
class Joined:
    """Outcome of join. ``holder_ms``: time left of the lease of another owner (-1 if it was taken over)."""

    mine: bool
    gen: int = 0
    cursor: int = 0
    cut: int = 0
    ckpt: int = 0
    floor: int = 0
    holder_ms: int = 0


def join(keys: Keys, sub: str, owner: str, lease_ms: int, *, only_renew: bool = False, job: str = "") -> Call[Joined]:
    """Take or renew the ownership of a subscription. ``job``: an id that the ranks of this start have in common.

    Raises ConfigError if a subscription of this name was dropped.
    """

    def parse(answer: Any) -> Joined:
        if answer[0] == -1:
            raise _was_dropped(keys, sub)
        if not answer[0]:
            return Joined(False, holder_ms=int(answer[1]))
        return Joined(True, *(int(v) for v in answer[1:]))

    args: list[Value] = [keys.prefix, owner, lease_ms, int(only_renew), job]
    return Call(script("join"), [keys.sub(sub), keys.owner(sub), keys.subs], args, parse)


def leave(keys: Keys, sub: str, owner: str) -> Call[bool]:
    return Call(script("leave"), [keys.owner(sub)], [owner], bool)


def ask(keys: Keys, sub: str, n: int, owner: str, gen: int) -> Call[bool]:
    """Report that the trainer waits for batch ``n``. False: the subscription is not the caller's."""
    return Call(script("ask"), [keys.sub(sub)], [keys.prefix, sub, n, owner, gen], bool)


@dataclass(frozen=True, slots=True)
class BatchCommit:
    """Outcome of commit_batch: committed, waiting (for other ranks), already, owner, order, diverged, unknown or role.

    ``bits``: ``ROLE:0110,...``, a 1 for each rank of each role that has committed the batch.
    """

    outcome: str
    cursor: int
    bits: str = ""


def commit_batch(
    keys: Keys, sub: str, *, owner: str, gen: int, n: int, digest: str, rank: int, ranks: int, role: str = ""
) -> Call[BatchCommit]:
    """Commit batch ``n`` for one rank of one role; the last one moves the cursor."""
    args: list[Value] = [keys.prefix, owner, gen, n, digest, rank, ranks, role]
    names = [keys.sub(sub), keys.batches(sub)]
    return Call(script("commit_batch"), names, args, lambda a: BatchCommit(text(a[0]), int(a[1]), text(a[2])))


def column(
    keys: Keys,
    sub: str,
    *,
    owner: str,
    gen: int,
    n: int,
    digest: str,
    rank: int,
    role: str,
    most: int,
    ttl_s: int,
    places: Iterable[tuple[str, str]],
) -> Call[str]:
    """Announce that a column of batch ``n`` is written to (server, key) places: ok, or why it must not be."""
    names = [keys.sub(sub), keys.batches(sub), keys.columns(sub)]
    head: list[Value] = [keys.prefix, owner, gen, n, digest, rank, role, most, ttl_s]
    return Call(script("column"), names, [*head, *(f"{server}|{key}" for server, key in places)], text)


def write_column(key: str, ttl_s: int, values: Mapping[int, bytes]) -> Call[list[int]]:
    """Write values of a column by row index on a payload server; return the rows that hold other bytes already."""
    flat: list[Value] = [part for pair in values.items() for part in pair]
    return Call(script("write_column"), [key], [ttl_s, *flat], lambda answer: [int(row) for row in answer])


def column_lost(keys: Keys, sub: str, ttl_s: int, values: Iterable[str]) -> Call[int]:
    """Count values (DIGEST/COLUMN/ROW) missing in a column because its writer lost the payload; return new ones."""
    return Call(script("column_lost"), [keys.columns_lost(sub)], [keys.prefix, ttl_s, *values], int)


def agree(
    keys: Keys, sub: str, *, owner: str, gen: int, number: int, role: str, rank: int, ranks: int, word: str, ttl_s: int
) -> Call[list[str] | None]:
    """Report ``word`` in round ``number``; return the report of every rank of the role ('': none yet).

    None: the subscription is not the caller's.
    """

    def parse(answer: Any) -> list[str] | None:
        return texts(answer[1:]) if text(answer[0]) == "ok" else None

    args: list[Value] = [keys.prefix, owner, gen, number, role, rank, ranks, word, ttl_s]
    return Call(script("agree"), [keys.sub(sub), keys.agree(sub)], args, parse)


def publish(
    keys: Keys,
    sub: str,
    *,
    owner: str,
    gen: int,
    model: str,
    version: int,
    through: int,
    step: int,
    record: bytes,
    rev: int = 0,
    known: int = 0,
) -> Call[int]:
    """Announce a version; return the version of the clock. Raises PublishError if it cannot be announced.

    ``known``: the newest version that a trainer or an engine holds. It is above the clock only when a failover lost
    publications; the next version is then ``known + 1``, and those between are abandoned (T1).
    """

    def parse(answer: Any) -> int:
        outcome, clock = text(answer[0]), int(answer[1])
        if outcome in ("published", "already"):
            return clock
        why = {
            "owner": f"subscription {sub!r} belongs to another trainer by now, or was rewound",
            "version": f"the clock of model {model!r} stands at {clock}, so the next version is {clock + 1}",
            "through": (
                f"batch {through} is not committed, or a version consumed it already; a trainer that was started again "
                "restores its checkpoint first (load_state_dict), and one that continues commits a batch"
            ),
        }[outcome]
        raise PublishError(f"Version {version} of model {model!r} cannot be announced: {why}.")

    names = [keys.clock, keys.sub(sub), keys.batches(sub), keys.weights(model), keys.steps(model)]
    args: list[Value] = [keys.prefix, owner, gen, version_field(model), version, through, step, rev, record, known]
    return Call(script("publish"), names, args, parse)


def checkpointed(keys: Keys, sub: str, *, owner: str, gen: int, n: int, role: str = "") -> Call[int]:
    """Report that the role has a checkpoint up to batch ``n``.

    Returns 1; 0 if the caller does not own the subscription; -1 if the batch is not committed.
    """
    return Call(script("checkpointed"), [keys.sub(sub)], [keys.prefix, owner, gen, n, role], int)


@dataclass(frozen=True, slots=True)
class Rewound:
    """Result of ``rewind``.

    ``outcome``: ``rewound`` (``gen``: the new generation), ``owner`` (another trainer has the subscription), ``floor``
    or ``cursor`` (``n`` is outside; ``limit`` is the nearest allowed batch).
    """

    outcome: str
    gen: int
    limit: int


def rewind(keys: Keys, sub: str, *, owner: str, gen: int, n: int, model: str) -> Call[Rewound]:
    """Deliver every batch after ``n`` again; versions that consumed any of them are abandoned."""
    args: list[Value] = [keys.prefix, owner, gen, n, version_field(model) if model else ""]
    names = [keys.sub(sub), keys.batches(sub), keys.clock, keys.weights(model or "-"), keys.subs]
    return Call(script("rewind"), names, args, lambda a: Rewound(text(a[0]), int(a[1]), int(a[2])))


def lost(keys: Keys, samples: Sequence[tuple[str, int, str]]) -> Call[list[str]]:
    """Report lost payloads of samples (job, k, token that committed it); return those not reported before."""
    flat: list[Value] = [part for sample in samples for part in sample]
    names = [f"{job}/{k}" for job, k, _ in samples]
    return Call(script("lost"), [keys.counters], [keys.prefix, *flat], lambda answer: [names[int(i)] for i in answer])
