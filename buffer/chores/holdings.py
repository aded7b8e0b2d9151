"""Publication of the leader's holdings for each subscription and for the recorder, and of absent trainers (I8)."""

import logging
import time

from penstock.buffer.state import State
from penstock.buffer.subscription import Subscription
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.causes import RecorderAbsent, TrainerAbsent
from penstock.protocol.records.codec import pack
from penstock.protocol.scripts import Backlog, Leadership, note, run
from penstock.protocol.waits import PublishedWaiting, Waiting
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

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
