"""Cut batches: gather the view for the decision, and execute its result.

    ask n = cut + 1 ─> view ─> decide ─> manifest ─> cut (Lua) ─> stream batches:SUB
                        ^        ├─> an action to take first ─┐
                        │        └─> the cause of a wait      │
                        └───────────────────────────────────┘

A batch is cut only on request, so that it contains the newest groups that are ready.
"""

import logging
from collections.abc import Iterable, Sequence

from penstock.buffer.decision import Conclude, Cut, Dispose, GrantExtra, KeepRejects, NeedInFlight, Skip, Wait, decide
from penstock.buffer.group import Group
from penstock.buffer.manifest import bearing_of, make_manifest, why_no_loss
from penstock.buffer.state import State
from penstock.buffer.subscription import Subscription
from penstock.buffer.view import End, InFlight, View
from penstock.config.subscription import Unit
from penstock.errors import ProtocolError
from penstock.protocol import scripts
from penstock.protocol.gate import Room, read_rooms
from penstock.protocol.scripts import Leadership, run
from penstock.records import sample
from penstock.records.cause import Cause, ledger
from penstock.records.causes import BatchTooLarge, CutRepeated, NoLossTokens
from penstock.records.codec import MAX_RECORD_BYTES, count_of
from penstock.records.disposal import Disposal
from penstock.records.keys import Keys
from penstock.records.manifest import Manifest
from penstock.records.worker_causes import RecordUnreadable
from penstock.redis.commands import Client
from penstock.system.garbage_collection import collecting_later

log = logging.getLogger(__name__)


def read(client: Client, keys: Keys, view: View, gates: Sequence[Sequence[str]]) -> InFlight:
    """Read the in-flight jobs of the subscription of ``view``. Blocks for a round trip, two with held rejects.

        gate ─> end of the data ─> jobs ─> completed, admitted ─> unfinished, running ─> ingest of completed groups

    A cut is correct only with this order of reads. A job only moves forward along it: it is admitted before the gate
    closes or the data ends, and is in a lane (or delayed) until complete, so a job missed by one read is seen later.
    Completed groups are ingested (``State.catch_up``) last: a job no longer in flight is in a pool then.

    Args:
        gates: names of the subscriptions that hold the gate; members of a pool are one entry.

    Raises:
        ProtocolError: a count in Redis is invalid.
    """
    is_gate_open = not view.rejects or _is_open(read_rooms(client, keys, gates).values())
    lane, last = view.definition.lanes[0], view.first_place + view.definition.size - 1
    versions = range(view.floor, view.train_version) if view.policy.waits else range(0)
    pipe = client.pipeline(transaction=False)
    pipe.hmget(keys.source, "train", "end", "last_batch")
    for name in view.lanes:
        pipe.xlen(keys.jobs(name))
    pipe.zcard(keys.delayed)
    pipe.hmget(keys.counters, "completed", f"seq:{lane}")
    pipe.zcount(keys.unfinished(lane), "-inf", last)
    pipe.zrange(keys.unfinished(lane), 0, 0, withscores=True)
    for version in versions:
        pipe.zcount(keys.inflight, version, version)
    source, *answers = pipe.execute()
    jobs, answers = answers[: len(view.lanes) + 1], answers[len(view.lanes) + 1 :]
    (completed, admitted), unfinished, first, *running = answers
    return InFlight(
        jobs=sum(map(int, jobs)),
        running={version: int(count) for version, count in zip(versions, running, strict=True) if count},
        admitted=count_of(admitted, f"The number of jobs admitted to lane {lane}"),
        unfinished=int(unfinished),
        first_unfinished=int(first[0][1]) if first else None,
        completed=count_of(completed, "The number of jobs completed"),
        end=_end(*source),
        is_gate_open=is_gate_open,
    )


def _is_open(rooms: Iterable[Room]) -> bool:
    """Return whether every gate admits a job; without a gate nothing is admitted."""
    free = [room.free for room in rooms]
    return bool(free) and min(free) > 0


