"""Periodic tasks of the leader besides cutting.

| task | effect |
|---|---|
| retire | due retries are queued; unused groups are disposed of, sealed and swept; holdings are published |
| forgotten | payloads whose commits Redis has lost get a time to live |
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

#: Payloads per call, so that a cut never waits for long.
SCAN_CHUNK = 1000


class ForgottenPayloads:
    """Give a time to live to permanent payloads whose commit Redis has lost, as they would never be freed.

    A failover to a lagging replica, a power loss or a restored dump sets Redis back, with the payloads on it, but not
    those on other servers. So a leader checks each payload server in use once, and again if it did not
    answer or was lost meanwhile, as it may have been set back itself. A payload that a worker commits again under the
    same lease becomes permanent again when its group is complete.
    """

    def __init__(self, client: Client, keys: Keys, servers: PayloadServers) -> None:
        self._client = client
        self._keys = keys
        self._servers = servers
        self._looked: set[str] = set()
        #: The server that is being checked, and its payloads that were not checked yet.
        self._at = ""
        self._listed: Iterator[tuple[str, bool]] = iter(())
        self._found = 0

    def tend(self) -> None:
        """Check the next payloads. Blocks for a few round trips."""
        there = self._servers.in_use
        _, away = self._servers.standing
        self._looked &= there - away
        if self._at not in there and not self._begin(there - self._looked):
            return
        try:
            names = self._servers.some_of(self._at, self._listed, SCAN_CHUNK)
        except ConfigError as exc:
            # Its payloads cannot be listed; readers that need one report it.
            log.info("payload server %s was not looked through: %s", self._at, exc)
            names = []
        if names is None:
            self._at = ""
        elif names:
            self._unkeep([name for name, is_kept in names if is_kept])
        else:
            self._end()

    def _begin(self, servers: frozenset[str]) -> bool:
        self._at = min(servers, default="")
        if self._at:
            self._listed, self._found = self._servers.names(self._at), 0
        return bool(self._at)

    def _end(self) -> None:
        if self._found:
            log.warning(
                "payload server %s had %d payloads whose commits Redis has forgotten; they are gone in %g s",
                self._at, self._found, PAYLOAD_TTL_S,
            )  # fmt: skip
        self._looked.add(self._at)
        self._at = ""

    def _unkeep(self, names: list[str]) -> None:
        forgotten = self._forgotten(names)
        if forgotten and self._servers.unkeep(self._at, forgotten):
            self._found += len(forgotten)

    def _forgotten(self, names: list[str]) -> list[str]:
        """Return payloads of leases that have committed nothing of their group, or of groups that do not exist."""
        parts = {name: part for name in names if (part := parts_of(self._keys, name))[0]}
        pipe = self._client.pipeline(transaction=False)
        for job, k, _ in parts.values():
            pipe.hget(self._keys.group(job), f"s:{k}")
        tokens = dict(zip(parts, pipe.execute(), strict=True))
        odd = {name: part for name, part in parts.items() if tokens[name] != part[2].encode()}
        # Samples that were committed together use the key of the first, which another lease may have made.
        held = self._held(sorted({job for job, _, _ in odd.values()}))
        return [name for name in odd if name not in held]

    def _held(self, jobs: list[str]) -> set[str]:
        """Return the keys that these jobs have committed."""
        records = Records(self._client, self._keys).read(jobs)
        found = zip(jobs, records, strict=True)
        return {key for job, metas in found for meta in metas for _, key in keys_of(self._keys, job, meta)}


#: Groups discarded per call; bounds its time on the server.
GIVE_UP = 512
#: Seconds between two log lines about discarded groups.
SAY_EVERY_S = 60.0


class Holdings:
    """Publishes holdings that have changed since the last call."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._told: dict[str, dict[str, int]] = {}
        self._waits: dict[str, Waiting] = {}

    def tell(self, state: State) -> None:
        """Publish the current holdings. Blocks for a round trip, and one more for every changed subscription."""
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
            if self._told.get(name) != held:
                run(self._client, note(self._keys, self._keys.held, name, pack(held)))
                self._told[name] = held
            self._wait_of(name).blocked_on(None if owner else _absence(sub))
        for name in self._told.keys() - state.subs.keys():
            run(self._client, note(self._keys, self._keys.held, name, b""))
            del self._told[name]
            self._wait_of(name).end()

    def _wait_of(self, name: str) -> Waiting:
        if name not in self._waits:
            self._waits[name] = PublishedWaiting(self._client, self._keys, f"subscription:{name}")
        return self._waits[name]


def _absence(sub: Subscription) -> TrainerAbsent | None:
    """Return what is held for a trainer that is not running, or None."""
    position, cut = sub.position, sub.position.cut - sub.position.cursor
    if position.parked or not (len(sub.pool) or cut):
        return None
    return TrainerAbsent(sub.name, len(sub.pool), cut, float(sub.definition.keep_s or 0))


class HeldForHistory:
    """Groups that are done and wait to be recorded: their number, the wait, and discarded ones."""

    def __init__(self, client: Client, keys: Keys, lead: Leadership) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._waiting = PublishedWaiting(client, keys, "history")
        #: Discarded groups that were logged, and when (monotonic).
        self._told = -1
        self._told_at = -SAY_EVERY_S

    def tend(self) -> None:
        """Discard groups that wait in vain, and log it. Blocks for a round trip or two. Raises LeadershipLost."""
        backlog = run(self._client, scripts.unrecorded(self._keys, self._lead, GIVE_UP))
        is_held = bool(backlog.waiting) and backlog.away_s > 0
        self._waiting.blocked_on(RecorderAbsent(backlog.waiting) if is_held else None)
        if self._told < 0:
            self._told = backlog.total - backlog.given_up
        lost, now = backlog.total - self._told, time.monotonic()
        if lost > 0 and now - self._told_at >= SAY_EVERY_S:
            why = _why_lost(backlog)
            log.warning("history: %d groups have no rows in it, %d since the run began: %s", lost, backlog.total, why)
            self._told, self._told_at = backlog.total, now


