"""What the leader holds for each subscription, for all to see; and whom it holds groups for who is not there (I8)."""

from buffer.state import State
from buffer.subscription import Subscription
from penstock.protocol.keys import Keys
from penstock.protocol.records.codec import pack
from penstock.protocol.scripts import note, run
from penstock.protocol.waits import Waiting
from penstock.redis.commands import Client


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
