"""A batch as the train data that slime's trainers take: one dict per data-parallel rank, a list entry per sample.

Keys, their meaning and the tensors' dtypes are slime's (Apache-2.0), with three differences on purpose: rewards are
normalised by group id whatever the sizes of the groups; a side array that only some samples have is an error instead of
being left out or taken from whoever comes first; and ``rollout_mask_sums``, by which slime divides a rollout's sum,
counts the tokens that were generated, as ``aggregation: sample`` does, not those whose loss expiry has left: what is
left of a stale answer weighs no more than it did. It needs no slime, and blocks only for side arrays that lie in keys
of their own.

| key | per sample of this rank | |
|---|---|---|
| ``tokens`` | int64 [L] | prompt and response |
| ``loss_masks`` | int32 [R] | of the response |
| ``rollout_log_probs``, ``teacher_log_probs`` | float32 [R] | of the response |
| ``rollout_routed_experts`` | int32 [L - 1, layers, experts per token] | |
| ``response_lengths``, ``truncated``, ``sample_indices``, ``rollout_ids``, ``partition`` | int | |
| ``oldest_versions``, ``newest_versions`` | int | of the sample's tokens |
| ``rewards`` (normalised), ``temperatures`` | float | |
| ``source_names`` | str | dataset |
| ``rollout_mask_sums`` | one float32 tensor [samples] | tokens generated in the sample's rollout; 1 of a filler |

Of the whole batch, to be indexed by ``partition``: ``raw_reward`` and ``total_lengths``. Of the step:
``global_batch_sizes``, ``num_microbatches`` (one entry each) and ``micro_batch_indices`` (positions in this rank's
lists). Nothing is None, but where a sample has no ``multimodal_train_inputs``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.config.subscription import Split
from penstock.consumers.adapters.converting import Converted, Converter
from penstock.consumers.adapters.rows import RowArrays, rows_of
from penstock.consumers.adapters.slime_columns import (
    METADATA,
    MULTIMODAL,
    RAW_REWARD,
    ROLLOUT_IDS,
    SIDES,
    Columns,
    check_sides,
    checked_columns,
    finite_number,
    images_of,
    rollouts_of,
    sides_of,
    slime_tensor,
)
from penstock.consumers.batch import behaviour
from penstock.consumers.batch.advantages import Kind, group_advantages
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.schedule import Schedule, schedule, split_first
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.records.manifest import Row
from penstock.protocol.records.sample import SampleStatus

#: Estimators whose rewards are normalised by group -> divided by the standard deviation too.
NORMALISED = {"grpo": True, "gspo": True, "cispo": True, "reinforce_plus_plus_baseline": False}

#: Keys that every share has.
_KEYS = {
    "tokens", "response_lengths", "loss_masks", "rollout_log_probs", "rewards", "truncated", "temperatures",
    "oldest_versions", "newest_versions", "source_names", "partition", "sample_indices", "rollout_ids",
    "rollout_mask_sums", "raw_reward", "total_lengths", "global_batch_sizes", "num_microbatches", "micro_batch_indices",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """How a batch becomes train data; see :func:`train_data`."""

    estimator: str = "grpo"
    normalize: bool = True
    std: bool = True
    max_tokens: int | None = None
    max_samples: int | None = None
    #: ``num_microbatches`` is a multiple of it, as virtual pipeline stages want.
    multiple: int = 1
    first_index: int = 0
    columns: Columns | None = None
    temperature: float | None = None
    convert: Converter | None = None


def train_data(batch: Batch, **options: Any) -> dict[str, Any]:
    """This rank's share of a batch as slime's train data; keys, shapes and dtypes at the head of this file.

    A sample whose payload is lost, and what evens out the number of micro-batches, is a filler: a copy of a real row
    with loss mask 0. A rank that has no real row takes one token of prompt and one of response instead; with side
    arrays, which nobody can make up, use :func:`train_shares`.

    Args:
        estimator: ``grpo``, ``gspo`` and ``cispo`` subtract the mean of the group and divide by its unbiased standard
            deviation + 1e-6; ``reinforce_plus_plus_baseline`` subtracts the mean; any other leaves rewards as they
            are. A group of one has reward 0.
        normalize, std: False leaves that part out, as ``--disable-rewards-normalization`` and
            ``--disable-grpo-std-normalization`` do.
        max_tokens, max_samples: limits of a micro-batch; every rank gets equally many of them.
        multiple: the number of micro-batches is a multiple of it.
        first_index: ``sample_indices`` count from here.
        columns: further keys: name -> sample id -> a number or an array of floats, for every sample;
            ``multimodal_train_inputs`` -> dict, for any. ``metadata`` -> dict, for any: slime's ``train_metadata``,
            which slime's own split leaves out, for its metrics cannot read it. ``rollout_ids`` -> int, for every
            sample: samples of one id are one rollout, whose tokens are divided by together. ``raw_reward`` -> a number
            in place of the reward, for any.
        temperature: what the trainer divides logits by, slime's ``--rollout-temperature``; None: whatever the batch
            was drawn at, if that is one number.

    Raises:
        PayloadError: a payload is not what its row says.
        ProtocolError: a sample that bears loss lacks a side array that others have, or it has another length.
        ConfigError: a column has the name of a key that is there already, or no value for a sample; the batch was
            drawn at another temperature, or at several, or its logprobs are from before it (T6).
    """
    maker = _Maker(batch, Options(**options))
    limits = (maker.options.max_tokens, maker.options.max_samples, maker.options.multiple)
    bins = split_first([row.length for row in batch.all_rows], batch.shares, *limits)
    return maker.share(bins[batch.dp_rank])


def train_shares(batch: Batch, dp_size: int, **options: Any) -> list[dict[str, Any]]:
    """The shares of all ranks, of a batch whose payloads are all here (``dp_size`` 1); as :func:`train_data`.

    Side arrays that any sample has are there on every rank, and any real row of the batch may stand as a filler.
    ``convert``, a ``Converter``, is asked of the whole batch.

    Raises:
        HookError: what it gave cannot be taken.
    """
    maker = _Maker(batch, Options(**options))
    shares = [batch.share(rank, dp_size).indices for rank in range(dp_size)]
    return [maker.share(bins) for bins in _micro_batches(batch, shares, maker.options)]


def lineage(batch: Batch, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where each sample of a share comes from: job, k, versions, temperature and kind of its logprobs.

    Beside the train data, not in it: slime takes means of all that it does not know.
    """
    rows = [batch.all_rows[place] for place in data["partition"]]
    return [
        {
            "job": row.job,
            "k": row.k,
            "oldest_version": row.oldest,
            "newest_version": row.newest,
            "train_version": batch.train_version,
            "temperature": row.temperature,
            "logprob_kind": row.logprob_kind,
        }
        for row in rows
    ]


