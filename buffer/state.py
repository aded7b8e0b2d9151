"""Cache the run's records for the leader; discarded and reloaded at every acquisition of the leadership.

Redis is authoritative. Events of the ``samples`` stream only tell which keys to read.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.buffer.filters import Filters, GroupFilter
from penstock.buffer.group import Group, UsedUpGroups, priorities, read_group
from penstock.buffer.payload_servers import PayloadServers, keys_of
from penstock.buffer.subscription import Subscription
from penstock.config.data import RIGHT_FROM
from penstock.config.staleness import Sampler
from penstock.config.subscription import Definition
from penstock.errors import ProtocolError
from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.gate import gates
from penstock.protocol.position import Position
from penstock.protocol.scripts import Leadership, run
from penstock.protocol.staleness import Lineage
from penstock.records.codec import count_of, name_in, name_shown
from penstock.records.disposal import Disposal
from penstock.records.job import JobState
from penstock.records.keys import Keys
from penstock.records.sample_meta import SampleMeta, iter_metas
from penstock.redis.commands import Client
from penstock.system.garbage_collection import collecting_later

log = logging.getLogger(__name__)

#: Most samples whose records are cached, at about 1.5 kB each. With a bound on staleness most groups are trained and
#: swept while cached; others are read again.
KEPT_SAMPLES = 8192


class Records:
    """Cache sample records by job. A ready group's records never change, so they are valid as long as it exists."""

    def __init__(self, client: Client, keys: Keys, kept_samples: int = KEPT_SAMPLES) -> None:
        self._client = client
        self._keys = keys
        self._kept_samples = kept_samples
        self._kept: OrderedDict[str, list[SampleMeta]] = OrderedDict()
        self._count = 0

    def put(self, job: str, meta: bytes | None) -> list[SampleMeta]:
        """Parse and cache the metadata of a group that has become ready; return its records."""
        self.forget(job)
        records = list(iter_metas(meta or b"", f"metadata of group {job}"))
        self._kept[job] = records
        self._count += len(records)
        while self._count > self._kept_samples and len(self._kept) > 1:
            self._count -= len(self._kept.popitem(last=False)[1])
        return records

    def read(self, jobs: Sequence[str]) -> list[list[SampleMeta]]:
        """Return the records of each group; [] if they are missing or invalid. Blocks if one is not cached."""
        missing = [job for job in jobs if job not in self._kept]
        metas = self._client.mget([self._keys.meta(job) for job in missing]) if missing else []
        found = {job: _readable(job, meta) for job, meta in zip(missing, metas, strict=True)}
        return [self._kept[job] if job in self._kept else found[job] for job in jobs]

    def forget(self, job: str) -> None:
        """Remove a deleted group from the cache."""
        self._count -= len(self._kept.pop(job, ()))


def _readable(job: str, meta: bytes | None) -> list[SampleMeta]:
    """Parse records; [] for an invalid group, whose payloads were not made permanent and expire."""
    try:
        return list(iter_metas(meta or b"", f"metadata of group {job}"))
    except ProtocolError:
        return []


#: Disposals that depend on age, which affect long answers more than short ones (T4).
AGED = frozenset({Disposal.STALE, Disposal.REWOUND, Disposal.RETENTION})
#: Groups read per round trip.
CHUNK = 256


