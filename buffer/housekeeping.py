"""Run the leader's periodic tasks besides cutting.

| task | effect |
|---|---|
| retire | due retries are queued; unused groups are disposed of, sealed and swept; pool sizes are published |
| orphaned payloads | payloads whose commits Redis has lost get a time to live |
| reclaim | jobs of dead workers are queued again |
| late | groups that time out are shortened, dropped or reported |
| tidy | records of dead processes are deleted |
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from penstock.buffer import limits
from penstock.buffer.payload_servers import PayloadServers, keys_of
from penstock.buffer.retire import Retirement
from penstock.buffer.state import Records, State
from penstock.buffer.subscription import Subscription
from penstock.buffer.unread_evaluations import UnreadEvaluations
from penstock.config import Config, RolloutConfig
from penstock.errors import ConfigError
from penstock.names import LANES, Lane
from penstock.payloads.format import PAYLOAD_TTL_S
from penstock.payloads.servers import parts_of
from penstock.protocol import scripts
from penstock.protocol.scripts import Backlog, Late, Leadership, note, run
from penstock.protocol.waits import PublishedWaiting, Waiting
from penstock.records.causes import GroupsLate, RecorderAbsent, TrainerAbsent
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Payloads per call; bounds the delay of a cut.
SCAN_CHUNK = 1000


class OrphanedPayloads:
    """Give a time to live to permanent payloads whose commits Redis has lost, which would never be freed otherwise.

    A failover to a lagging replica, a power loss or a restored dump sets back the control Redis, but not the other
    payload servers. So a leader checks each payload server in use once, and again after it did not answer or was lost,
    since it may have been set back as well. A payload that a worker commits again under the same lease becomes
    permanent again when its group is complete.
    """

    def __init__(self, client: Client, keys: Keys, servers: PayloadServers) -> None:
        self._client = client
        self._keys = keys
        self._servers = servers
        self._checked: set[str] = set()
        #: Server that is being checked, its payloads that were not checked yet, and the number of orphans found on it.
        self._server = ""
        self._listed: Iterator[tuple[str, bool]] = iter(())
        self._found = 0

    def tend(self) -> None:
        """Check the next payloads. Blocks for a few round trips."""
        in_use = self._servers.in_use
        _, away = self._servers.lost_and_away
        self._checked &= in_use - away
        if self._server not in in_use and not self._begin(in_use - self._checked):
            return
        try:
            names = self._servers.next_of(self._server, self._listed, SCAN_CHUNK)
        except ConfigError as exc:
            # Skip a server whose payloads cannot be listed: readers that need one report the error.
            log.info("payload server %s was not checked for orphaned payloads: %s", self._server, exc)
            names = []
        if names is None:
            self._server = ""
        elif names:
            self._unkeep([name for name, is_kept in names if is_kept])
        else:
            self._end()

    def _begin(self, servers: frozenset[str]) -> bool:
        self._server = min(servers, default="")
        if self._server:
            self._listed, self._found = self._servers.names(self._server), 0
        return bool(self._server)

    def _end(self) -> None:
        if self._found:
            log.warning(
                "payload server %s had %d payloads whose commits Redis has lost; they expire in %g s",
                self._server, self._found, PAYLOAD_TTL_S,
            )  # fmt: skip
        self._checked.add(self._server)
        self._server = ""

    def _unkeep(self, names: list[str]) -> None:
        orphans = self._orphans(names)
        if orphans and self._servers.unkeep(self._server, orphans):
            self._found += len(orphans)

    def _orphans(self, names: list[str]) -> list[str]:
        """Return payloads whose lease committed no sample, or whose group does not exist."""
        parts = {name: part for name in names if (part := parts_of(self._keys, name))[0]}
        pipe = self._client.pipeline(transaction=False)
        for job, k, _ in parts.values():
            pipe.hget(self._keys.group(job), f"s:{k}")
        tokens = dict(zip(parts, pipe.execute(), strict=True))
        odd = {name: part for name, part in parts.items() if tokens[name] != part[2].encode()}
        # Samples committed together use the key of the first one, which may come from another lease.
        committed = self._committed(sorted({job for job, _, _ in odd.values()}))
        return [name for name in odd if name not in committed]

    def _committed(self, jobs: list[str]) -> set[str]:
        """Return the payload keys that these jobs have committed."""
        records = Records(self._client, self._keys).read(jobs)
        found = zip(jobs, records, strict=True)
        return {key for job, metas in found for meta in metas for _, key in keys_of(self._keys, job, meta)}


#: Groups discarded per call; bounds its time on the server.
DISCARD_CHUNK = 512
#: Seconds between two log lines about discarded groups.
LOG_EVERY_S = 60.0


class PoolSizes:
    """Publish the sizes of the subscriptions' pools when they change."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._published: dict[str, dict[str, int]] = {}
        self._waits: dict[str, Waiting] = {}

    def publish(self, state: State) -> None:
        """Publish the current sizes. Blocks for a round trip, and one more for every changed subscription."""
        names = sorted(state.subs)
        owners = self._client.mget([self._keys.owner(name) for name in names]) if names else []
        for name, owner in zip(names, owners, strict=True):
            sub = state.subs[name]
            held = {
                "groups": len(sub.pool),
                "samples": sub.pool.samples,
                "tokens": sub.pool.tokens,
                "bytes": sub.pool.num_bytes,
            }
            if self._published.get(name) != held:
                run(self._client, note(self._keys, self._keys.held, name, pack(held)))
                self._published[name] = held
            self._wait_of(name).blocked_on(None if owner else _absence(sub))
        for name in self._published.keys() - state.subs.keys():
            run(self._client, note(self._keys, self._keys.held, name, b""))
            del self._published[name]
            self._wait_of(name).end()

    def _wait_of(self, name: str) -> Waiting:
        if name not in self._waits:
            self._waits[name] = PublishedWaiting(self._client, self._keys, f"subscription:{name}")
        return self._waits[name]


