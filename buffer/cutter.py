"""Cutting a batch: which groups, whether the bound allows it now, and the manifest.

    ask n = cut + 1 ─> plan: enough groups? inside the bound (T4)? ─> manifest ─> cut (Lua) ─> stream batches:SUB
                          └─> a reason to wait, in words

A batch is cut when it is asked for, not before: what is cut late is fresh.
"""

import logging
import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace

from buffer import limits
from buffer.group import Group
from buffer.manifest import Plan, make_manifest, why_no_loss
from buffer.samplers import CohortPool
from buffer.sizes import TooLarge, take
from buffer.state import State
from buffer.subscription import Subscription
from penstock.config.subscription import MAX_BATCH_SAMPLES
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import MAX_RECORD_BYTES
from penstock.protocol.records.manifest import Manifest
from penstock.protocol.scripts import Leadership, run
from penstock.protocol.staleness import overdue, remaining_batches, train_version
from penstock.redis.control import Client
from penstock.system.collecting import collecting_later

log = logging.getLogger(__name__)

#: Plans made for one batch while what they are made on moves.
RACES = 4
#: Waited for where something moved while it was looked at; the next look finds it.
_AGAIN = "another look at what has just moved"


class Cutter:
    """Cuts batches for the subscriptions of a state."""

    def __init__(self, client: Client, keys: Keys, lead: Leadership, state: State) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._state = state

    def try_cut(self, sub: Subscription) -> str:
        """Cut the batch that ``sub`` asks for. Returns '' when it was cut, else what it waits for. Blocks shortly.

        Raises LeadershipLost.
        """
        why = ""
        for _ in range(RACES):
            planned = self._plan(sub)
            if isinstance(planned, str):
                return planned
            with collecting_later():
                why = self._cut(sub, planned)
            if not why:
                return ""
            # What it was planned on has moved, and was read anew.
            again = self._state.subs.get(sub.name)
            if again is None or again.position.ask <= again.position.cut:
                return ""
            sub = again
        return why

    def _cut(self, sub: Subscription, planned: Plan) -> str:
        manifest = make_manifest(self._state, sub, planned)
        if not manifest.num_loss_tokens and sub.definition.mode != "eval":
            return self._give_up(sub, planned.groups, manifest.n)
        data = manifest.to_bytes()
        if len(data) > MAX_RECORD_BYTES:
            return f"a smaller batch: the record of these {len(planned.groups)} groups has {len(data):,} bytes"
        guard = planned.floor if sub.definition.on_expiry != "mask" and sub.definition.model else -1
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
                consumes=planned.consumes,
                model=sub.definition.model,
                version=planned.clock,
                oldest_allowed=guard,
                jobs=[group.job for group in planned.groups],
                gb=self._consumed_per_version(sub, planned),
            ),
        )
        return self._after(sub, planned, manifest, answer)

    def _give_up(self, sub: Subscription, groups: list[Group], n: int) -> str:
        """A batch without one loss token would train nothing: its groups are disposed of, so that others may come."""
        by_reason: dict[str, list[Group]] = {}
        records = self._state.records.read([group.job for group in groups])
        for group, samples in zip(groups, records, strict=True):
            by_reason.setdefault(why_no_loss(group, samples), []).append(group)
        for reason, given_up in by_reason.items():
            self._state.dispose(sub, reason, given_up)
        words = limits.dropped_words({reason: len(found) for reason, found in by_reason.items()})
        log.warning("%s: batch %d is not cut, since not one of its tokens bears loss: %s", sub.name, n, words)
        return f"groups with a token that bears loss: {len(groups)} of batch {n} had none and are dropped ({words})"

    def _consumed_per_version(self, sub: Subscription, planned: Plan) -> int | None:
        """B of the gate, where the size is not in groups: as many as this batch took."""
        definition = sub.definition
        return None if definition.unit == "groups" else max(1, planned.consumes) * definition.per_version

    def _after(self, sub: Subscription, planned: Plan, manifest: Manifest, answer: scripts.Cut) -> str:
        match answer.outcome:
            case "cut" | "already":
                sub.position.cut = manifest.n
                sub.position.cum += planned.consumes
                self._state.used(sub, planned.groups, manifest.n)
                self._state.drop_rejects(sub)
                return ""
            case "group":
                # It was cancelled, or used by a leader before us: look at it anew.
                log.info("%s: group %s is %s; reading it again", sub.name, answer.job, answer.why)
                self._state.forget([answer.job])
                self._state.refresh()
                self._state.ingest([answer.job])
                return f"group {answer.job} changed while batch {manifest.n} was cut"
            case _:
                self._state.refresh()
                return f"the {answer.outcome} moved while batch {manifest.n} was cut"

    def _plan(self, sub: Subscription) -> Plan | str:
        definition, position = sub.definition, sub.position
        if 0 < position.ended <= position.cut + 1:
            return limits.over(sub)
        model = definition.model
        ahead = position.cut - position.cursor
        if 0 <= definition.prefetch < ahead:
            return f"trainer:{sub.name} to commit batch {position.cursor + 1}: {ahead} batches are cut ahead of it"
        clock = self._state.clock.get(scripts.version_field(model), 0) if model else 0
        if model and clock == 0:
            return f"the first publication of model {model}"
        if why := limits.held_up(sub):
            return why
        if (why := limits.too_early(sub)) and self._end(sub) is None:
            return why
        if model and position.restored:
            return f"the publication of model {model} that has to follow the rewind of trainer:{sub.name}"
        at = clock if model else max(self._state.versions(), default=0)
        if definition.driving:
            at = train_version(clock, position.cut + 1, position.through, definition.per_version)
        floor = position.lineage.floor(at, definition.bound) if model else 0
        if isinstance(sub.pool, CohortPool):
            return self._plan_cohort(sub, sub.pool, at, floor, clock)
        running: dict[int, int] = {}
        waits = definition.on_expiry == "wait" and bool(model)
        if waits:
            # In this order: what no longer runs has been taken in by the time it is looked for.
            running = self._running(floor, at)
            self._state.catch_up()
        if model:
            self._expire(sub, floor)
        try:
            groups = self._fill(sub, floor)
            if waits and groups:
                groups, why = self._due(sub, groups, at, running)
                if why:
                    return why
            if not groups:
                groups, why = self._last(sub)
                if why:
                    return why
        except TooLarge:
            return f"a smaller batch: more than {MAX_BATCH_SAMPLES} samples would be needed, so it can never be cut"
        first_use = sum(1 for group in groups if not group.uses.get(sub.account))
        return Plan(groups, at, floor, first_use, clock)

    def _take(self, sub: Subscription, order: Iterator[Group], size: int | None = None) -> list[Group]:
        """The groups of one batch in this order; [] when there are too few. ``size``: of a batch, if not as defined."""
        definition, pool = sub.definition, sub.pool
        size = size or definition.size
        if limits.holdings(sub) < size:
            if pool.samples > MAX_BATCH_SAMPLES:
                raise TooLarge
            return []
        try:
            return take(order, unit=definition.unit, size=size, multiple=definition.multiple)
        finally:
            if isinstance(order, Generator):
                order.close()  # a pool may have put something aside for it

    def _expire(self, sub: Subscription, floor: int) -> None:
        """Give up what this subscription can no longer train."""
        self._state.dispose(sub, "rewound", sub.abandoned())
        # Those that are held back grow old as well, and their places at the gate are free then.
        held = [group for group in self._state.away.values() if sub.covers(group) and not sub.is_final(group)]
        old = sub.pool.below(floor) + [group for group in held if 0 <= group.oldest < floor]
        if sub.definition.on_expiry == "mask":
            # masked token by token; given up only where nothing would bear loss
            old = [group for group in old if group.versions and group.versions[-1] < floor]
        self._state.dispose(sub, "stale", old)

    def _running(self, floor: int, at: int) -> dict[int, int]:
        """Oldest version -> running groups, for the versions that expire first."""
        span = range(floor, at)
        pipe = self._client.pipeline(transaction=False)
        for version in span:
            pipe.zcount(self._keys.inflight, version, version)
        return {version: int(count) for version, count in zip(span, pipe.execute(), strict=True) if count}

    def _due(
        self, sub: Subscription, groups: list[Group], at: int, running: Mapping[int, int]
    ) -> tuple[list[Group], str]:
        """The batch that may be cut, or what is due before it (T4).

        It waits only for what can still come in time: for running groups, and while the batch has room for them.
        """
        late = self._overdue(sub, groups, at, running)
        if late:
            groups = self._take(sub, sub.pool.by_version()) or groups
            late = self._overdue(sub, groups, at, running)
        for version, _ in late:
            coming = sum(count for oldest, count in running.items() if oldest <= version)
            if coming and any(group.oldest > version for group in groups):
                return groups, (
                    f"{coming} running groups of version {version} or older, due before batch "
                    f"{sub.position.cut + 1} may be cut"
                )
        return groups, ""

    def _overdue(
        self, sub: Subscription, groups: list[Group], at: int, running: Mapping[int, int]
    ) -> list[tuple[int, int]]:
        definition = sub.definition
        return overdue(
            lineage=sub.position.lineage,
            train_version=at,
            bound=definition.bound,
            group_budget=definition.group_budget or len(groups) * definition.per_version,
            remaining=remaining_batches(sub.position.cut + 1, definition.per_version) * len(groups),
            untrained=Counter(sub.pool.versions) + Counter(running),
            in_batch=Counter(group.oldest for group in groups),
        )

    def _plan_cohort(self, sub: Subscription, pool: CohortPool, at: int, floor: int, clock: int) -> Plan | str:
        """The next ``size`` places in the order of admission, complete; buried and cancelled ones are left out."""
        lane, size = sub.definition.lanes[0], sub.definition.size
        first = sub.position.cum + sub.position.skipped + 1
        last = first + size - 1
        # In this order: what is finished by the count has been taken in by the time it is looked up.
        admitted = int(self._client.hget(self._keys.counters, f"seq:{lane}") or 0)
        unfinished = int(self._client.zcount(self._keys.unfinished(lane), "-inf", last))
        if admitted < last and (end := self._end(sub)) is not None:
            return self._last_cohort(sub, pool, at, floor, clock, end)
        if admitted < last:
            return limits.with_drops(sub, f"{last - admitted} of {size} jobs of the next cohort to be admitted")
        if unfinished:
            return limits.with_drops(sub, f"{unfinished} of {size} jobs of the cohort to be finished")
        self._state.catch_up()
        if sub.definition.model:
            self._expire(sub, floor)
        if why := self._held_back(sub, first, last):
            return why
        groups = pool.places(first, last)
        if not groups:
            return self._skip(sub, pool, first)
        return Plan(groups, at, floor, size, clock)

    def _held_back(self, sub: Subscription, first: int, last: int) -> str:
        """A cohort is not cut without the groups that a payload server keeps back, which are not gone."""
        found = [
            group
            for group in self._state.away.values()
            if sub.covers(group) and first <= group.seq <= last and not sub.is_final(group)
        ]
        names = ", ".join(sorted({server for group in found for server in group.away}))
        return f"{len(found)} groups of the cohort, held back until payload server {names} answers" if found else ""

    def _last_cohort(
        self, sub: Subscription, pool: CohortPool, at: int, floor: int, clock: int, end: limits.End
    ) -> Plan | str:
        """What is left in the order of admission when the data has ended: fewer places than a cohort has."""
        first = sub.position.cum + sub.position.skipped + 1
        # Read anew: jobs may have been admitted and finished since it was looked at.
        admitted = int(self._client.hget(self._keys.counters, f"seq:{sub.definition.lanes[0]}") or 0)
        if admitted - first + 1 >= sub.definition.size:
            return _AGAIN
        if why := self._held_back(sub, first, admitted):
            return why
        if sub.definition.model:
            self._expire(sub, floor)
        groups = pool.places(first, admitted) if end.train else []
        return Plan(groups, at, floor, admitted - first + 1, clock) if groups else self._conclude(sub, end)

    def _skip(self, sub: Subscription, pool: CohortPool, first: int) -> str:
        """Pass over whole cohorts of which nothing is left: buried, cancelled, given up, or before our time."""
        lane, size = sub.definition.lanes[0], sub.definition.size
        unfinished = self._client.zrange(self._keys.unfinished(lane), 0, 0, withscores=True)
        admitted = int(self._client.hget(self._keys.counters, f"seq:{lane}") or 0)
        held = [group.seq for group in self._state.away.values() if group.lane == lane and group.seq >= first]
        taken = (pool.next_place(first), int(unfinished[0][1]) if unfinished else None, admitted + 1, *held)
        places = (min(place for place in taken if place is not None) - first) // size * size
        call = scripts.skip(self._keys, self._lead, sub.name, revision=self._state.revision, place=first, places=places)
        run(self._client, call)
        log.warning(
            "%s: nothing is left of %d places in the order of admission; going on behind them", sub.name, places
        )
        self._state.refresh()
        return f"the cohort behind {places} jobs of which none is left"

    def _fill(self, sub: Subscription, floor: int) -> list[Group]:
        """The groups of the next batch, [] when there are too few.

        Rejects that were held back are among them where nothing else can come any more.
        """
        n, size = sub.position.cut + 1, sub.definition.size
        groups = self._take(sub, sub.pool.order(n))
        if groups or not sub.held or len(sub.held) < size - len(sub.pool) or not self._nothing_comes(sub):
            return groups
        lives = sub.position.lineage.lives
        kept = self._state.keep_rejects(
            sub, size - len(sub.pool), lambda group: not 0 <= group.oldest < floor and all(map(lives, group.versions))
        )
        if kept:
            log.info("%s: %d rejects are trained on after all: too few other groups remain", sub.name, kept)
        return self._take(sub, sub.pool.order(n))

    def _nothing_comes(self, sub: Subscription) -> bool:
        """True when the gate admits nothing, and nothing is under way. What completed meanwhile is taken in."""
        # In this order: what the gate let in before it closed is under way, or complete.
        rooms = run(self._client, scripts.room(self._keys, limits.gates(self._state.subs)))
        is_open = bool(rooms) and all(free > 0 for free, _ in rooms.values())
        if is_open and limits.end_of_data(self._client, self._keys) is None:
            return False
        if limits.under_way(self._client, self._keys, sub):
            return False
        self._state.catch_up()
        return True

    def _end(self, sub: Subscription) -> limits.End | None:
        """The end of the data where it is reached and nothing is under way; what completed meanwhile is taken in."""
        if "train" not in sub.definition.lanes:
            return None
        # In this order: what was admitted before the end is under way, or complete by the count.
        end = limits.end_of_data(self._client, self._keys)
        if end is None or limits.under_way(self._client, self._keys, sub):
            return None
        completed = int(self._client.hget(self._keys.counters, "completed") or 0)
        self._state.catch_up()
        return replace(end, completed=completed)

    def _last(self, sub: Subscription) -> tuple[list[Group], str]:
        """The groups of a last batch, where the data has ended and too few are left; or why there is none."""
        held = len(sub.pool) + len(sub.held)
        end = self._end(sub)
        if end is None:
            return [], self._short(sub)
        if len(sub.pool) + len(sub.held) > held:
            return [], _AGAIN
        if any(sub.covers(group) and not sub.is_final(group) for group in self._state.away.values()):
            # The data is not over while a payload server keeps groups back; `buffer:payloads` names it.
            return [], limits.short(sub, 0)
        size = min(sub.definition.size, limits.holdings(sub))
        groups = self._take(sub, sub.pool.order(sub.position.cut + 1), size) if end.train and size else []
        return groups, "" if groups else self._conclude(sub, end)

    def _conclude(self, sub: Subscription, end: limits.End) -> str:
        """Say that the batch asked for never comes."""
        n = sub.position.cut + 1
        call = scripts.conclude(
            self._keys,
            self._lead,
            sub.name,
            n=n,
            end=end.position,
            completed=end.completed,
            lanes=limits.lanes(sub),
        )
        if not run(self._client, call):
            return _AGAIN
        sub.position.ended = n
        log.info("%s: the data has ended, and batch %d never comes", sub.name, n)
        return limits.over(sub)

    def _short(self, sub: Subscription) -> str:
        running = limits.under_way(self._client, self._keys, sub)
        if not running and sub.definition.driving and "train" in sub.definition.lanes:
            self._owe(sub)
        return limits.short(sub, running)

    def _owe(self, sub: Subscription) -> None:
        """Nothing is in flight, and what the gate let in is too little for this batch: let in more (protocol.md)."""
        definition, pool = sub.definition, sub.pool
        # In this order: what is complete by the count has been taken in by the time it is measured.
        completed = int(self._client.hget(self._keys.counters, "completed") or 0)
        if self._state.catch_up():
            return  # it may be enough by now
        have = limits.holdings(sub)
        missing = max(definition.size - have, 1)
        each = have / len(pool) if len(pool) else float(missing)
        groups = min(max(1, math.ceil(missing / max(each, 1))), MAX_BATCH_SAMPLES)
        counted = [name for name, one in self._state.subs.items() if one.account == sub.account]
        owed = run(self._client, scripts.grant(self._keys, self._lead, sub.name, groups, completed, counted))
        if owed:
            log.info("%s: %d groups are owed to batch %d", sub.name, owed, sub.position.cut + 1)
