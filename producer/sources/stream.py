"""Read rows of a stream by number: window by window, with a few windows cached.

A stream has an order but no index: row i follows i other rows, in every process and after every restart. The number of
rows is known after the end was reached.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows, validate_offsets
from penstock.producer.sources.rows import Rows
from penstock.text import format_exc

#: (rows to skip, rows per table) -> the following tables; all but the last have that many rows. Blocks.
Open: TypeAlias = Callable[[int, int], Iterator[Any]]


#: Most cached windows: offers that are repeated while the gate is closed may span two.
_KEPT = 3


class Stream:
    """Source of an unknown number of rows; see :class:`~penstock.producer.sources.rows.Rows`.

    Reading forward reads each row once. Going back, or resuming at the position of an earlier process, reads all rows
    before it.

    Args:
        opened: opens the source at a row.
        digest: identifies the source.
        is_same: returns whether the files are unchanged since the digest was computed.
        first: number of the first row of the first window.
        window: number of rows that are read and cached together.
    """

    num_bytes = 0

    def __init__(
        self, opened: Open, config: DatasetConfig, digest: str, is_same: Callable[[], bool], first: int, window: int
    ) -> None:
        self._open = opened
        self._config, self._digest, self._is_same = config, digest, is_same
        self._first, self.window = first, window
        #: Number of rows; None while the end is not known.
        self.num_rows: int | None = None
        self._kept: OrderedDict[int, Rows] = OrderedDict()
        self._tables: Iterator[Any] = iter(())
        #: Number of the next window in ``_tables``; -1 without one.
        self._next = -1

    def __len__(self) -> int:
        """Return the number of rows. Raises ConfigError if the end is not known yet."""
        if self.num_rows is None:
            raise ConfigError(
                f"dataset {self._config.name} is a stream, whose length is unknown before its end is read."
            )
        return self.num_rows

    def digest(self) -> str:
        return self._digest

    def holds(self, index: int) -> bool:
        """Return whether row ``index`` exists. Blocks for reading it."""
        if self.num_rows is not None:
            return index < self.num_rows
        number, at = divmod(index - self._first, self.window)
        return at < len(self._window(number))

    def num_from(self, index: int) -> int:
        """Return the number of rows in the window that begins at row ``index``. Blocks for reading it."""
        return len(self._window((index - self._first) // self.window))

    def row(self, index: int) -> dict[str, Any]:
        """Return row ``index``, from 0. Blocks for reading its window.

        Raises:
            BadLine: it cannot be read.
            ConfigError: no row can be read; or the row does not exist.
        """
        number, at = divmod(index - self._first, self.window)
        rows = self._window(number)
        if at >= len(rows):
            raise ConfigError(
                f"dataset {self._config.name} has no row {index} any more: restore the rows of the start of the run."
            )
        return rows.row(at)

    def _window(self, number: int) -> Rows:
        if found := self._kept.get(number):
            self._kept.move_to_end(number)
            return found
        first = self._first + number * self.window
        rows = ArrowRows(self._read(number, first), self._config, self._digest, first)
        if len(rows) < self.window and self.num_rows is None:
            is_end = len(rows) > 0 or number - 1 in self._kept
            self.num_rows = first + len(rows) if is_end else self._count()
        self._kept[number] = rows
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return rows

    def _count(self) -> int:
        """Count the rows by reading all of them."""
        try:
            return sum(table.num_rows for table in self._open(0, self.window))
        except Exception as exc:  # as in _read
            raise ConfigError(
                f"dataset {self._config.name} cannot be read to its end ({format_exc(exc)}); correct it."
            ) from exc

    def _read(self, number: int, first: int) -> Any:
        """Read and validate the table of a window; return an empty one after the end."""
        import pyarrow

        try:
            if number != self._next:
                self._tables = self._open(first, self.window)
            self._next = -1
            table = next(self._tables, None)
            if table is None:
                table = pyarrow.table({})
            validate_offsets(table)
        except Exception as exc:  # the library passes on any error of its files and the network
            raise ConfigError(
                f"dataset {self._config.name} cannot be read from row {first} on ({format_exc(exc)}): fix the data, "
                "and restart the producer."
            ) from exc
        if not self._is_same():
            raise ConfigError(
                f"dataset {self._config.name}: its files changed while being read: restore them, restart the producer."
            )
        self._next = number + 1
        return table
