"""Samples of a run: those of its history, and those that are still in Redis, each once.

Shared by command line and page.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.config.reading.yaml_file import read_yaml
from penstock.consumers.history.retired import Retired, group_of, read_trained
from penstock.consumers.history.rows import Trained, row_of_job, rows_of
from penstock.errors import ConfigError, QueueUnavailable
from penstock.history.filters import Filters, Sort
from penstock.history.reader import HistoryReader
from penstock.history.row import ARRAYS, TIMES, Fate, SampleRow, Use
from penstock.model.tokenizer import TextOf, load_token_texts
from penstock.names import Lane
from penstock.records.codec import count_shown, name_shown
from penstock.records.keys import Keys
from penstock.redis.commands import Client
from penstock.redis.saved_config import CONFIG_FILE
from penstock.system.run_folder import RunFolder

#: Replacement for an incomplete character, which ends in the following tokens.
_TORN = "\ufffd"
#: Most tokens of one character.
_SPAN = 8


def texts_of_row(folder: Path, row: SampleRow, tokens: Sequence[int]) -> list[str | None]:
    """Return the text of each of these tokens of a sample: from its history, else from ``token_texts``."""
    if not row.pieces.keys() >= set(tokens):
        return token_texts(folder, tokens)
    return _each(lambda ids, _: b"".join(map(row.pieces.__getitem__, ids)).decode("utf-8", "replace"), tokens)


def token_texts(folder: Path, tokens: Sequence[int]) -> list[str | None]:
    """Return the text of each token of a run; None for all without a tokenizer.

    A character of several tokens is returned for the first of them, '' for the others. Blocks for the disk at the first
    call, for up to a second.
    """
    text_of = _tokenizer_of(folder)
    return [None] * len(tokens) if text_of is None else _each(text_of, tokens)


def _each(text_of: TextOf, tokens: Sequence[int]) -> list[str | None]:
    texts: list[str | None] = []
    while len(texts) < len(tokens):
        begin = len(texts)
        text, count = _next(text_of, tokens[begin : begin + _SPAN])
        texts += [text] + [""] * (count - 1)
    return texts


def _next(text_of: TextOf, tokens: Sequence[int]) -> tuple[str, int]:
    """Return the text that begins with the first token, and the number of its tokens."""
    alone = text_of(tokens[:1], True)
    if _TORN not in alone:
        return alone, 1
    whole = ((text_of(tokens[:count], True), count) for count in range(2, len(tokens) + 1))
    return next(((text, count) for text, count in whole if _TORN not in text), (alone, 1))


def _tokenizer_of(folder: Path) -> TextOf | None:
    for path in _models(folder):
        # Other formats need a library that takes seconds to load.
        file = path / "tokenizer.json"
        if file.is_file():
            return _loaded(path, file.stat().st_mtime_ns)
    return None


def _models(folder: Path) -> list[Path]:
    """Return folders that may hold the tokenizer: the run's initial model, and its publications."""
    try:
        model = read_yaml(folder / CONFIG_FILE).get("model", {})
        path = model.get("path") if isinstance(model, dict) else None
    except (ConfigError, OSError):
        path = None
    published = sorted((folder / "weights").glob("v*"), reverse=True)[:1]
    return [*([Path(path)] if isinstance(path, str) and "\0" not in path else []), *published]


@lru_cache(maxsize=4)
def _loaded(path: Path, _: int) -> TextOf | None:
    try:
        return load_token_texts(str(path)).text_of
    except ConfigError:
        return None


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

    The text is None if it is in neither the history nor a tokenizer of the run in ``folder``.
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


def turn_rows(folder: Path, row: SampleRow) -> list[dict[str, Any]]:
    """Return the turns of a sample and the observations between them, in order; empty without its tokens.

    ``by`` is policy or environment; ``versions`` oldest and newest of its tokens, None for an observation; ``text`` as
    in ``token_rows``.
    """
    if row.tokens is None or row.generated is None:
        return []
    begin, rows = row.prompt_length, []
    texts = texts_of_row(folder, row, row.tokens[begin:].tolist())
    for drawn, run in groupby(row.generated[begin:].tolist()):
        end = begin + len(list(run))
        said = texts[begin - row.prompt_length : end - row.prompt_length]
        versions = row.versions[begin:end] if drawn and row.versions is not None else None
        rows.append(
            {
                "by": "policy" if drawn else "environment",
                "tokens": end - begin,
                "loss_tokens": None if row.loss_mask is None else int(row.loss_mask[begin:end].sum()),
                "versions": None if versions is None else [int(versions.min()), int(versions.max())],
                "text": None if None in said else "".join(map(str, said)),
            }
        )
        begin = end
    return rows


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


