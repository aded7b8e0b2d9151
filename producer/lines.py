"""Lines of a dataset's file: JSONL, the same compressed by gzip, or rows of parquet; each as a map, or a sentence.

What could not be admitted later is refused here, with file and line: text that is not Unicode (lone surrogates),
numbers and nesting that no record holds, lines beyond ``MAX_LINE_BYTES``.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from penstock.config import DatasetConfig
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.records.codec import MAX_TEXT_BYTES, pack, unpack
from penstock.system.extras import check_installed

#: Most bytes of one line; a record takes texts of half as much.
MAX_LINE_BYTES = 2 * MAX_TEXT_BYTES
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path, config: DatasetConfig) -> Iterator[dict[str, Any]]:
    """Rows of a file in their order. Blocks for the disk.

    Raises:
        ConfigError: a line cannot be read, or could not be admitted; names file and line.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, config)
    return _read_jsonl(path, config)


def check_writable(value: Any, where: str) -> None:
    """Raise ConfigError, which begins with ``where``, where a value does not survive the way to a worker."""
    try:
        # A record holds it a few levels down.
        unpack(pack([[[value]]]), where)
    except UnicodeEncodeError as exc:
        raise ConfigError(
            f"{where}: it holds half of a surrogate pair ({exc.object[exc.start : exc.end]!a}), which is not text; "
            "correct the escapes."
        ) from exc
    except OverflowError as exc:
        raise ConfigError(f"{where}: it holds an integer beyond 64 bits; write it as text.") from exc
    except TypeError as exc:
        raise ConfigError(f"{where}: it holds what JSON cannot represent ({exc}).") from exc
    except (ValueError, RecursionError, ProtocolError) as exc:
        why = exc.__cause__ if isinstance(exc, ProtocolError) else exc
        raise ConfigError(f"{where}: it is nested too deeply, or too large, for a record ({why}).") from exc


def _read_jsonl(path: Path, config: DatasetConfig) -> Iterator[dict[str, Any]]:
    blank = 0
    for number, line in enumerate(_raw_lines(path, config), 1):
        where = f"dataset {config.name}: line {number} of {path}"
        if not line.strip():
            blank = blank or number
            continue
        if blank:
            raise ConfigError(f"dataset {config.name}: line {blank} of {path} is blank; remove it.")
        yield _row(line, where)


def _raw_lines(path: Path, config: DatasetConfig) -> Iterator[bytes]:
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"dataset {config.name}: line {number} of {path} has more than {MAX_LINE_BYTES >> 20} MiB; "
                        "split it, or take it out."
                    )
                yield line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(
            f"dataset {config.name}: {path} cannot be read after line {number} ({exc}): write it again."
        ) from exc


def _open(path: Path) -> BufferedReader | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except RecursionError as exc:
        raise ConfigError(f"{where} is nested too deeply to be read.") from exc
    except ValueError as exc:
        raise ConfigError(f"{where} is not JSON in UTF-8 ({exc}).") from exc
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object.")
    return row


def _read_parquet(path: Path, config: DatasetConfig) -> Iterator[dict[str, Any]]:
    check_installed("pyarrow", f"dataset {config.name}: parquet")
    import pyarrow.parquet as parquet

    try:
        yield from parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as exc:
        raise ConfigError(f"dataset {config.name}: {path} is not a parquet file that can be read ({exc}).") from exc
