"""What a worker tells the ledger of tokens of one sample (I10)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from penstock.protocol.records.sample import SampleStatus
from penstock.protocol.records.sample_meta import SampleMeta


@dataclass(slots=True)
class Drawn:
    """Tokens of one sample under one lease: what there is of it, and what was drawn and thrown away.

    Totals, not differences: told again they change nothing. On the wire the numbers with commas, in this order
    (``_ledger.lua``).
    """

    #: Drawn tokens that the sample has, those of earlier leases among them.
    live: int = 0
    #: Drawn behind a stop and cut off, or of an answer that cannot be taken: its prefix was of older weights, or its
    #: routing was not told.
    behind_stop: int = 0
    #: Of a version that a rewind abandoned: the sample was started over.
    rewound: int = 0
    #: Of turns of an environment that is gone, or of a prefix whose routing is: the sample was started over.
    lost_turn: int = 0
    #: Requests whose answer never came: what they drew is not known.
    unheard: int = 0

    def __str__(self) -> str:
        return f"{self.live},{self.behind_stop},{self.rewound},{self.lost_turn},{self.unheard}"

    @property
    def thrown(self) -> int:
        return self.behind_stop + self.rewound + self.lost_turn

    @classmethod
    def recorded(cls, meta: SampleMeta) -> "Drawn":
        """What the record of a committed sample says; nothing was drawn of an answer that was given."""
        return cls(0 if meta.status == SampleStatus.GIVEN else meta.num_generated)


#: Of no sample.
NOTHING: Final[Mapping[int, Drawn]] = MappingProxyType({})
