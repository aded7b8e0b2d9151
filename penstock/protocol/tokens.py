"""The ledger of tokens (I10): every token that a fenced verb was told of stands in exactly one account, or is held.

    heard = sum of accounts + held by live groups        per home lane, at every instant

Verbs keep it in the hash ``tokens``, field ``LANE:ACCOUNT`` (``lua/_ledger.lua``). Who books what: docs/protocol.md.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from penstock.names import Lane
from penstock.protocol.records.readable import readable
from penstock.protocol.records.small_maps import count_of, count_shown, name_shown

#: Not an account: all tokens that were told of.
HEARD = "heard"
#: Nor this: requests, in the hash ``counters``.
UNHEARD = "unheard"
NO_COUNTERS: Final[Mapping[bytes, bytes]] = MappingProxyType({})
#: Bore loss in a batch that is durable.
TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class LaneTokens:
    """Tokens that were drawn for the jobs of one home lane."""

    heard: int = 0
    #: Account -> tokens; ``filtered:WHICH`` and ``dropped:REASON`` say more. ``buried`` shrinks when a job is dug up,
    #: the others only grow.
    accounts: Mapping[str, int] = field(default_factory=dict)
    #: Requests whose engine, worker or lease was lost before anybody told what they had drawn: in no sum.
    unheard: int = 0

    @property
    def held(self) -> int:
        """Tokens of live groups, whose fate is open."""
        return self.heard - sum(self.accounts.values())

    @property
    def trained(self) -> int:
        return self.accounts.get(TRAINED, 0)

    @property
    def goodput(self) -> float | None:
        """Share of the tokens told of that were trained on; None before there is one."""
        return self.trained / self.heard if self.heard else None

    def to_map(self) -> dict[str, Any]:
        """As plain values."""
        shown = {name: getattr(self, name) for name in ("heard", "held", "goodput", "unheard")}
        return shown | {"accounts": dict(self.accounts)}


def tokens_of(raw: Mapping[bytes, bytes], counters: Mapping[bytes, bytes] = NO_COUNTERS) -> dict[str, LaneTokens]:
    """The ledger in a hash ``tokens``, by home lane. An entry that no verb wrote is logged and left out.

    Args:
        counters: the hash of that name, where requests are counted that nobody heard of.
    """

    def read(name: bytes, value: bytes) -> tuple[str, int]:
        shown = name_shown(name)
        return shown, count_of(value, f"The account {shown}")

    ledgers = lanes_of(dict(readable(dict(raw), read)))
    unheard = {lane: count_shown(counters.get(f"{UNHEARD}:{lane}".encode())) or 0 for lane in ledgers}
    return {lane: replace(ledger, unheard=unheard[lane]) for lane, ledger in ledgers.items()}


def lanes_of(fields: Mapping[str, int]) -> dict[str, LaneTokens]:
    """The same of fields ``LANE:ACCOUNT`` that were read already."""
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
    """The ledger of a snapshot, by home lane."""
    found = state.get("tokens") or {}
    return {lane: LaneTokens(one[HEARD], one["accounts"], one.get(UNHEARD, 0)) for lane, one in found.items()}


def of_training(ledger: Mapping[str, LaneTokens]) -> LaneTokens:
    """What was drawn to be trained on."""
    return ledger.get(Lane.TRAIN, LaneTokens())
