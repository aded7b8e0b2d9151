"""Files that Hugging Face ``datasets`` finds, read so that an unreadable row affects only itself.

    JSON lines   ─> each line as it is, decoded when it is taken           one that is not JSON in UTF-8 is one row
    parquet      ─> each file as it is, cast to the types of the split     one that cannot be cast is one row

The library itself ends a file, or refuses all of them, at the first such line or type.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from penstock.config import DatasetConfig
from penstock.errors import ConfigError
from penstock.producer.sources.arrow_rows import ArrowRows, named
from penstock.producer.sources.jsonl import BYTE_ORDER_MARK, MAX_LINE_BYTES, decode_line
from penstock.producer.sources.rows import BadLine
from penstock.producer.sources.stream import Reader

#: Files of which save_to_disk writes one.
_SAVED = ("state.json", "dataset_dict.json")


def is_saved(name: str) -> bool:
    """Return whether it is a folder that save_to_disk wrote."""
    return any(Path(name, file).is_file() for file in _SAVED)


def one_split(found: Any, config: DatasetConfig) -> Any:
    """Return the dataset of the configured split, or of the only one."""
    import datasets

    if not isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        return found
    return found[one_of(map(str, found), config)]


def one_of(names: Iterable[str], config: DatasetConfig) -> str:
    """Return the name of the configured split, or the only one."""
    splits = sorted(names)
    if config.split is None and len(splits) == 1:
        return splits[0]
    if config.split not in splits:
        raise ConfigError(
            f"dataset {config.name}: it has the splits {', '.join(splits)}, and its split is {config.split}: name one."
        )
    return config.split


@contextmanager
def without_torch() -> Iterator[None]:
    """Make the library skip its support for torch's loaders, whose import takes seconds and hundreds of MB."""
    import datasets

    before = datasets.config.TORCH_AVAILABLE
    datasets.config.TORCH_AVAILABLE = False
    try:
        yield
    finally:
        datasets.config.TORCH_AVAILABLE = before


_LINES = re.compile(r"\.(jsonl|ndjson)(\.(gz|bz2|xz|zst))?$")
#: Rows per table when files are read.
_BATCH = 8192
#: Additional column of parquet files: why a row cannot be read, null if it can.
_WHY = "penstock_unreadable"


class LineRows:
    """Lines of JSON in a table, as :class:`~penstock.producer.sources.rows.Rows`, from line number ``first``."""

    def __init__(self, table: Any, config: DatasetConfig, digest: str, first: int = 0) -> None:
        self._config, self._digest, self._first = config, digest, first
        self._lines = table.column("line") if table.num_rows else []
        self.num_bytes = int(table.nbytes)

    def __len__(self) -> int:
        return len(self._lines)

    def digest(self) -> str:
        return self._digest

    def row(self, index: int) -> dict[str, Any]:
        where = f"dataset {self._config.name}, line {self._first + index + 1}"
        line = self._lines[index].as_py().removeprefix(BYTE_ORDER_MARK)
        if len(line) > MAX_LINE_BYTES:
            raise BadLine(f"{where} has more than {MAX_LINE_BYTES >> 20} MiB; split it, or take it out.")
        row = decode_line(line, where)
        # As if all rows had all columns.
        for key in (self._config.answer_key, self._config.tools_key, self._config.image_key):
            if key is not None:
                row.setdefault(key, None)
        return row


class ParquetRows(ArrowRows):
    """Rows of a table that ``by_row`` reads from parquet: rows that do not have its types are unreadable."""

    def __init__(self, table: Any, config: DatasetConfig, digest: str, first: int = 0) -> None:
        super().__init__(table, config, digest, first)
        self._where_first = f"dataset {config.name}, line", first
        self._why = table.column(_WHY) if table.num_rows else []

    def row(self, index: int) -> dict[str, Any]:
        if (why := self._why[index].as_py()) is not None:
            where, first = self._where_first
            raise BadLine(f"{where} {first + index + 1}: {why}.")
        return super().row(index)


def by_row(builder: Any, config: DatasetConfig) -> tuple[Reader, list[str]] | None:
    """Return the reader of a split's files, and these files or their addresses; None: the library reads them.

    Reads JSON lines by file name (``.jsonl``, compressed or not), and parquet if bad lines are skipped. If all rows are
    readable, they equal the library's.

    Args:
        builder: the library's builder of a folder or a name.

    Raises:
        ConfigError: the split does not exist.
    """
    splits, options = files_of(builder), builder.config
    plain_json = builder.name == "json" and options.field is None and options.encoding == "utf-8"
    plain_parquet = builder.name == "parquet" and options.columns is None and options.filters is None
    if splits and plain_json and all(map(_LINES.search, chain(*splits.values()))):
        files = splits[one_of(splits, config)]
        return Reader(lambda first, num_rows: _windows(_lines(files), first, num_rows), LineRows), files
    if splits and plain_parquet and config.on_bad_line == "skip":
        files = splits[one_of(splits, config)]
        types = builder.info.features

        def opened(first: int, num_rows: int) -> Iterator[Any]:
            return _windows(_parquet(files, types, config), first, num_rows)

        return Reader(opened, ParquetRows), files
    return None


