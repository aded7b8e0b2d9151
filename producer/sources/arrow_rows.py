"""Rows of an Arrow table, one at a time."""

from typing import Any

from producer.sources.rows import BadLine


class ArrowRows:
    """Rows of a table, most of which may be a file mapped into memory.

    Args:
        table: a ``pyarrow.Table``.
        where: of whom errors speak.
        digest: of the table's content.
    """

    def __init__(self, table: Any, where: str, digest: str) -> None:
        self._table, self._where, self._digest = table, where, digest
        self.num_bytes = int(table.nbytes)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def digest(self) -> str:
        return self._digest

    def row(self, index: int) -> dict[str, Any]:
        try:
            (row,) = self._table.slice(index, 1).to_pylist()
        except (ValueError, OverflowError) as exc:  # text that is not UTF-8, times that Python's have no room for
            raise BadLine(f"{self._where}, line {index + 1}: it cannot be read ({exc}).") from exc
        return dict(row)
