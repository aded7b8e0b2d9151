"""Rows that a user's own code gives."""

import json
from typing import Any

import xxhash

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.system.user_code import find, staying_alive
from penstock.words import said
from producer.sources.row_source import RowSource

#: Rows that are looked at to tell whether they are the same at the next start, evenly spread.
_LOOKED_AT = 64


class CodeRows:
    """Rows of a :class:`~producer.sources.row_source.RowSource`. Blocks for what the code does.

    Args:
        name: import path of the class.

    Raises:
        ConfigError: it cannot be imported or made, or has no length.
    """

    num_bytes = 0

    def __init__(self, name: str, config: DatasetConfig) -> None:
        self._where = f"dataset {config.name}: {name}"
        made = find(name, f"dataset {config.name}: path python:")
        try:
            with staying_alive():
                self._source: RowSource = made(**config.source_args)
                self._len = len(self._source)
        except (Exception, SystemExit) as exc:
            raise ConfigError(f"{self._where} could not be made: it raised {said(exc)}.") from exc
        if not callable(getattr(self._source, "row", None)):
            raise ConfigError(f"{self._where} has no method row(index), which gives a row as a map: add it.")

    def __len__(self) -> int:
        return self._len

    def row(self, index: int) -> dict[str, Any]:
        try:
            with staying_alive():
                row: Any = self._source.row(index)
        except (Exception, SystemExit) as exc:
            raise ConfigError(f"{self._where}: row({index}) raised {said(exc)}.") from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{self._where}: row({index}) gave {type(row).__name__}, which is not a map.")
        return row

    def digest(self) -> str:
        """Of how many rows there are, and of some of them: those that are not pure differ at the next start."""
        digest = xxhash.xxh3_128(b"%d" % self._len)
        for index in sorted({self._len * i // _LOOKED_AT for i in range(_LOOKED_AT)} if self._len else ()):
            row = json.dumps(self.row(index), sort_keys=True, default=lambda value: type(value).__name__)
            digest.update(row.encode())
        return digest.hexdigest()
