"""What proves the trainer's copy of a version whose folder is still to come."""

from dataclasses import dataclass

from penstock.protocol.records.record import Record


@dataclass(frozen=True, slots=True)
class Copied(Record):
    """A version that its trainer serves out of memory."""

    version: int
    #: Digest of the index that its folder will have: whatever is fetched is believed by it.
    index: str
