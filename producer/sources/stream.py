"""Rows of a stream by number: read window by window, with a few windows in memory.

A stream has an order and no index. Row i is the one after i rows, in every process and after every restart; the number
of rows is known when the end was reached.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows, check_whole
from penstock.producer.sources.rows import Rows
from penstock.text import format_exc

#: (rows to skip, rows per table) -> the tables after them, all but the last with that many rows. Blocks.
Open: TypeAlias = Callable[[int, int], Iterator[Any]]


#: Most windows that are cached: offers that are repeated while the gate is closed may span the end of one.
_KEPT = 3


class Stream:
    """A source of rows whose number is not known before its end; see :class:`~penstock.producer.sources.rows.Rows`.

    Reading on costs what is read. Going back, or starting at the position of an earlier process, costs a pass over all
    rows before it.

    Args:
        opened: reads the source from a row on.
        digest: identifies the source.
        is_same: whether its files are still those of the digest.
        first: first row of the first window.
        window: rows that are read, and cached, together.
    """

    num_bytes = 0

    def __init__(
        self, opened: Open, config: DatasetConfig, digest: str, is_same: Callable[[], bool], first: int, window: int
    ) -> None:
        self._open = opened
        self._config, self._digest, self._is_same = config, digest, is_same
        self._first, self.window = first, window
        #: Number of rows; None: the end is not known yet.
        self.num_rows: int | None = None
        self._kept: OrderedDict[int, Rows] = OrderedDict()
        self._tables: Iterator[Any] = iter(())
        #: Number of the next window of ``_tables``; -1: none.
        self._next = -1

    def __len__(self) -> int:
        """Return the number of rows. Raises ConfigError if the end is not known yet."""
        if self.num_rows is None:
            raise ConfigError(f"dataset {self._config.name} is a stream, whose length is known at its end.")
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
        """Return the rows of the window that begins with row ``index``. Blocks for reading it."""
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
                f"dataset {self._config.name} has no row {index}, where it had more when the "
                "run began: bring back what it held."
            )
        return rows.row(at)

    def _window(self, number: int) -> Rows:
        if found := self._kept.get(number):
            self._kept.move_to_end(number)
            return found
        first = self._first + number * self.window
        rows = ArrowRows(self._read(number, first), self._config, self._digest, first)
        if len(rows) < self.window and self.num_rows is None:
            is_the_end = len(rows) > 0 or number - 1 in self._kept
            self.num_rows = first + len(rows) if is_the_end else self._count()
        self._kept[number] = rows
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return rows

    def _count(self) -> int:
        """Count the rows by a pass over them."""
        try:
            return sum(table.num_rows for table in self._open(0, self.window))
        except Exception as exc:  # as in _read
            raise ConfigError(f"dataset {self._config.name} cannot be read to its end ({format_exc(exc)}).") from exc

    def _read(self, number: int, first: int) -> Any:
        """Read the table of a window, validated; an empty one after the end."""
        import pyarrow

        try:
            if number != self._next:
                self._tables = self._open(first, self.window)
            self._next = -1
            table = next(self._tables, None)
            if table is None:
                table = pyarrow.table({})
            check_whole(table)
        except Exception as exc:  # the library raises what its files and its network do
            raise ConfigError(
                f"dataset {self._config.name}: what comes from row {first} on cannot be read "
                f"({format_exc(exc)}): correct it there, and start the producer again."
            ) from exc
        if not self._is_same():
            raise ConfigError(
                f"dataset {self._config.name}: its files were changed while they were read: bring back what they held, "
                "and start the producer again."
            )
        self._next = number + 1
        return table
