"""What a dataset of a user's own code is."""

from typing import Any, Protocol


class RowSource(Protocol):
    """Rows of a dataset by number: ``path: python:module:Class``, made with the dataset's ``source_args``.

    Pure by rule: ``row(index)`` gives the same row at every call, in every process, and after every restart, for a
    position says which prompt comes next by its number alone. Called by the producer, which waits for the answer; what
    it raises ends the producer.
    """

    def __len__(self) -> int:
        """How many rows there are; as long as a run lives they are as many."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """Row ``index``, from 0: columns by their names, of JSON values."""
        ...
