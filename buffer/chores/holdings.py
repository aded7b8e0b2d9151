"""What the leader holds for each subscription and for the recorder, for all to see, and who is not there (I8)."""

import logging
import time

from buffer.state import State
from buffer.subscription import Subscription
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import pack
from penstock.protocol.scripts import Backlog, Leadership, note, run
from penstock.protocol.waits import Waiting
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Groups given up in one step; bounds the time that it takes on the server.
GIVE_UP = 512
#: Between two lines about groups that are given up.
SAY_EVERY_S = 60.0


class Holdings:
    """Shows what has changed since it was shown last."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._told: dict[str, dict[str, int]] = {}
        self._waits: dict[str, Waiting] = {}

    def tell(self, state: State) -> None:
        """Show what is held now. Blocks for a round trip, and one more for every subscription whose figures moved."""
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
            self._wait_of(name).for_("" if owner else _absence(sub))
        for name in self._told.keys() - state.subs.keys():
            run(self._client, note(self._keys, self._keys.held, name, b""))
            del self._told[name]
            self._wait_of(name).end()

    def _wait_of(self, name: str) -> Waiting:
        if name not in self._waits:
            self._waits[name] = Waiting(self._client, self._keys, f"subscription:{name}")
        return self._waits[name]


def _absence(sub: Subscription) -> str:
    """What is held for a trainer that is not there, in words; '' where nothing is."""
    position, keep_s = sub.position, sub.definition.keep_s
    cut = position.cut - position.cursor
    if position.parked or not (len(sub.pool) or cut):
        return ""
    limit = f"until it has been gone for {keep_s:g} s" if keep_s else "for as long as it takes (keep_s is not set)"
    return (
        f"its trainer to come: {len(sub.pool)} groups and {cut} cut batches are held for it {limit}; "
        f"`penstock subs drop {sub.name}` lets them go"
    )


class HeldForHistory:
    """Groups that are done with and wait to be recorded: how many, for whom, and which are given up."""

    def __init__(self, client: Client, keys: Keys, lead: Leadership) -> None:
        self._client = client
        self._keys = keys
        self._lead = lead
        self._waiting = Waiting(client, keys, "history")
        #: Groups given up that the log has told of, and when it did (monotonic).
        self._told = -1
        self._told_at = -SAY_EVERY_S

    def tend(self) -> None:
        """Give up what waits in vain, and say so. Blocks for a round trip or two. Raises LeadershipLost."""
        backlog = run(self._client, scripts.unrecorded(self._keys, self._lead, GIVE_UP))
        self._waiting.for_(_why_held(backlog))
        if self._told < 0:
            self._told = backlog.total - backlog.given_up
        lost, now = backlog.total - self._told, time.monotonic()
        if lost > 0 and now - self._told_at >= SAY_EVERY_S:
            why = _why_lost(backlog)
            log.warning("history: %d groups have no rows in it, %d since the run began: %s", lost, backlog.total, why)
            self._told, self._told_at = backlog.total, now


def _why_held(backlog: Backlog) -> str:
    """What the groups wait for that are held for a recorder who is not there; '' where they do not."""
    if not backlog.waiting or backlog.away_s <= 0:
        return ""
    return (
        f"a recorder to come: {backlog.waiting} groups wait to be recorded, until it has been gone for "
        "history.patience_s; `penstock recorder` is one"
    )


def _why_lost(backlog: Backlog) -> str:
    if backlog.away_s > 0:
        return f"no recorder has been there for {backlog.away_s:.0f} s (history.patience_s)"
    return "the recorder does not keep up, and more of them wait than history.backlog"
