"""The ledger of tokens (I10): each token reported to a fenced verb is in exactly one account, or held by a live group.

    heard = sum of accounts + held by live groups        per home lane, at every instant

Verbs keep it in the hash ``tokens``, field ``LANE:ACCOUNT`` (``lua/ledger.lua``);
docs/internals/protocol.md has the accounts.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from penstock.names import Lane
from penstock.records.codec import count_of, count_shown, name_shown
from penstock.records.record import readable

#: Not an account: all tokens that were reported.
HEARD = "heard"
#: Not an account either: requests, in the hash ``counters``.
UNHEARD = "unheard"
NO_COUNTERS: Final[Mapping[bytes, bytes]] = MappingProxyType({})
#: Tokens that bore loss in a durable batch.
TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class LaneTokens:
    """Tokens that were generated for the jobs of one home lane."""

    heard: int = 0
    #: Account -> tokens; ``filtered:WHICH`` and ``dropped:REASON`` give details. ``buried`` shrinks when a dead job is
    #: restored, the others only grow.
    accounts: Mapping[str, int] = field(default_factory=dict)
    #: Requests whose tokens were never reported because their engine, worker or lease was lost: in no sum.
    unheard: int = 0

    @property
    def held(self) -> int:
        """Tokens of live groups, not in an account yet."""
        return self.heard - sum(self.accounts.values())

    @property
    def trained(self) -> int:
        return self.accounts.get(TRAINED, 0)

    @property
    def goodput(self) -> float | None:
        """Share of the reported tokens that were trained on; None before the first."""
        return self.trained / self.heard if self.heard else None

    def to_map(self) -> dict[str, Any]:
        """Return plain values."""
        shown = {name: getattr(self, name) for name in ("heard", "held", "goodput", "unheard")}
        return shown | {"accounts": dict(self.accounts)}


def tokens_of(raw: Mapping[bytes, bytes], counters: Mapping[bytes, bytes] = NO_COUNTERS) -> dict[str, LaneTokens]:
    """Parse the hash ``tokens``, by home lane. Invalid entries are logged and left out.

    Args:
        counters: the hash of that name, which counts requests whose tokens were never reported.
    """

    def read(name: bytes, value: bytes) -> tuple[str, int]:
        shown = name_shown(name)
        return shown, count_of(value, f"The account {shown}")

    ledgers = lanes_of(dict(readable(dict(raw), read)))
    unheard = {lane: count_shown(counters.get(f"{UNHEARD}:{lane}".encode())) or 0 for lane in ledgers}
    return {lane: replace(ledger, unheard=unheard[lane]) for lane, ledger in ledgers.items()}


def lanes_of(fields: Mapping[str, int]) -> dict[str, LaneTokens]:
    """Build the ledgers from fields ``LANE:ACCOUNT`` that are parsed already."""
    heard: dict[str, int] = {}
    accounts: dict[str, dict[str, int]] = defaultdict(dict)
    for name, tokens in sorted(fields.items()):
        lane, _, account = name.partition(":")
        if account == HEARD:
            heard[lane] = tokens
        else:
            accounts[lane][account] = tokens
    return {lane: LaneTokens(heard.get(lane, 0), accounts[lane]) for lane in sorted({*heard, *accounts})}


def ledgers_of(state: Mapping[str, Any]) -> dict[str, LaneTokens]:
    """Return the ledger of a snapshot, by home lane."""
    found = state.get("tokens") or {}
    return {lane: LaneTokens(one[HEARD], one["accounts"], one.get(UNHEARD, 0)) for lane, one in found.items()}


def of_training(ledger: Mapping[str, LaneTokens]) -> LaneTokens:
    """Return the ledger of the lane that is trained."""
    return ledger.get(Lane.TRAIN, LaneTokens())