def _absence(sub: Subscription) -> TrainerAbsent | None:
    """Return the cause if groups or batches are held for a trainer that is not running, else None."""
    position, cut = sub.position, sub.position.cut - sub.position.cursor
    if position.parked or not (len(sub.pool) or cut):
        return None
    return TrainerAbsent(sub.name, len(sub.pool), cut, float(sub.definition.keep_s or 0))


class UnrecordedGroups:
    """Report groups that wait for the recorder, and discard them according to the history's limits."""

    def __init__(self, client: Client, keys: Keys, lead: Leadership) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._waiting = PublishedWaiting(client, keys, "history")
        #: Number of discarded groups at the last log line, -1 before the first check; and its time (monotonic).
        self._logged = -1
        self._logged_at = -LOG_EVERY_S

    def tend(self) -> None:
        """Discard groups that waited too long, and log their number. Blocks for round trips. Raises LeadershipLost."""
        backlog = run(self._client, scripts.unrecorded(self._keys, self._lead, DISCARD_CHUNK))
        is_held = bool(backlog.waiting) and backlog.away_s > 0
        self._waiting.blocked_on(RecorderAbsent(backlog.waiting) if is_held else None)
        if self._logged < 0:
            self._logged = backlog.total - backlog.given_up
        lost, now = backlog.total - self._logged, time.monotonic()
        if lost > 0 and now - self._logged_at >= LOG_EVERY_S:
            why = _why_lost(backlog)
            log.warning("history: %d groups were not recorded (%d since the run began): %s", lost, backlog.total, why)
            self._logged, self._logged_at = backlog.total, now


def _why_lost(backlog: Backlog) -> str:
    if backlog.away_s > 0:
        return f"no recorder has run for {backlog.away_s:.0f} s (history.patience_s)"
    return "the recorder is too slow: more groups wait than history.backlog allows"


class UnreadScores:
    """Retire scored groups that neither their client collects nor a subscription retires.

    Clients collect their scores and retire the groups (consumers/scorer.py); a client that died leaves them
    behind. They are retired ``ttl_s`` after this leader first read them.
    """

    def __init__(self, client: Client, keys: Keys, state: State, ttl_s: float) -> None:
        self._client = client
        self._keys = keys
        self._state = state
        self._ttl_s = ttl_s
        self._seen: dict[str, float] = {}

    def retire_unread(self) -> int:
        """Retire groups that are due; return their number. Blocks for a round trip for each."""
        now = time.monotonic()
        scored = [job for job, group in self._state.groups.items() if group.lane == Lane.SCORE]
        self._seen = {job: self._seen.get(job, now) for job in scored}
        late = [job for job, at in self._seen.items() if now - at >= self._ttl_s]
        retired = 0
        for job in late:
            outcome = scripts.run(self._client, scripts.collect(self._keys, job, Lane.SCORE))
            if outcome != "subscribed":
                self._state.forget([job])
            retired += outcome == "retired"
        if retired:
            log.warning("%d scoring jobs were not collected within %g s and are deleted", retired, self._ttl_s)
        return retired


#: Groups that time out, per call.
LATE_CHUNK = 256


class PartialGroups:
    """Apply ``rollout.on_group_timeout`` to groups that a long answer delays.

        running for longer than group_timeout_s ─> wait (default): only report it
                                                ├─> train: shorten to the committed samples (n is their number, T11)
                                                └─> drop: delete the group and free its place at the gate

    Training with fewer samples favours short answers, so every manifest has the number of shortened groups and of
    missing samples.

    Args:
        waiting: reports groups that are waited for.
    """

    def __init__(self, client: Client, keys: Keys, lead: Leadership, config: RolloutConfig, waiting: Waiting) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._config = config
        self._waiting = waiting

    def tend(self) -> int:
        """Shorten or drop groups that time out; return their number. Blocks. Raises LeadershipLost."""
        timeout_s = self._config.group_timeout_s
        if timeout_s is None:
            return 0
        late = run(self._client, scripts.late(self._keys, int(timeout_s * 1000), LATE_CHUNK))
        ended = [one for one in late if self._end(one)]
        self._report([one for one in late if one not in ended], timeout_s)
        return len(ended)

    def _end(self, one: Late) -> bool:
        match self._config.on_group_timeout:
            case "wait":
                return False
            case "train":
                done = run(self._client, scripts.shorten(self._keys, self._lead, one.job, self._config.min_group))
            case "drop":
                done = run(self._client, scripts.drop(self._keys, self._lead, one.job))
        if done:
            what = f"shortened to {done} samples" if self._config.on_group_timeout == "train" else "dropped"
            log.info("group %s of %d samples timed out after %.0f s: %s", one.job, one.wanted, one.age_s, what)
        return bool(done)

    def _report(self, late: list[Late], timeout_s: float) -> None:
        if not late:
            self._waiting.end()
            return
        first = max(late, key=lambda one: one.age_s)
        policy = self._config.on_group_timeout
        cause = GroupsLate(len(late), timeout_s, first.job, first.committed, first.wanted, policy)
        self._waiting.blocked_on(cause)


