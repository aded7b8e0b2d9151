"""A disposal: a subscription removes a group unused."""

from enum import StrEnum


class Disposal(StrEnum):
    """Why a subscription will never use a group; its ledger counts them by this."""

    #: It got older than the bound.
    STALE = "stale"
    #: A filter rejected it; the ledger has the filter's own reason.
    FILTERED = "filtered"
    #: It was generated with a version that a rewind abandoned.
    REWOUND = "rewound"
    #: All of its payloads that bear loss are lost.
    PAYLOAD_LOST = "payload_lost"
    #: It completed before the subscription was made.
    BEFORE = "before"
    #: It is not in the subscription's quota.
    QUOTA = "quota"
    #: The subscription may not hold more groups, or not for longer.
    RETENTION = "retention"
    #: Its records cannot be read.
    UNREADABLE = "unreadable"
    #: It never had a token that bears loss.
    NO_LOSS = "no_loss"

    @property
    def code(self) -> int:
        """Value of the group's field ``u:ACCOUNT`` instead of a number of uses; below 0."""
        return _CODES[self]


_CODES = {
    Disposal.STALE: -1,
    Disposal.FILTERED: -2,
    Disposal.REWOUND: -3,
    Disposal.PAYLOAD_LOST: -4,
    Disposal.BEFORE: -5,
    Disposal.QUOTA: -6,
    Disposal.RETENTION: -7,
    Disposal.UNREADABLE: -8,
    Disposal.NO_LOSS: -9,
}

#: Codes for verbs: ``CODE=WORD`` of each, with commas.
CODES = ",".join(f"{reason.code}={reason}" for reason in Disposal)