def _end(position: bytes | None, end: bytes | None, last_batch: bytes | None) -> End | None:
    """Return the end of the data if it is reached, or None."""
    if end is None:
        return None
    last = count_of(end, "The end of the data")
    return None if count_of(position, "The position in the data") < last else End(last, last_batch == b"train")


#: Most attempts to cut one batch if its data changes between decision and cut.
MAX_CUT_ATTEMPTS = 4


class Cutter:
    """Cuts batches for the subscriptions of a state."""

    def __init__(self, client: Client, keys: Keys, lead: Leadership, state: State) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._state = state

    def try_cut(self, sub: Subscription) -> Cause | None:
        """Cut the batch that ``sub`` requests. Returns None if it was cut, else the cause of the wait. Blocks briefly.

        Raises LeadershipLost.
        """
        cause: Cause | None = None
        for _ in range(MAX_CUT_ATTEMPTS):
            decided = self._execute_decisions(sub)
            if not isinstance(decided, Cut):
                return decided
            with collecting_later():
                cause = self._cut(sub, decided)
            if cause is None:
                return None
            # The data of the decision changed and was read again.
            again = self._state.subs.get(sub.name)
            if again is None or again.position.ask <= again.position.cut:
                return None
            sub = again
        return cause

    def _execute_decisions(self, sub: Subscription) -> Cut | Cause:
        """Execute decisions until the batch can be cut or must wait."""
        view = self._view(sub)
        while True:
            match decide(view):
                case Cut() as decided:
                    return decided
                case Wait(cause):
                    return cause
                case NeedInFlight():
                    try:
                        seen = self._read_in_flight(view)
                    except ProtocolError as exc:
                        # A count is invalid, or a subscription is: the next refresh excludes it.
                        return RecordUnreadable(str(exc))
                    view = self._view(sub, seen)
                    continue
                case Dispose(reason, groups):
                    self._state.dispose(sub, reason, groups)
                case KeepRejects(groups):
                    self._state.keep_rejects(sub, groups)
                    log.info("%s: %d rejected groups will be trained: too few others remain", sub.name, len(groups))
                case Skip() as decided:
                    return self._skip(sub, decided)
                case GrantExtra() as decided:
                    return self._grant_extra(sub, decided)
                case Conclude() as decided:
                    return self._conclude(sub, decided)
            view = self._view(sub)

    def _view(self, sub: Subscription, seen: InFlight | None = None) -> View:
        state, model = self._state, sub.definition.model
        return View(
            sub.name,
            sub.definition,
            sub.position,
            sub.pool,
            clock=state.clock.get(scripts.version_field(model), 0) if model else 0,
            newest=max(state.versions(), default=0),
            abandoned=sub.abandoned() if model else (),
            away=[group for group in state.away.values() if sub.covers(group) and not sub.is_final(group)],
            rejects=[state.groups[job] for job in sub.held],
            unfilterable=sub.unfilterable,
            stuck=sub.stuck,
            in_flight=seen,
        )

    def _read_in_flight(self, view: View) -> InFlight:
        # Read in-flight jobs before the pool, or a group that completes in between is missed.
        seen = read(self._client, self._keys, view, self._state.gates())
        self._state.catch_up()
        return seen

    def _skip(self, sub: Subscription, decided: Skip) -> Cause:
        call = scripts.skip(
            self._keys,
            self._lead,
            sub.name,
            revision=self._state.revision,
            place=decided.first,
            places=decided.places,
        )
        run(self._client, call)
        log.warning(
            "%s: skipped %d places in the order of admission: none of them has a group left",
            sub.name,
            decided.places,
        )
        self._state.refresh()
        return decided.cause

    def _grant_extra(self, sub: Subscription, decided: GrantExtra) -> Cause:
        """Grant groups beyond the gate (docs/internals/protocol.md)."""
        counted = [name for name, one in self._state.subs.items() if one.account == sub.account]
        call = scripts.grant(self._keys, self._lead, sub.name, decided.groups, decided.completed, counted)
        if owed := run(self._client, call):
            log.info("%s: granted %d groups beyond the gate for batch %d", sub.name, owed, sub.position.cut + 1)
        return decided.cause

    def _conclude(self, sub: Subscription, decided: Conclude) -> Cause:
        """Record that the requested batch will not be cut."""
        n = sub.position.cut + 1
        call = scripts.conclude(
            self._keys,
            self._lead,
            sub.name,
            n=n,
            end=decided.end,
            completed=decided.completed,
            lanes=decided.lanes,
        )
        if not run(self._client, call):
            return CutRepeated()
        sub.position.ended = n
        log.info("%s: the data has ended; batch %d will not be cut", sub.name, n)
        return decided.cause

    def _cut(self, sub: Subscription, decided: Cut) -> Cause | None:
        manifest = make_manifest(self._state, sub, decided)
        if not manifest.num_loss_tokens and not sub.definition.asks:
            return self._dispose_without_loss(sub, decided.groups, manifest.n)
        data = manifest.to_bytes()
        if len(data) > MAX_RECORD_BYTES:
            return BatchTooLarge(groups=len(decided.groups), num_bytes=len(data))
        jobs = [group.job for group in decided.groups]
        answer = run(
            self._client,
            scripts.cut(
                self._keys,
                self._lead,
                sub.name,
                revision=self._state.revision,
                n=manifest.n,
                manifest=data,
                digest=Manifest.digest(data),
                consumes=decided.consumes,
                model=sub.definition.model,
                version=decided.clock,
                oldest_allowed=decided.policy.oldest_allowed(decided.floor),
                jobs=jobs,
                gb=_consumed_per_version(sub, decided),
                of_use=sample.note(manifest, clocked=bool(sub.definition.model)),
                bearing=bearing_of(manifest, jobs),
            ),
        )
        return self._handle_answer(sub, decided, manifest.n, answer)

    def _dispose_without_loss(self, sub: Subscription, groups: list[Group], n: int) -> Cause:
        """Dispose of the groups of a batch without loss tokens, to make room for others."""
        by_reason: dict[Disposal, list[Group]] = {}
        records = self._state.records.read([group.job for group in groups])
        for group, samples in zip(groups, records, strict=True):
            why = why_no_loss(group, samples, masks_truncated=sub.definition.mask_truncated)
            by_reason.setdefault(why, []).append(group)
        for reason, disposed in by_reason.items():
            self._state.dispose(sub, reason, disposed)
        dropped = {reason.value: len(disposed) for reason, disposed in by_reason.items()}
        log.warning("%s: batch %d was not cut because none of its tokens bears loss: %s", sub.name, n, ledger(dropped))
        return NoLossTokens(n, len(groups), dropped)

    def _handle_answer(self, sub: Subscription, decided: Cut, n: int, answer: scripts.CutAnswer) -> Cause | None:
        match answer.outcome:
            case "cut" | "already":
                sub.position.cut = n
                sub.position.cum += decided.consumes
                self._state.use(sub, decided.groups, n)
                self._state.drop_rejects(sub)
                return None
            case "group":
                # The group was cancelled, or used by an earlier leader: read it again.
                log.info("%s: group %s is %s; reading it again", sub.name, answer.job, answer.why)
                self._state.forget([answer.job])
                self._state.refresh()
                self._state.ingest([answer.job])
                return CutRepeated()
            case _:
                self._state.refresh()
                return CutRepeated()


def _consumed_per_version(sub: Subscription, decided: Cut) -> int | None:
    """Return the groups per version for the gate, estimated from this batch; None if the batch size is in groups."""
    definition = sub.definition
    return None if definition.unit is Unit.GROUPS else max(1, decided.consumes) * definition.per_version
