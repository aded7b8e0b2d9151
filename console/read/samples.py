"""Samples of a run: those of its history, and those that are still in Redis, each once.

Shared by command line and page.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.console.read.live_samples import read_live
from penstock.console.read.token_texts import texts_of_row
from penstock.errors import QueueUnavailable
from penstock.history.blocks import ARRAYS
from penstock.history.filters import Filters, Sort
from penstock.history.reader import HistoryReader
from penstock.history.row import TIMES, Fate, SampleRow, Use
from penstock.names import Lane
from penstock.protocol.keys import Keys
from penstock.redis.commands import Client
from penstock.system.run_folder import RunFolder

#: Fields of a sample in lists, beside its id; texts are complete.
LISTED = (
    *("job", "k", "part", "lane", "dataset", "epoch", "line", "prompt", "answer", "label", "reward", "status"),
    *("finish_reason", "fate", "reason", "oldest", "newest", "prompt_length", "num_generated"),
)
#: Additional fields of a single sample.
SHOWN = (
    *("reward_info", "worker", "attempts", "crashes", "num_turns", "num_aborts", "cached_tokens"),
    *("generate_s", "reward_s"),
)


def open_samples(folder: Path, live: tuple[Client, Keys] | None = None) -> HistoryReader:
    """Open a reader of the samples of the run in ``folder``. Blocks for the disk, and for Redis if ``live`` is given.

    Args:
        live: the run's Redis, if it answers. If it stops answering meanwhile, it is ignored.
    """
    reader = HistoryReader(RunFolder(folder).history)
    if live is not None:
        try:
            reader.show_too(*read_live(*live))
        except QueueUnavailable:
            return reader
    return reader


def open_live(folder: Path, live: tuple[Client, Keys] | None) -> HistoryReader:
    """Open a reader of the samples that are still in Redis; empty without ``live``. Blocks for Redis."""
    reader = HistoryReader(RunFolder(folder).history / "none")
    if live is not None:
        reader.show_too(*read_live(*live))
    return reader


def newest_batch(samples: HistoryReader) -> Use | None:
    """Return a use in the batch trained last, as far as recorded; None without one. Blocks for the disk."""
    newest = samples.rows(Filters(fate=Fate.TRAINED, lane=Lane.TRAIN), Sort.RECORDED, limit=1).rows
    uses = samples.uses(newest[0].id) if newest else []
    return max(uses, key=lambda use: use.batch, default=None)


def listed(row: SampleRow) -> dict[str, Any]:
    """Return a sample's fields for lists, as plain values."""
    return {"id": row.id, **{name: getattr(row, name) for name in LISTED}}


def shown(row: SampleRow, uses: list[Use]) -> dict[str, Any]:
    """Return all data of a sample as plain values: arrays as lists; None if not recorded, or a time is unknown."""
    arrays = {name: None if (array := getattr(row, name)) is None else array.tolist() for name in ARRAYS}
    return {
        **listed(row),
        **{name: getattr(row, name) for name in SHOWN},
        **{name: at if (at := getattr(row, name)) > 0 else None for name in TIMES},
        "uses": [_use(use) for use in uses],
        **arrays,
    }


def token_rows(folder: Path, row: SampleRow, most: int | None = None) -> list[dict[str, Any]]:
    """Return a row per generated token, at most ``most``: place, id, text, logprob, version, whether it bears loss.

    The text is None if neither the history nor a tokenizer of the run in ``folder`` knows it.
    """
    if row.tokens is None or row.generated is None:
        return []
    places = row.generated.nonzero()[0].tolist()[:most]
    texts = texts_of_row(folder, row, row.tokens[places].tolist())
    return [
        {
            "at": at,
            "token": int(row.tokens[at]),
            "text": text,
            "logprob": _at(row.logprobs, at),
            "version": _at(row.versions, at),
            "loss": _at(row.loss_mask, at),
        }
        for at, text in zip(places, texts, strict=True)
    ]


def _at(array: Any, at: int) -> Any:
    return None if array is None else array[at].item()


def _use(use: Use) -> Mapping[str, Any]:
    return {
        "subscription": use.subscription,
        "batch": use.batch,
        "version": use.version,
        "staleness": use.staleness,
        "loss_tokens": use.loss_tokens,
    }
