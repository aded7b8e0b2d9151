"""Open the data source of a dataset."""

import json
from typing import Any

import xxhash

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import code_name, hub_name, parse_path
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import open_parquet
from penstock.producer.sources.hub import open_hub, open_stream
from penstock.producer.sources.jsonl import JsonLines
from penstock.producer.sources.rows import Rows, RowSource
from penstock.producer.sources.stream import Stream
from penstock.system.user_code import find, staying_alive
from penstock.text import format_exc, name_of, safe_repr

#: Number of evenly spread rows that the digest covers.
_DIGESTED_ROWS = 64


class CodeRows:
    """Rows of a user's :class:`~penstock.producer.sources.rows.RowSource`. Blocks for the user's code.

    Args:
        name: import path of the class.

    Raises:
        ConfigError: the class cannot be imported or instantiated, or has no length.
    """

    num_bytes = 0

    def __init__(self, name: str, config: DatasetConfig) -> None:
        self._where = f"dataset {config.name}: {name}"
        made = find(name, f"dataset {config.name}: path python:")
        try:
            with staying_alive():
                self._source: RowSource = made(**config.source_args)
                self._len = len(self._source)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            raise ConfigError(
                f"{self._where} raised {format_exc(exc)} when it was created; correct the class."
            ) from exc
        if not callable(getattr(self._source, "row", None)):
            raise ConfigError(f"{self._where} has no method row(index): add one that returns a row as a map.")

    def __len__(self) -> int:
        return self._len

    def row(self, index: int) -> dict[str, Any]:
        try:
            with staying_alive():
                row: Any = self._source.row(index)
                # Copy: a dict subclass may raise at any access.
                row = dict(row) if isinstance(row, dict) else row
        except KeyboardInterrupt:
            raise
        # BaseException: a CancelledError would end the producer silently.
        except BaseException as exc:
            raise ConfigError(f"{self._where}: row({index}) raised {format_exc(exc)}; correct the class.") from exc
        if not isinstance(row, dict):
            raise ConfigError(f"{self._where}: row({index}) returned {name_of(row)}, not a map; correct the class.")
        for key in row:
            if not isinstance(key, str):
                raise ConfigError(
                    f"{self._where}: row({index}) has a column name that is not text: {safe_repr(key)}; rename it."
                )
        return row

    def digest(self) -> str:
        """Return the digest of the number of rows and of some rows; that of an impure source changes at a restart."""
        digest = xxhash.xxh3_128(b"%d" % self._len)
        for index in sorted({self._len * i // _DIGESTED_ROWS for i in range(_DIGESTED_ROWS)} if self._len else ()):
            digest.update(self._as_json(index))
        return digest.hexdigest()

    def _as_json(self, index: int) -> bytes:
        try:
            return json.dumps(self.row(index), sort_keys=True, default=name_of).encode()
        # Keys that cannot be sorted, cyclic references, endless nesting, numbers of thousands of digits.
        except (TypeError, ValueError, RecursionError) as exc:
            raise ConfigError(
                f"{self._where}: row({index}) has a value that JSON cannot represent ({format_exc(exc)}): use text, "
                "numbers, lists, and maps with text as keys."
            ) from exc


def open_rows(config: DatasetConfig) -> Rows | Stream:
    """Open all rows of a dataset, before slicing. Blocks for one pass over the bytes, except for streams.

    Raises:
        ConfigError: the source does not exist, or cannot be read.
    """
    if name := code_name(config.path):
        return CodeRows(name, config)
    if name := hub_name(config.path):
        return open_stream(name, config) if config.streaming else open_hub(name, config)
    path, _, _ = parse_path(config.path)
    if not path.is_file():
        raise ConfigError(f"dataset {config.name}: file {path} does not exist; correct the dataset's path.")
    if path.suffix == ".parquet":
        return open_parquet(path, config)
    return JsonLines(path, config.name)