def _why_lost(backlog: Backlog) -> str:
    if backlog.away_s > 0:
        return f"no recorder has been there for {backlog.away_s:.0f} s (history.patience_s)"
    return "the recorder does not keep up, and more of them wait than history.backlog"


class UnreadScores:
    """Retire scored groups that their client did not collect and no subscription will retire.

    Clients collect their scores and retire the groups (consumers/scorer.py); one that died leaves them behind. Groups
    are retired when ready for longer than ``ttl_s``, counted from when this leader first read them.
    """

    def __init__(self, client: Client, keys: Keys, state: State, ttl_s: float) -> None:
        self._client = client
        self._keys = keys
        self._state = state
        self._ttl_s = ttl_s
        self._seen: dict[str, float] = {}

    def retire_unread(self) -> int:
        """Check once; return the number of retired groups. Blocks for a round trip for each."""
        now = time.monotonic()
        there = [job for job, group in self._state.groups.items() if group.lane == Lane.SCORE]
        self._seen = {job: self._seen.get(job, now) for job in there}
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


#: Most groups per call.
MOST = 256


class PartialGroups:
    """Apply the policy for groups that time out, in which a long answer delays the complete group.

        begun for longer than group_timeout_s ─> wait (default): nothing, but it is reported
                                              ├─> train: shorten to the committed samples (n is their number, T11)
                                              └─> drop: the group is deleted, its place at the gate is free

    Training with fewer samples favours short answers: every manifest has the number of such groups and samples.

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
        """Shorten or drop groups that time out; return their number. Blocks for round trips. LeadershipLost."""
        timeout_s = self._config.group_timeout_s
        if timeout_s is None:
            return 0
        late = run(self._client, scripts.late(self._keys, int(timeout_s * 1000), MOST))
        ended = [one for one in late if self._end(one)]
        self._tell([one for one in late if one not in ended], timeout_s)
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
            what = f"is trained with {done} samples" if self._config.on_group_timeout == "train" else "is dropped"
            log.info("group %s %s of %d after %.0f s", one.job, what, one.wanted, one.age_s)
        return bool(done)

    def _tell(self, late: list[Late], timeout_s: float) -> None:
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
#: Jobs queued again per call, after a wait or from a lease; calls are repeated until there are no more.
CHUNK = 256


class Housekeeping:
    """Runs the periodic tasks while this buffer leads.

    Args:
        reclaimer: the name under which expired leases are taken over.
        alive: called between the steps of a long task; keeps the leadership, raises LeadershipLost.
        waiting: returns the wait to report under a name.
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
        self._forgotten = ForgottenPayloads(client, keys, servers)
        self._holdings = Holdings(client, keys)
        self._history = HeldForHistory(client, keys, lead)
        self._retire = _Interval(RETIRE_S)
        # A check of many leases is not cheap: 87 ms for 64k of them.
        self._reclaim = _Interval(min(1.0, config.worker.lease_s / 5))
        self._tidy = _Interval(TIDY_S)
        self._late = _Interval(LATE_S)

    def tend(self, last_event: str, *, checkpointed: bool) -> None:
        """Run the tasks that are due. Blocks for a few round trips, or more. Raises LeadershipLost.

        Args:
            last_event: the newest event that the leader has read.
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
        state.look_at_servers()
        away = limits.held_for_servers(self._servers.away(), state.away.values())
        self._waiting("buffer:payloads").blocked_on(away)
        state.settle()
        while scripts.run(self._client, scripts.due(self._keys, CHUNK)) == CHUNK:
            self._alive()
        self._retirement.park()
        self._retirement.seal()
        self._history.tend()
        self._retirement.sweep()
        self._retirement.trim(last_event)
        self._forgotten.tend()
        self._holdings.tell(state)
        self._scores.retire_unread()
        self._evaluations.tend()

    def _reclaim_leases(self) -> None:
        """Queue every job of a dead worker again, a chunk at a time, since others use Redis meanwhile."""
        lease_ms = int(self._config.worker.lease_s * 1000)
        taken: Counter[tuple[str, str]] = Counter()
        for lane in LANES:
            while True:
                self._alive()
                call = scripts.reclaim(self._keys, lane, self._reclaimer, lease_ms, CHUNK)
                moved = scripts.run(self._client, call)
                if isinstance(moved, str):
                    return  # not our turn
                taken.update((worker, where) for _, worker, where in moved)
                for job, worker, where in moved:
                    log.debug("lease of job %s ran out: worker %s, moved to %s", job, worker, where)
                if len(moved) < CHUNK:
                    break
        for (worker, where), count in taken.items():
            log.warning("leases ran out: %d jobs of worker %s, moved to %s", count, worker, where)


class _Interval:
    """A task with an interval, due for the first time at once."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._at = 0.0

    def begin(self) -> bool:
        """Return whether the task is due, and start the next interval then."""
        now = time.monotonic()
        if now < self._at:
            return False
        self._at = now + self._every_s
        return True
