"""Export samples to files: JSON lines, parquet, or a folder for Hugging Face ``datasets``.

A file gets its name when it is complete, so no reader finds a partial one.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from penstock.console.read.samples import shown
from penstock.history.filters import Filters
from penstock.history.reader import HistoryReader
from penstock.history.row import TIMES

#: Rows held at once, and for which batches are looked up at once.
CHUNK, USES = 512, 128

_TEXTS = ("id", "job", "lane", "dataset", "prompt", "answer", "label", "status", "finish_reason", "fate", "reason")
_NUMBERS = (
    *("k", "part", "epoch", "line", "oldest", "newest", "prompt_length", "num_generated", "attempts", "crashes"),
    *("num_turns", "num_aborts", "cached_tokens"),
)
#: Called with the number of rows written.
At = Callable[[int], None]


_ARRAYS = {"tokens": "int32", "logprobs": "float32", "versions": "int32", "generated": "uint8", "loss_mask": "uint8"}


def write_jsonl(samples: HistoryReader, filters: Filters, path: Path, *, arrays: bool, at: At) -> int:
    """Write one JSON map per line; return the number of rows. Blocks; raises OSError."""
    with named_when_complete(path) as unfinished, unfinished.open("wb") as file:
        count = 0
        for row in _rows(samples, filters, arrays, at):
            count += 1
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    return count


def write_parquet(samples: HistoryReader, filters: Filters, path: Path, *, arrays: bool, at: At) -> int:
    """Write one file; return the number of rows. Maps with varying keys are JSON text. Blocks; raises OSError."""
    with named_when_complete(path) as unfinished, contextlib.closing(_Parquet(unfinished, arrays)) as file:
        count = 0
        for row in _rows(samples, filters, arrays, at):
            count += 1
            file.add(row)
    return count


def write_datasets(samples: HistoryReader, filters: Filters, path: Path, *, arrays: bool, at: At) -> int:
    """Write a folder with ``data/LANE.parquet`` per lane, and a card that names the splits. Blocks; raises OSError."""
    with named_when_complete(path) as folder, contextlib.ExitStack() as stack:
        (folder / "data").mkdir(parents=True)
        files: dict[str, _Parquet] = {}
        count = 0
        for row in _rows(samples, filters, arrays, at):
            count += 1
            lane = row["lane"] if row["lane"].isalnum() else "other"
            if lane not in files:
                files[lane] = stack.enter_context(
                    contextlib.closing(_Parquet(folder / "data" / f"{lane}.parquet", arrays))
                )
            files[lane].add(row)
        (folder / "README.md").write_text(_card(sorted(files)), encoding="utf-8")
    return count


def _rows(samples: HistoryReader, filters: Filters, arrays: bool, at: At) -> Iterator[dict[str, Any]]:
    left, done = samples.each(filters, arrays=arrays), 0
    while some := list(islice(left, USES)):
        at(done)
        done += len(some)
        for row, uses in zip(some, samples.uses_of(some), strict=True):
            values = shown(row, uses)
            yield values if arrays else {name: value for name, value in values.items() if name not in _ARRAYS}


def _card(lanes: Iterable[str]) -> str:
    splits = "".join(f"  - split: {lane}\n    path: data/{lane}.parquet\n" for lane in lanes)
    return f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n"


class _Parquet:
    """A parquet file to which rows are appended."""

    def __init__(self, path: Path, arrays: bool) -> None:
        import pyarrow
        import pyarrow.parquet

        fields = [(name, pyarrow.string()) for name in (*_TEXTS, "worker", "reward_info", "uses")]
        fields += [(name, pyarrow.int64()) for name in _NUMBERS]
        fields += [(name, pyarrow.float64()) for name in ("reward", "generate_s", "reward_s", *TIMES)]
        if arrays:
            fields += [(name, pyarrow.list_(getattr(pyarrow, kind)())) for name, kind in _ARRAYS.items()]
        self._schema = pyarrow.schema(fields)
        self._table: Callable[..., Any] = pyarrow.Table.from_pylist
        self._file = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._held: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self._held.append(row | {name: orjson.dumps(row[name]).decode() for name in ("reward_info", "uses")})
        if len(self._held) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._file.write_table(self._table(self._held, schema=self._schema))
        self._held = []

    def close(self) -> None:
        self._flush()
        self._file.close()


@contextlib.contextmanager
def named_when_complete(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to ``path`` on success, and removed on failure."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(unfinished)
    try:
        yield unfinished
        unfinished.rename(path)
    except BaseException:
        _remove(unfinished)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
