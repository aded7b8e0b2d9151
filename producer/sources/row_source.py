"""The protocol of the user's own datasets."""

from typing import Any, Protocol


class RowSource(Protocol):
    """Rows of a dataset by number: ``path: python:module:Class``, made with the dataset's ``source_args``.

    It must be pure: ``row(index)`` returns the same row at every call, in every process, and after every restart, since
    a position identifies the next prompt by its number alone. Called by the producer, which blocks for the result; its
    exceptions end the producer.
    """

    def __len__(self) -> int:
        """Return the number of rows, which is constant during a run."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``, from 0: columns by their names, of JSON values."""
        ...