class State:
    """Hold ready groups, subscriptions and clocks as last read.

    Args:
        alive: called between chunks of a long read; keeps the leadership, raises LeadershipLost.
        filters: filters that subscriptions may name; None: the built-in ones.
        right_from: dataset with a curriculum -> smallest reward of a correct answer.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        servers: PayloadServers,
        lead: Leadership,
        alive: Callable[[], None] = lambda: None,
        filters: Filters | None = None,
        right_from: Mapping[str, float] | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._servers = servers
        self._lead = lead
        self._alive = alive
        self._filters = filters or Filters()
        self._right_from = right_from or {}
        self._group_filter = GroupFilter(client, keys, lead, self._filters)
        self.groups: dict[str, Group] = {}
        #: Job -> group with invalid records, which subscriptions dispose of.
        self.unreadable: dict[str, Group] = {}
        #: Job -> group that cannot be cut because one of its payload servers does not answer.
        self.away: dict[str, Group] = {}
        #: State of the servers at the last check of the groups.
        self._last_lost_and_away = servers.lost_and_away
        self.subs: dict[str, Subscription] = {}
        self.revision = 0
        self.clock: dict[str, int] = {}
        self.used_up = UsedUpGroups()
        #: Numeric metadata fields that samplers use.
        self._fields: frozenset[str] = frozenset()
        self.records = Records(client, keys)
        #: Model -> version -> number of batches trained before it.
        self._steps: dict[str, dict[int, int]] = {}
        #: Place in the order of completion up to which all groups were read.
        self._seen = 0

    def load(self) -> None:
        """Read all records. Blocks for about 0.1 ms per ready group."""
        self.refresh()
        self.catch_up()

    def catch_up(self) -> int:
        """Ingest groups that completed since the last call; return their number. Blocks for a round trip."""
        ready = self._client.zrangebyscore(self._keys.ready, f"({self._seen}", "+inf", withscores=True)
        if not ready:
            return 0
        taken = self.ingest([name_shown(job) for job, _ in ready])
        self._seen = max(self._seen, int(ready[-1][1]))
        return taken

    def refresh(self) -> None:
        """Read clocks and subscriptions; fill a new pool if a definition changed. Raises ProtocolError."""
        clock = {name_shown(field): value for field, value in self._client.hgetall(self._keys.clock).items()}
        self.clock = {name: count_of(value, f"Field {name} of the clock") for name, value in clock.items()}
        raw = self._client.hgetall(self._keys.subs)
        self.revision = count_of(raw.get(b"rev"), "The revision of the subscriptions")
        names = [name_in(field[4:], "A subscription") for field in raw if field.startswith(b"sub:")]
        gone = [self.subs.pop(name) for name in self.subs.keys() - set(names)]
        for name in names:
            self._refresh_sub(name)
        self._refresh_lineages()
        fields = frozenset(
            sub.definition.priority for sub in self.subs.values() if sub.definition.sampler is Sampler.PRIORITIZED
        )
        if not fields <= self._fields or any(sub.definition.share for sub in gone):
            # A sampler uses a new field, or a member of a pool returned its groups.
            self._fields |= fields
            self.reload()
        elif gone:
            for group in self.groups.values():
                self._place(group)

    def reload(self) -> None:
        """Discard all groups and read them again. Blocks like ``load``."""
        self.forget(list(self.groups))
        self._seen = 0
        self.catch_up()

    def _refresh_lineages(self) -> None:
        """Give subscriptions that follow a model without driving it the merged lineage of those that drive it."""
        subs = list(self.subs.values())
        for sub in subs:
            model = sub.definition.model
            if model and not sub.definition.driving:
                drivers = [one for one in subs if one.definition.driving and one.definition.model == model]
                sub.position.lineage = Lineage.merge(one.position.lineage for one in drivers)

    def versions(self) -> list[int]:
        """Return the newest version of every model."""
        return [version for name, version in self.clock.items() if name.startswith("version:")]

    def gates(self) -> list[list[str]]:
        """Return the subscriptions that hold the gate, members of a pool together."""
        return gates({name: sub.holder for name, sub in self.subs.items()})

    def batches_behind(self, model: str, version: int) -> int | None:
        """Return the number of batches that were trained before ``version``; None if unknown. May block."""
        known = self._steps.setdefault(model, {})
        if version not in known:
            raw = self._client.hgetall(self._keys.steps(model))
            known.clear()
            known.update({count_of(v, "A version"): count_of(n, "The batches behind it") for v, n in raw.items()})
        return known.get(version)

    def _refresh_sub(self, name: str) -> None:
        raw, known = self._client.hgetall(self._keys.sub(name)), self.subs.get(name)
        try:
            definition, position = Definition.read(raw, name), Position.read(raw, name)
        except ProtocolError as exc:
            self._mark_unreadable(name, str(exc))
            return
        if known is not None and not known.unreadable and known.has_same_pool(definition):
            known.definition, known.position = definition, position
            return
        self.subs[name] = Subscription(name, definition, position)
        self.subs[name].unfilterable = self._filters.unknown(definition.filters)
        self._filter_again(self.subs[name])
        self.used_up.clear()
        for group in self.groups.values():
            self._place(group)

    def _mark_unreadable(self, name: str, why: str) -> None:
        """Stop cutting for a subscription with an invalid record, and keep all groups that it may need."""
        if name in self.subs and self.subs[name].unreadable:
            return
        log.error("%s", why)
        self.subs[name] = Subscription(name, Definition(), Position())
        self.subs[name].unreadable = why
        self.used_up.clear()

    def _filter_again(self, sub: Subscription) -> None:
        """Run the filters of a new or changed definition on all groups."""
        readable = (group for group in self.groups.values() if group.job not in self.unreadable)
        waiting = list(readable) if sub.definition.filters else []
        for start in range(0, len(waiting), CHUNK):
            self._alive()
            chunk = waiting[start : start + CHUNK]
            jobs = [group.job for group in chunk]
            records = dict(zip(jobs, self.records.read(jobs), strict=True))
            self._group_filter.apply(sub, chunk, records)

    def ingest(self, jobs: Iterable[str]) -> int:
        """Ingest completed groups: make their payloads permanent and add them to the pools.

        Returns the number of ingested groups. Raises LeadershipLost. Known groups are skipped.
        """
        new = [job for job in dict.fromkeys(jobs) if job not in self.groups]
        taken = 0
        for start in range(0, len(new), CHUNK):
            self._alive()
            with collecting_later():
                taken += self._ingest_chunk(new[start : start + CHUNK])
        return taken

    def _ingest_chunk(self, jobs: list[str]) -> int:
        pipe = self._client.pipeline(transaction=False)
        for job in jobs:
            pipe.hgetall(self._keys.group(job))
            pipe.get(self._keys.meta(job))
            pipe.zscore(self._keys.ready, job)
        answers = pipe.execute()
        groups: list[Group] = []
        payloads: list[tuple[str, str]] = []
        owners: list[tuple[Group, int]] = []
        records: dict[str, list[SampleMeta]] = {}
        for i, job in enumerate(jobs):
            raw, meta, place = answers[3 * i : 3 * i + 3]
            if raw.get(b"st") != JobState.READY.encode() or place is None:
                continue
            try:
                group = read_group(job, raw, int(place))
            except ProtocolError as exc:
                log.error("skipped a group that will not be trained: %s", exc)
                continue
            try:
                places = self._sum_up_records(group, meta)
            except (ProtocolError, TypeError, ValueError) as exc:
                log.error("group %s is unreadable and will not be trained: %s", job, exc)
                self.unreadable[job] = self.groups[job] = read_group(job, raw, int(place))
                continue
            records[job] = self.records.read([job])[0]
            group.servers = frozenset(server for (server, _), _ in places)
            payloads += [at for at, _ in places]
            owners += [(group, k) for _, k in places]
            groups.append(group)
        self._keep(groups, payloads, owners)
        for sub in self.subs.values():
            self._group_filter.apply(sub, groups, records)
        for group in groups:
            self.groups[group.job] = group
            self._place(group)
        return len(groups)

    def _sum_up_records(self, group: Group, meta: bytes | None) -> list[tuple[tuple[str, str], int]]:
        """Sum up a group's records; return ((server, key), k) of all its payloads.

        Raises ProtocolError, TypeError or ValueError if they are invalid.
        """
        places: list[tuple[tuple[str, str], int]] = []
        records = self.records.put(group.job, meta)
        for record in records:
            places += [(at, record.k) for at in keys_of(self._keys, group.job, record)]
        group.sum_up(records, self._right_from.get(group.dataset, RIGHT_FROM))
        if self._fields:
            group.priority = priorities(records, self._fields)
        return places

    def check_servers(self) -> None:
        """Remove groups from the pools while a payload server of theirs does not answer. Blocks."""
        self._servers.check()
        if self._servers.lost_and_away == self._last_lost_and_away:
            return
        self._last_lost_and_away = self._servers.lost_and_away
        changed = []
        for group in self.groups.values():
            away = frozenset(filter(self._servers.is_away, group.servers))
            if group.away and not away:
                changed.append(group)
            elif away - group.away:
                group.away |= away
                self.away[group.job] = group
                self._replace(group)
        for start in range(0, len(changed), CHUNK):
            self._alive()
            self._retry_persist(changed[start : start + CHUNK])

    def _retry_persist(self, groups: list[Group]) -> None:
        """Make groups' payloads permanent and add the groups to the pools after their servers' state changed."""
        payloads: list[tuple[str, str]] = []
        owners: list[tuple[Group, int]] = []
        for group, records in zip(groups, self.records.read([group.job for group in groups]), strict=True):
            group.away = frozenset()
            self.away.pop(group.job, None)
            for record in records:
                places = keys_of(self._keys, group.job, record)
                payloads += places
                owners += [(group, record.k)] * len(places)
        self._keep(groups, payloads, owners)
        for group in groups:
            self._replace(group)

    def _replace(self, group: Group) -> None:
        for sub in self.subs.values():
            sub.pool.discard(group)
        self._place(group)

    def _keep(self, groups: list[Group], payloads: list[tuple[str, str]], owners: list[tuple[Group, int]]) -> None:
        answers = self._servers.persist(payloads)
        for (group, _), (server, _), kept in zip(owners, payloads, answers, strict=True):
            if kept is None:
                group.away = group.away | {server}
                self.away[group.job] = group
        for (group, k), kept in zip(owners, answers, strict=True):
            if kept is False and k not in group.lost:
                group.lost = group.lost | {k}
                log.warning("the payload of sample %s/%d is lost; the sample will be trained with mask 0", group.job, k)
        groups = [group for group in groups if not group.away]
        if not groups:
            return
        lost = {group.job: sorted(group.lost) for group in groups if group.lost}
        shares = {g.job: g.share_byte for g in groups if g.lane == Lane.TRAIN and g.dataset in self._right_from}
        run(self._client, scripts.keep(self._keys, self._lead, [(g.job, g.kept) for g in groups], lost, shares))

    def _place(self, group: Group) -> None:
        """Add a group to the pools of subscriptions that need it, or to ``used_up`` if none does."""
        readers = [sub for sub in self.subs.values() if sub.covers(group)]
        for sub in readers:
            sub.place(group)
        if readers and all(sub.is_final(group) for sub in readers):
            self.used_up.add(group)
        else:
            self.used_up.discard(group)

    def use(self, sub: Subscription, groups: Iterable[Group], n: int) -> None:
        """Record that these groups are in batch ``n``."""
        for group in groups:
            group.uses[sub.account] = group.uses.get(sub.account, 0) + 1
            group.batches[sub.name] = n
            sub.pool.discard(group)  # a group that is used again goes to the end of the pool
            self._place(group)

    def timed_out(self, sub: Subscription) -> int:
        """Return how many groups of its lanes were dropped by time-outs in this run. Blocks for a round trip."""
        names = [f"timed_out:{lane}" for lane in sub.definition.lanes]
        values = self._client.hmget(self._keys.counters, names)
        return sum(count_of(value, f"The counter {name}") for name, value in zip(names, values, strict=True))

    def dispose(self, sub: Subscription, reason: Disposal, groups: list[Group]) -> None:
        """Dispose of these groups for ``sub``. Raises LeadershipLost."""
        if not groups:
            return
        jobs = [group.job for group in groups]
        aged = [(group.n, group.generated) for group in groups] if reason in AGED else []
        staleness = [sub.staleness(group, self.clock) for group in groups]
        run(self._client, scripts.dispose(self._keys, self._lead, sub.name, reason, jobs, aged, staleness))
        log.info("%s: disposed of %d groups (%s)", sub.name, len(groups), reason)
        sub.position.dropped[reason] = sub.position.dropped.get(reason, 0) + len(groups)
        sub.position.aged_samples += sum(samples for samples, _ in aged)
        sub.position.aged_tokens += sum(tokens for _, tokens in aged)
        for group in groups:
            group.uses[sub.account] = reason.code
            self._place(group)

    def keep_rejects(self, sub: Subscription, groups: Iterable[Group]) -> None:
        """Move these held rejects to the pool; keep holding the others."""
        for group in groups:
            del sub.held[group.job]
            self._place(group)

    def drop_rejects(self, sub: Subscription) -> None:
        """Drop the held rejects. Raises LeadershipLost."""
        rejects, sub.held = list(sub.held.values()), {}
        self._group_filter.record(sub, rejects, self.groups)
        for one in rejects:
            self._place(self.groups[one.job])

    def dispose_unneeded(self) -> int:
        """Dispose of groups that a subscription refuses, cannot read or has no room for; return their number."""
        settled = 0
        for sub in self.subs.values():
            if sub.unreadable:
                continue  # its needs are unknown, and each call would repeat the disposal
            for reason in (Disposal.BEFORE, Disposal.QUOTA):
                refused = [group for group, why in list(sub.refused.values()) if why == reason]
                self._dispose_all(sub, reason, refused)
                settled += len(refused)
            bad = [one for one in self.unreadable.values() if sub.covers(one) and not sub.is_final(one)]
            self._dispose_all(sub, Disposal.UNREADABLE, bad)
            settled += len(bad)
            over = sub.too_many()
            self._dispose_all(sub, Disposal.RETENTION, over)
            settled += len(over)
        return settled

    def _dispose_all(self, sub: Subscription, reason: Disposal, groups: list[Group]) -> None:
        for start in range(0, len(groups), CHUNK):
            self._alive()
            self.dispose(sub, reason, groups[start : start + CHUNK])

    def forget(self, jobs: Iterable[str]) -> None:
        """Remove groups that are no longer ready."""
        for job in jobs:
            self.unreadable.pop(job, None)
            self.away.pop(job, None)
            group = self.groups.pop(job, None)
            if group is not None:
                self.used_up.discard(group)
                for sub in self.subs.values():
                    sub.forget(group)
