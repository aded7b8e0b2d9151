"""The record of a trainer's copy of a version whose folder is not complete yet."""

from dataclasses import dataclass

from penstock.protocol.records.record import Record


@dataclass(frozen=True, slots=True)
class Copied(Record):
    """A version that its trainer serves from memory."""

    version: int
    #: Digest of the index that its folder will have; fetched data is verified with it.
    index: str
