"""The record of a version's folder, if it was completed after the version was announced."""

from dataclasses import dataclass, replace
from typing import Self

from penstock.errors import ProtocolError
from penstock.protocol.records.publication import Publication
from penstock.protocol.records.record import Record


@dataclass(frozen=True, slots=True)
class Whole(Record):
    """A version whose folder is complete, verified and synced."""

    version: int
    #: Folder with config, tokenizer, safetensors and index.
    path: str
    #: Digest of the index in it.
    index: str
    #: Bytes of all tensors, and seconds to write and verify them: for views. 0: not known.
    num_bytes: int = 0
    write_s: float = 0.0

    @classmethod
    def of(cls, publication: Publication) -> Self:
        """Make the record of a publication with a folder. Raises ProtocolError if it has none."""
        if not publication.is_whole or not publication.index:
            raise ProtocolError(f"Version {publication.version} of {publication.model!r} has no folder with an index.")
        return cls(publication.version, publication.path, publication.index, publication.num_bytes, publication.write_s)

    def of_publication(self, publication: Publication) -> Publication:
        """Return the publication of this version with this folder.

        Raises:
            ProtocolError: it is of another version.
        """
        if publication.version != self.version:
            raise ProtocolError(f"The folder of version {self.version} is not one of version {publication.version}.")
        if publication.is_whole:
            return publication
        return replace(publication, path=self.path, index=self.index, num_bytes=self.num_bytes, write_s=self.write_s)
