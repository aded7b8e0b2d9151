"""A worker's report of the tokens of one sample, for the ledger (I10)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from penstock.protocol.records.sample import SampleStatus
from penstock.protocol.records.sample_meta import SampleMeta


@dataclass(slots=True)
class Drawn:
    """Tokens of one sample under one lease: those that it has, and those that were generated and discarded.

    Totals, not differences, so a repeated report changes nothing. Sent as numbers with commas, in this order
    (``_ledger.lua``).
    """

    #: Generated tokens that the sample has, including those of earlier leases.
    live: int = 0
    #: Generated after a stop and cut off, or of an answer that is invalid: its prefix was of older weights, or its
    #: routing was missing.
    behind_stop: int = 0
    #: Of a version that a rewind abandoned: the sample was started over.
    rewound: int = 0
    #: Of turns of a lost environment, or of a prefix whose routing is lost: the sample was started over.
    lost_turn: int = 0
    #: Requests without an answer: the number of tokens they generated is unknown.
    unheard: int = 0

    def __str__(self) -> str:
        return f"{self.live},{self.behind_stop},{self.rewound},{self.lost_turn},{self.unheard}"

    @property
    def thrown(self) -> int:
        return self.behind_stop + self.rewound + self.lost_turn

    @classmethod
    def recorded(cls, meta: SampleMeta) -> "Drawn":
        """Make the report of a committed sample from its record; a given answer has no generated tokens."""
        return cls(0 if meta.status == SampleStatus.GIVEN else meta.num_generated)


#: A report without samples.
NOTHING: Final[Mapping[int, Drawn]] = MappingProxyType({})