#: Interval of retirement, and of tidying.
RETIRE_S, TIDY_S = 0.25, 60.0
#: Interval of checks for groups that time out.
LATE_S = 0.5
#: Jobs queued again per call, from retries or expired leases; calls repeat until none is left.
CHUNK = 256


class Housekeeping:
    """Run the periodic tasks while this buffer leads.

    Args:
        reclaimer: consumer name under which expired leases are taken over.
        alive: called between the steps of a long task; keeps the leadership, raises LeadershipLost.
        waiting: returns the wait that is reported under a name.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        lead: Leadership,
        state: State,
        servers: PayloadServers,
        config: Config,
        *,
        reclaimer: str,
        alive: Callable[[], None],
        waiting: Callable[[str], Waiting],
    ) -> None:
        self._client = client
        self._keys = keys
        self._state = state
        self._servers = servers
        self._config = config
        self._reclaimer = reclaimer
        self._alive = alive
        self._waiting = waiting
        self._retirement = Retirement(client, keys, servers, lead, state, alive=alive)
        self._partial = PartialGroups(client, keys, lead, config.rollout, waiting("buffer:late"))
        self._scores = UnreadScores(client, keys, state, config.buffer.score_ttl_s)
        self._evaluations = UnreadEvaluations(
            client, keys, state, config.run_dir, config.buffer.eval_ttl_s,
            waiting=waiting("evaluations"), alive=alive,
        )  # fmt: skip
        self._orphaned = OrphanedPayloads(client, keys, servers)
        self._pool_sizes = PoolSizes(client, keys)
        self._history = UnrecordedGroups(client, keys, lead)
        self._retire = _Interval(RETIRE_S)
        # Checking 64,000 leases takes 87 ms.
        self._reclaim = _Interval(min(1.0, config.worker.lease_s / 5))
        self._tidy = _Interval(TIDY_S)
        self._late = _Interval(LATE_S)

    def tend(self, last_event: str, *, checkpointed: bool) -> None:
        """Run the tasks that are due. Blocks for a few round trips, or more. Raises LeadershipLost.

        Args:
            last_event: id of the newest event that the leader has read.
            checkpointed: a trainer has a new checkpoint, so groups may be ready to retire.
        """
        if self._retire.begin() or checkpointed:
            self._retire_groups(last_event)
        if self._reclaim.begin():
            self._reclaim_leases()
        if self._late.begin():
            self._partial.tend()
        if self._tidy.begin():
            self._retirement.tidy()

    def _retire_groups(self, last_event: str) -> None:
        state = self._state
        state.refresh()
        state.catch_up()
        state.check_servers()
        away = limits.held_for_servers(self._servers.away(), state.away.values())
        self._waiting("buffer:payloads").blocked_on(away)
        state.dispose_unneeded()
        while scripts.run(self._client, scripts.due(self._keys, CHUNK)) == CHUNK:
            self._alive()
        self._retirement.park()
        self._retirement.seal()
        self._history.tend()
        self._retirement.sweep()
        self._retirement.trim(last_event)
        self._orphaned.tend()
        self._pool_sizes.publish(state)
        self._scores.retire_unread()
        self._evaluations.tend()

    def _reclaim_leases(self) -> None:
        """Queue the jobs of dead workers again, in chunks, so that Redis serves other clients in between."""
        lease_ms = int(self._config.worker.lease_s * 1000)
        taken: Counter[tuple[str, str]] = Counter()
        for lane in LANES:
            while True:
                self._alive()
                call = scripts.reclaim(self._keys, lane, self._reclaimer, lease_ms, CHUNK)
                moved = scripts.run(self._client, call)
                if isinstance(moved, str):
                    return  # another process reclaims
                taken.update((worker, where) for _, worker, where in moved)
                for job, worker, where in moved:
                    log.debug("lease of job %s ran out: worker %s; job moved to %s", job, worker, where)
                if len(moved) < CHUNK:
                    break
        for (worker, where), count in taken.items():
            log.warning("leases ran out: %d jobs of worker %s moved to %s", count, worker, where)


class _Interval:
    """Interval of a task, which is due immediately the first time."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due_at = 0.0

    def begin(self) -> bool:
        """Return whether the task is due; if so, start the next interval."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + self._every_s
        return True