#: Groups read per round trip.
CHUNK = 256


@dataclass(frozen=True, slots=True)
class LiveJob:
    """The state of a job in Redis."""

    #: A ``JobState``.
    state: str
    #: A single row without a sample if none is committed; ``fate`` is '' (open), ``reason`` the state.
    rows: Sequence[SampleRow]
    uses: Sequence[Use]
    #: (subscription, batch) -> when it was cut, and when all its ranks had committed it (Unix seconds).
    cut_s: Mapping[tuple[str, int], float]
    trained_s: Trained
    #: Description of invalid records; '' if all are valid.
    broken: str


def read_live(client: Client, keys: Keys) -> tuple[list[SampleRow], list[Use]]:
    """Return the committed samples of all jobs that are begun, ready or retiring.

    Blocks for a round trip per ``CHUNK`` groups.

    Unreadable groups are skipped: the commands that show groups report them.
    """
    rows: list[SampleRow] = []
    uses: list[Use] = []
    for job, raw, meta in read_groups(client, keys, _jobs(client, keys)):
        found = _live(job, raw, meta, {}) if meta else None
        if found is not None and not found.broken:
            rows += found.rows
            uses += found.uses
    return rows, uses


def read_live_job(client: Client, keys: Keys, job: str) -> LiveJob | None:
    """Return one job in any state; None if it has no group. Blocks for a few round trips."""
    raw = client.hgetall(keys.group(job))
    if not raw:
        return None
    meta = client.get(keys.meta(job))
    group = group_of(job, raw, meta)
    return _live(job, raw, meta, read_trained(client, keys, [group]))


def _live(job: str, raw: Mapping[bytes, bytes], meta: bytes | None, trained: Trained) -> LiveJob:
    group, state = group_of(job, raw, meta), name_shown(raw.get(b"st", b""))[:200]
    made = [row for one in group.samples for row in rows_of(group, one, None, None, trained)]
    rows = [replace(row, fate="", reason=state) for row, _ in made or [(row_of_job(group), [])]]
    uses = [use for _, used in made for use in used] or list(_last_uses(group, raw))
    cut = {(sub, use.batch): use.cut_s for sub, found in group.uses.items() for use in found}
    return LiveJob(state, rows, uses, cut, trained, group.broken)


def _jobs(client: Client, keys: Keys) -> list[str]:
    """Return the jobs of all groups that may have samples, the latest ones last."""
    retiring = (*client.sscan_iter(keys.retiring), *client.zrange(keys.unrecorded, 0, -1))
    ready, begun = client.zrange(keys.ready, 0, -1), client.zrange(keys.inflight, 0, -1)
    return list(dict.fromkeys(map(name_shown, (*retiring, *ready, *begun))))


def read_groups(client: Client, keys: Keys, jobs: Sequence[str]) -> Iterator[tuple[str, Mapping[bytes, bytes], bytes]]:
    """Yield job, hash and metadata of each existing group. Blocks for a round trip per ``CHUNK`` groups."""
    for start in range(0, len(jobs), CHUNK):
        chunk = jobs[start : start + CHUNK]
        pipe = client.pipeline(transaction=False)
        for job in chunk:
            pipe.hgetall(keys.group(job))
            pipe.get(keys.meta(job))
        answers = iter(pipe.execute(raise_on_error=False))
        for job, raw, meta in zip(chunk, answers, answers, strict=True):
            if isinstance(raw, dict) and raw:
                yield job, raw, meta if isinstance(meta, bytes) else b""


def _last_uses(group: Retired, raw: Mapping[bytes, bytes]) -> Iterator[Use]:
    """Yield the last batch of each subscription: all that a group knows in a run without a history."""
    for name, value in raw.items():
        batch = count_shown(value) if name.startswith(b"b:") else None
        if batch is not None:
            sub = name_shown(name[2:])[:200]
            yield from (Use(group.job, meta.k, sub, batch, version=-1) for meta in group.samples)
