"""Record of the address at which a trainer serves the folder of a version over HTTP."""

from dataclasses import dataclass

from penstock.records.record import Record


@dataclass(frozen=True, slots=True)
class Offer(Record):
    """The address of a version. What is fetched there is verified by the index that was announced."""

    #: ``http(s)://HOST:PORT``
    url: str
    version: int
    #: Digest of the version's ``weights.index``, which names all files and their sizes.
    index: str
