"""A subscription in the buffer's memory: definition and position as in Redis, and its unused groups."""

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
    """One live subscription in the leader's memory; ``pool`` holds the groups that it may still use."""

    def __init__(self, name: str, definition: Definition, position: Position) -> None:
        self.name = name
        self.definition = definition
        self.position = position
        #: Why its record in Redis is invalid: nothing is cut for it, and no group is deleted, until it is corrected.
        self.unreadable = ""
        #: Rejects that are held back (``keep_when_few``): job -> what is recorded if they are dropped, by completion.
        self.held: dict[str, Judged] = {}
        #: Groups whose filter raised, if that stops cutting: job -> the error.
        self.stuck: dict[str, str] = {}
        #: A filter that the buffer may not run; '' if it may run all.
        self.unfilterable = ""
        self.pool: Pool = make_pool(
            definition.sampler, seed=definition.seed, priority=definition.priority, exponent=definition.exponent
        )
        #: Groups that are not for it, with the reason; the leader has yet to dispose of them.
        self.refused: dict[str, tuple[Group, Disposal]] = {}
        #: Groups whose versions were not compared with the lineage yet.
        self._unproven: dict[str, Group] = {}
        self._proven_by = Lineage()

    @property
    def account(self) -> str:
        """The name by which groups count its uses."""
        return self.definition.account(self.name)

    @property
    def holder(self) -> Holder:
        """The fields that decide whether it holds the gate."""
        return Holder(self.account, self.definition.driving and not self.position.parked)

    def staleness(self, group: Group, clock: Mapping[str, int]) -> int:
        """Return the staleness of a group in the next batch (T2); 0 if the subscription follows no model's clock."""
        definition, position = self.definition, self.position
        version = clock.get(version_field(definition.model), 0) if definition.model else 0
        if definition.driving:
            version = train_version(version, position.cut + 1, position.through, definition.per_version)
        return position.lineage.lag(group.oldest, version)

    def keeps_its_pool(self, definition: Definition) -> bool:
        """Return whether another definition takes the same groups in the same order."""
        return all(getattr(self.definition, name) == getattr(definition, name) for name in fields_with(Trait.POOL))

    def place(self, group: Group) -> None:
        """Add the group to the pool, or remove it."""
        if not self.wants(group):
            self._take_out(group)
        elif reason := self._refuses(group):
            self.refused[group.job] = (group, reason)
        else:
            self.pool.add(group)
            self._unproven[group.job] = group

    def _refuses(self, group: Group) -> Disposal | None:
        """Return why an unused group is not for this subscription, or None."""
        position = self.position
        if group.completed <= position.since or 0 <= group.oldest < position.since_version:
            return Disposal.BEFORE
        if self.definition.quota < 1 and _draw(self.definition.seed, group.job) >= self.definition.quota:
            return Disposal.QUOTA
        return None

    def too_many(self) -> list[Group]:
        """Return the groups beyond the limits of the subscription, longest held first."""
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
        if lineage.abandoned != self._proven_by.abandoned:
            self._unproven = {group.job: group for group in self.pool}
        self._proven_by = lineage
        dead = [group for group in self._unproven.values() if not all(map(lineage.lives, group.versions))]
        self._unproven = {group.job: group for group in dead}
        return dead

    def forget(self, group: Group) -> None:
        """Remove a group that is no longer ready."""
        self._take_out(group)
        self.held.pop(group.job, None)
        self.stuck.pop(group.job, None)

    def _take_out(self, group: Group) -> None:
        self.pool.discard(group)
        self.refused.pop(group.job, None)
        self._unproven.pop(group.job, None)

    def wants(self, group: Group) -> bool:
        """Return whether the group is of its lanes, kept, not used up to the reuse limit, and passed its filters."""
        return (
            self.covers(group)
            and group.kept >= group.n
            and not group.away
            and 0 <= group.uses.get(self.account, 0) < self.definition.reuse
            and group.job not in self.held
            and group.job not in self.stuck
        )

    def is_final(self, group: Group) -> bool:
        """Return whether it will not use this group of its lanes again, except by a rewind, which checkpoints limit."""
        uses = group.uses.get(self.account, 0)
        return not self.unreadable and (uses < 0 or uses >= self.definition.reuse)

    def covers(self, group: Group) -> bool:
        """Return whether the group is of its lanes, or may be, if they are unreadable."""
        return group.lane in self.definition.lanes or bool(self.unreadable)


def _draw(seed: int, job: str) -> float:
    """Return a number in [0, 1) that is fixed for this job."""
    digest = hashlib.blake2b(f"{seed}/{job}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
