"""Represent a subscription in the buffer's memory: its definition and position in Redis, and its unused groups."""

import hashlib
import math
import time
from collections.abc import Mapping

from penstock.buffer.group import Group
from penstock.buffer.samplers import Pool, make_pool
from penstock.config.subscription import Definition, Trait, fields_with
from penstock.protocol.gate import Holder
from penstock.protocol.position import Position
from penstock.protocol.scripts import Judged, version_field
from penstock.protocol.staleness import Lineage, train_version
from penstock.records.disposal import Disposal


class Subscription:
    """Live subscription in the leader's memory; ``pool`` holds the groups that it may still use."""

    def __init__(self, name: str, definition: Definition, position: Position) -> None:
        self.name = name
        self.definition = definition
        self.position = position
        #: Why its record in Redis is invalid, else ''. While it is, nothing is cut for it and no group is deleted.
        self.unreadable = ""
        #: Job -> verdict to record if the held reject (``keep_when_few``) is dropped, in the order of completion.
        self.held: dict[str, Judged] = {}
        #: Job -> error of its filter, with ``on_filter_error: stop``.
        self.stuck: dict[str, str] = {}
        #: Name of a filter that the buffer may not run; '' if it may run all.
        self.unfilterable = ""
        self.pool: Pool = make_pool(
            definition.sampler, seed=definition.seed, priority=definition.priority, exponent=definition.exponent
        )
        #: Job -> (refused group, reason); the leader will dispose of it.
        self.refused: dict[str, tuple[Group, Disposal]] = {}
        #: Job -> group whose versions were not compared with the lineage yet.
        self._unchecked: dict[str, Group] = {}
        self._checked_against = Lineage()

    @property
    def account(self) -> str:
        """Return the name under which groups count its uses."""
        return self.definition.account(self.name)

    @property
    def holder(self) -> Holder:
        """Return the fields that decide whether it holds the gate."""
        return Holder(self.account, self.definition.driving and not self.position.parked)

    def staleness(self, group: Group, clock: Mapping[str, int]) -> int:
        """Return the staleness of a group in the next batch (T2); 0 if the subscription follows no model's versions."""
        definition, position = self.definition, self.position
        version = clock.get(version_field(definition.model), 0) if definition.model else 0
        if definition.driving:
            version = train_version(version, position.cut + 1, position.through, definition.per_version)
        return position.lineage.lag(group.oldest, version)

    def has_same_pool(self, definition: Definition) -> bool:
        """Return whether another definition uses the same groups in the same order."""
        return all(getattr(self.definition, name) == getattr(definition, name) for name in fields_with(Trait.POOL))

    def place(self, group: Group) -> None:
        """Add the group to the pool or remove it, as needed."""
        if not self.wants(group):
            self._remove(group)
        elif reason := self._reason_to_refuse(group):
            self.refused[group.job] = (group, reason)
        else:
            self.pool.add(group)
            self._unchecked[group.job] = group

    def _reason_to_refuse(self, group: Group) -> Disposal | None:
        """Return why the subscription refuses an unused group, or None."""
        position = self.position
        if group.completed <= position.since or 0 <= group.oldest < position.since_version:
            return Disposal.BEFORE
        if self.definition.quota < 1 and _sample_fraction(self.definition.seed, group.job) >= self.definition.quota:
            return Disposal.QUOTA
        return None

    def too_many(self) -> list[Group]:
        """Return the groups beyond the subscription's retention limits, longest held first."""
        definition, pool = self.definition, self.pool
        groups = len(pool) - definition.keep_groups if definition.keep_groups else 0
        oldest_s = time.monotonic() - definition.keep_s if definition.keep_s else -math.inf
        over: list[Group] = []
        for group in pool:
            if groups <= 0 and group.since_s >= oldest_s:
                break
            over.append(group)
            groups -= 1
        return over

    def abandoned(self) -> list[Group]:
        """Return groups of the pool with a version that a rewind abandoned (T1), until they are disposed of.

        Other groups are checked once.
        """
        lineage = self.position.lineage
        if lineage.abandoned != self._checked_against.abandoned:
            self._unchecked = {group.job: group for group in self.pool}
        self._checked_against = lineage
        dead = [group for group in self._unchecked.values() if not all(map(lineage.lives, group.versions))]
        self._unchecked = {group.job: group for group in dead}
        return dead

    def forget(self, group: Group) -> None:
        """Remove a group that is no longer ready."""
        self._remove(group)
        self.held.pop(group.job, None)
        self.stuck.pop(group.job, None)

    def _remove(self, group: Group) -> None:
        self.pool.discard(group)
        self.refused.pop(group.job, None)
        self._unchecked.pop(group.job, None)

    def wants(self, group: Group) -> bool:
        """Return whether it may use the group: in its lanes, permanent, below the reuse limit, not filtered out."""
        return (
            self.covers(group)
            and group.kept >= group.n
            and not group.away
            and 0 <= group.uses.get(self.account, 0) < self.definition.reuse
            and group.job not in self.held
            and group.job not in self.stuck
        )

    def is_final(self, group: Group) -> bool:
        """Return whether it will not use the group again, unless it rewinds, which checkpoints limit."""
        uses = group.uses.get(self.account, 0)
        return not self.unreadable and (uses < 0 or uses >= self.definition.reuse)

    def covers(self, group: Group) -> bool:
        """Return whether the group is in its lanes, or may be because its record is unreadable."""
        return group.lane in self.definition.lanes or bool(self.unreadable)


def _sample_fraction(seed: int, job: str) -> float:
    """Return a number in [0, 1) that depends only on seed and job."""
    digest = hashlib.blake2b(f"{seed}/{job}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