def files_of(builder: Any) -> dict[str, list[str]]:
    """Return split -> its files, or their addresses; {} if the library does not report them."""
    return {str(split): list(map(str, files)) for split, files in (builder.config.data_files or {}).items()}


def _lines(files: list[str]) -> Iterator[Any]:
    """Yield tables of the lines that are not blank."""
    import pyarrow

    for name in files:
        with _opened(name) as file:
            says = (line for line in file if line.strip())
            while batch := list(islice(says, _BATCH)):
                yield pyarrow.table({"line": pyarrow.array(batch, pyarrow.binary())})


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """Open a local or remote file; decompress it if its name says that it is compressed."""
    from datasets.utils.file_utils import xopen
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    with xopen(name, "rb") as file:
        kind = infer_compression(name)
        if kind is None:
            yield file
            return
        with compr[kind](file, mode="rb") as decompressed:
            yield decompressed


def _parquet(files: list[str], features: Any, config: DatasetConfig) -> Iterator[Any]:
    """Yield tables of the dataset's columns, in the types of the first file, or of the features of the files."""
    import datasets
    import pyarrow.parquet

    for name in files:
        with _opened(name) as file:
            opened = pyarrow.parquet.ParquetFile(file)
            features = features or datasets.Features.from_arrow_schema(opened.schema_arrow)
            types = features.arrow_schema
            schema = [types.field(column) for column in named(config) if column in types.names]
            for batch in opened.iter_batches(batch_size=_BATCH):
                yield _cast(pyarrow.Table.from_batches([batch]), schema)


def _cast(table: Any, schema: list[Any]) -> Any:
    """Cast a table to the columns of ``schema``, plus a column with the error of each row that cannot be cast."""
    import pyarrow

    why: list[str | None] = [None] * table.num_rows
    columns = [_column(table, field, why) for field in schema]
    return pyarrow.table(
        [*columns, pyarrow.array(why, pyarrow.string())], schema=pyarrow.schema([*schema, (_WHY, pyarrow.string())])
    )


def _column(table: Any, field: Any, why: list[str | None]) -> Any:
    """Cast one column, null if a row cannot be cast; add the errors to ``why``."""
    import pyarrow

    null = pyarrow.chunked_array([pyarrow.nulls(1, field.type)])
    if (times := table.schema.names.count(field.name)) != 1:
        why[:] = [f"its file has {times} columns {field.name!r}, and the others have one"] * len(why)
        return pyarrow.nulls(table.num_rows, field.type)
    found = table.select([field.name])
    whole = _cast_column(found, field)
    if whole is not None:
        return whole
    chunks = []
    for at in range(found.num_rows):
        one = _cast_column(found.slice(at, 1), field)
        if one is None:
            why[at] = (
                f"its {field.name!r} is {found.schema.field(0).type}, and cannot be {field.type} as in other files"
            )
        chunks += (null if one is None else one).chunks
    return pyarrow.chunked_array(chunks, field.type)


def _cast_column(table: Any, field: Any) -> Any:
    """Cast the only column of a table to the type of ``field``, as the library does; None if it cannot be cast."""
    import pyarrow
    from datasets.table import table_cast

    try:
        return table_cast(table, pyarrow.schema([field])).column(0)
    # The library raises these, of a value or of a type.
    except (ValueError, TypeError, pyarrow.ArrowException):
        return None


def _windows(tables: Iterable[Any], first: int, num_rows: int) -> Iterator[Any]:
    """Yield tables of ``num_rows`` rows, except the last, after skipping the first ``first`` rows."""
    import pyarrow

    left, held, count = first, [], 0
    for table in tables:
        passed = min(left, table.num_rows)
        left, rest = left - passed, table.slice(passed)
        while count + rest.num_rows >= num_rows:
            held.append(rest.slice(0, num_rows - count))
            rest = rest.slice(num_rows - count)
            yield pyarrow.concat_tables(held)
            held, count = [], 0
        if rest.num_rows:
            held.append(rest)
            count += rest.num_rows
    if held:
        yield pyarrow.concat_tables(held)