def check_temperature(batch: Batch, temperature: float | None) -> None:
    """Raise ConfigError where not all of a batch was drawn at what slime's trainer divides by; None: at one number."""
    what = f"batch {batch.n} of {batch.manifest.sub}"
    wanted = batch.temperature if temperature is None else temperature
    behaviour.check_temperature(batch.all_rows, wanted, what, "the trainer's --rollout-temperature")


class _Maker:
    """Makes shares of one batch. ``source``: the batch whose payloads are here, all of them or one rank's."""

    def __init__(self, source: Batch, options: Options) -> None:
        check_temperature(source, options.temperature)
        self.options = options
        found: Sequence[RowArrays] = rows_of(source)
        convert, converted = options.convert, Converted()
        sides = sides_of(source, found)
        if convert is not None:
            by_index = sorted(found, key=lambda row: row.index)
            converted = convert(source, by_index, options.first_index, sides)
            masked = {row.index: row for row in converted.rows}
            found = [masked[row.index] for row in found]
        numbers = converted.numbers
        self.rewards = numbers.get("rewards") or _rewards(source.all_rows, options)
        self.raw = numbers.get("raw_reward") or [row.reward for row in source.all_rows]
        truncated = [row.status == SampleStatus.TRUNCATED for row in source.all_rows]
        self.truncated = [int(value) for value in numbers.get("truncated") or truncated]
        self.all_rows = source.all_rows
        self.rows = {row.index: row for row in found}
        check_sides(source, found, sides)
        images = images_of(source, found)
        columns = {**(options.columns or {}), **converted.columns}
        ids = columns.pop(ROLLOUT_IDS, None)
        self.rollout_ids, self.rollout_sums = rollouts_of(source.all_rows, ids, options.first_index)
        own = columns.pop(RAW_REWARD, {})
        self.raw = [
            finite_number(RAW_REWARD, row, own.get(row.sample, raw))
            for row, raw in zip(self.all_rows, self.raw, strict=True)
        ]
        for key in columns.keys() & (_KEYS | sides.keys() | images.keys()):
            raise ConfigError(f"columns[{key!r}]: the train data has a key of that name already.")
        self.columns: dict[str, Mapping[str, Any]] = {**sides, **images, **checked_columns(found, columns)}
        #: Rows that are no fillers, the shortest first.
        self.real = sorted((row for row in found if self._is_real(row)), key=lambda row: len(row.tokens))

    def share(self, bins: Sequence[Sequence[int]]) -> dict[str, Any]:
        """One rank's dict, of its micro-batches, each a list of indices into ``all_rows``; empty ones get fillers."""
        entries = [self._entry(index) for members in bins for index in members]
        indices = self._tile(bins, entries)
        data: dict[str, Any] = {key: [entry[key] for entry in entries] for key in entries[0]}
        data["rollout_mask_sums"] = torch.tensor(data["rollout_mask_sums"], dtype=torch.float32)
        data["raw_reward"] = list(self.raw)
        data["total_lengths"] = [row.length for row in self.all_rows]
        for place, tokens in zip(data["partition"], data["tokens"], strict=True):
            data["total_lengths"][place] = len(tokens)
        data["global_batch_sizes"] = [len(set(self.rollout_ids))]
        data["num_microbatches"] = [len(indices)]
        data["micro_batch_indices"] = indices
        return data

    def _is_real(self, row: RowArrays) -> bool:
        """False where its payload is lost, or it lacks what others have; it bears no loss then."""
        needed = [of for key, of in self.columns.items() if key not in (MULTIMODAL, METADATA)]
        return not row.lost and all(row.row.sample in of for of in needed)

    def _entry(self, index: int) -> dict[str, Any]:
        """What stands for one sample, by key."""
        row = self.rows[index]
        values = self._values(row) if self._is_real(row) else self._stand_in(row.row.length)
        return values | self._identity(index)

    def _values(self, row: RowArrays) -> dict[str, Any]:
        """The arrays of a real row."""
        values: dict[str, Any] = {
            "tokens": slime_tensor("tokens", row.tokens),
            "response_lengths": row.row.length - row.row.prompt_length,
            "loss_masks": slime_tensor("loss_masks", row.response("loss_mask")),
            "rollout_log_probs": slime_tensor("rollout_log_probs", row.response("logprobs")),
            "rollout_mask_sums": self.rollout_sums.get(self.rollout_ids[row.index], row.divisor),
        }
        return values | {key: of.get(row.row.sample) for key, of in self.columns.items()}

    def _identity(self, index: int) -> dict[str, Any]:
        """What a row says whether its payload is here or not."""
        row = self.all_rows[index]
        return {
            "rewards": self.rewards[index],
            "truncated": self.truncated[index],
            "temperatures": row.temperature,
            "oldest_versions": row.oldest,
            "newest_versions": row.newest,
            "source_names": row.job.rsplit("/", 2)[0],
            "partition": index,
            "sample_indices": self.options.first_index + index,
            "rollout_ids": self.rollout_ids[index],
        }

    def _stand_in(self, most: int) -> dict[str, Any]:
        """Arrays for a row without any: those of the longest real row of at most ``most`` tokens, with loss mask 0."""
        if not self.real:
            return self._made_up()
        fits = [row for row in self.real if len(row.tokens) <= most]
        return self._copy(fits[-1] if fits else self.real[0])

    def _filler(self) -> dict[str, Any]:
        """The shortest real row once more, with loss mask 0."""
        if not self.real:
            return self._made_up() | self._identity(0)
        return self._copy(self.real[0]) | self._identity(self.real[0].index)

    def _copy(self, row: RowArrays) -> dict[str, Any]:
        values = self._values(row)
        return values | {"loss_masks": torch.zeros_like(values["loss_masks"]), "rollout_mask_sums": 1}

    def _made_up(self) -> dict[str, Any]:
        """One token of prompt, one of response: there is no real row to copy."""
        named = {SIDES[side[0]] for row in self.all_rows for side in row.sides if side[0] in SIDES}
        if wanted := named | self.columns.keys():
            raise ProtocolError(
                f"There is no real row to copy a filler from, and {', '.join(sorted(wanted))} cannot be made up: make "
                "the shares of all ranks at once, by train_shares."
            )
        return {
            "tokens": slime_tensor("tokens", [0, 0]),
            "response_lengths": 1,
            "loss_masks": slime_tensor("loss_masks", [0]),
            "rollout_log_probs": slime_tensor("rollout_log_probs", [0.0]),
            "rollout_mask_sums": 1,
        }

    def _tile(self, bins: Sequence[Sequence[int]], entries: list[dict[str, Any]]) -> list[list[int]]:
        """Positions of ``entries`` by micro-batch; fillers are appended where one has no sample."""
        indices: list[list[int]] = []
        at = 0
        for members in bins:
            indices.append(list(range(at, at + len(members))))
            at += len(members)
        for place in (i for i, members in enumerate(bins) if not members):
            indices[place] = [len(entries)]
            entries.append(self._filler())
        return indices


def _rewards(rows: Sequence[Row], options: Options) -> list[float]:
    """Normalised reward of every sample of the batch."""
    raw = [row.reward for row in rows]
    if not options.normalize or options.estimator not in NORMALISED:
        return raw
    kind: Kind = "grpo" if NORMALISED[options.estimator] and options.std else "dr_grpo"
    masked = [row.masked for row in rows]
    return [float(value) for value in group_advantages(raw, [row.job for row in rows], kind, masked=masked)]


def _micro_batches(batch: Batch, shares: Sequence[Sequence[int]], options: Options) -> Schedule:
    """The micro-batches of every rank; rows stay with the rank of a batch that is dealt out (``strided``)."""
    lengths = [row.length for row in batch.all_rows]
    make = split_first if batch.manifest.split == Split.STRIDED else schedule
    return make(lengths, shares, options.max_tokens, options.max_samples, options.multiple)
