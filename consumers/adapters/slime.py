"""Convert a batch to the train data of slime's trainers: one dict per data-parallel rank, a list entry per sample.

Keys, their meaning and the tensors' dtypes are slime's (Apache-2.0), with three differences on purpose: rewards are
normalised by group id whatever the sizes of the groups; a side array that only some samples have is an error instead of
being dropped or taken from the first sample; and ``rollout_mask_sums``, the divisor of a rollout's sum, counts
generated tokens, as ``aggregation: sample`` does, not those that still bear loss after expiry: the rest of a stale
answer does not gain weight. slime need not be installed. Blocks only for side arrays stored under keys of their own.

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

For the complete batch, indexed by ``partition``: ``raw_reward`` and ``total_lengths``. For the step:
``global_batch_sizes``, ``num_microbatches`` (one entry each) and ``micro_batch_indices`` (positions in this rank's
lists). Only ``multimodal_train_inputs`` may be None, for a sample without any.
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
from penstock.consumers.batch.advantages import Kind, row_advantages
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.schedule import Schedule, schedule, split_first
from penstock.errors import ConfigError, ProtocolError
from penstock.records.manifest import Row
from penstock.records.sample import SampleStatus

#: Estimators whose rewards are normalised by group -> whether they are also divided by the standard deviation.
NORMALISED = {"grpo": True, "gspo": True, "cispo": True, "reinforce_plus_plus_baseline": False}

#: Keys that every share has.
_KEYS = {
    "tokens", "response_lengths", "loss_masks", "rollout_log_probs", "rewards", "truncated", "temperatures",
    "oldest_versions", "newest_versions", "source_names", "partition", "sample_indices", "rollout_ids",
    "rollout_mask_sums", "raw_reward", "total_lengths", "global_batch_sizes", "num_microbatches", "micro_batch_indices",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the conversion, see :func:`train_data`."""

    estimator: str = "grpo"
    normalize: bool = True
    std: bool = True
    max_tokens: int | None = None
    max_samples: int | None = None
    #: ``num_microbatches`` is a multiple of this, as virtual pipeline stages require.
    multiple: int = 1
    first_index: int = 0
    columns: Columns | None = None
    temperature: float | None = None
    convert: Converter | None = None


def train_data(batch: Batch, **options: Any) -> dict[str, Any]:
    """Return this rank's share of a batch as slime's train data; the module docstring lists keys, shapes and dtypes.

    A filler, a copy of a real row with loss mask 0, replaces a sample whose payload is lost and evens out the number of
    micro-batches. A rank without real rows gets one prompt token and one response token instead; if there have to be
    side arrays, which cannot be invented, use :func:`train_shares`.

    Args:
        estimator: ``grpo``, ``gspo`` and ``cispo`` subtract the mean of the group and divide by its unbiased standard
            deviation + 1e-6; ``reinforce_plus_plus_baseline`` subtracts the mean; any other leaves rewards as they
            are. A group of one has reward 0.
        normalize, std: False disables that part, as ``--disable-rewards-normalization`` and
            ``--disable-grpo-std-normalization`` do.
        max_tokens, max_samples: limits of a micro-batch; every rank gets the same number of micro-batches.
        multiple: the number of micro-batches is a multiple of it.
        first_index: number of the first sample in ``sample_indices``.
        columns: further keys: name -> sample id -> a number or an array of floats, for every sample;
            ``multimodal_train_inputs`` -> dict, for any. ``metadata`` -> dict, for any: slime's ``train_metadata``,
            which slime's own split omits, because its metrics cannot read it. ``rollout_ids`` -> int, for every
            sample: samples of one id are one rollout with a common divisor. ``raw_reward`` -> a number that replaces
            the reward, for any.
        temperature: temperature by which the trainer divides logits, slime's ``--rollout-temperature``; None: the
            temperature of the batch, if it has a single one.

    Raises:
        PayloadError: a payload does not match its row.
        ProtocolError: a sample that bears loss lacks a side array that others have, or its length is wrong.
        ConfigError: a column has the name of an existing key, or no value for a sample; the batch was sampled at
            another temperature, or at several, or its logprobs are from before it was applied (T6).
    """
    maker = _Maker(batch, Options(**options))
    limits = (maker.options.max_tokens, maker.options.max_samples, maker.options.multiple)
    bins = split_first([row.length for row in batch.all_rows], batch.shares, *limits)
    return maker.share(bins[batch.dp_rank])


def train_shares(batch: Batch, dp_size: int, **options: Any) -> list[dict[str, Any]]:
    """Return the shares of all ranks of a batch with all payloads (``dp_size`` 1); options of :func:`train_data`.

    Every rank gets the side arrays that any sample has, and any real row of the batch may be copied as a filler.
    ``convert``, a ``Converter``, is called once with the complete batch.

    Raises:
        HookError: its result is invalid.
    """
    maker = _Maker(batch, Options(**options))
    shares = [batch.share(rank, dp_size).indices for rank in range(dp_size)]
    return [maker.share(bins) for bins in _micro_batches(batch, shares, maker.options)]


def lineage(batch: Batch, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the origin of each sample of a share: job, k, versions, temperature and kind of its logprobs.

    Kept apart from the train data, because slime averages every key that it does not know.
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
    """Raise ConfigError unless a batch was sampled at the trainer's temperature; None: at any single one."""
    what = f"batch {batch.n} of {batch.manifest.sub}"
    wanted = batch.temperature if temperature is None else temperature
    behaviour.check_temperature(batch.all_rows, wanted, what, "the trainer's --rollout-temperature")


class _Maker:
    """Makes shares of one batch. ``source``: the batch with payloads, of all ranks or of one."""

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
        #: Rows that are not fillers, shortest first.
        self.real = sorted((row for row in found if self._is_real(row)), key=lambda row: len(row.tokens))

    def share(self, bins: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return one rank's dict for its micro-batches, lists of indices into ``all_rows``; empty ones get fillers."""
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
        """Return False if a payload or side array is missing; the sample bears no loss then."""
        needed = [of for key, of in self.columns.items() if key not in (MULTIMODAL, METADATA)]
        return not row.lost and all(row.row.sample in of for of in needed)

    def _entry(self, index: int) -> dict[str, Any]:
        """Return one sample's entry, by key: its arrays or a filler's."""
        row = self.rows[index]
        values = self._values(row) if self._is_real(row) else self._stand_in(row.row.length)
        return values | self._identity(index)

    def _values(self, row: RowArrays) -> dict[str, Any]:
        """Return the arrays of a real row."""
        values: dict[str, Any] = {
            "tokens": slime_tensor("tokens", row.tokens),
            "response_lengths": row.row.length - row.row.prompt_length,
            "loss_masks": slime_tensor("loss_masks", row.response("loss_mask")),
            "rollout_log_probs": slime_tensor("rollout_log_probs", row.response("logprobs")),
            "rollout_mask_sums": self.rollout_sums.get(self.rollout_ids[row.index], row.divisor),
        }
        return values | {key: of.get(row.row.sample) for key, of in self.columns.items()}

    def _identity(self, index: int) -> dict[str, Any]:
        """Return the values that a row has with or without a payload."""
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
        """Copy the longest real row of at most ``most`` tokens, with loss mask 0, for a row without arrays."""
        if not self.real:
            return self._made_up()
        fits = [row for row in self.real if len(row.tokens) <= most]
        return self._copy(fits[-1] if fits else self.real[0])

    def _filler(self) -> dict[str, Any]:
        """Copy the shortest real row, with loss mask 0."""
        if not self.real:
            return self._made_up() | self._identity(0)
        return self._copy(self.real[0]) | self._identity(self.real[0].index)

    def _copy(self, row: RowArrays) -> dict[str, Any]:
        values = self._values(row)
        return values | {"loss_masks": torch.zeros_like(values["loss_masks"]), "rollout_mask_sums": 1}

    def _made_up(self) -> dict[str, Any]:
        """Return one prompt token and one response token, for ranks without a real row to copy."""
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
        """Return positions of ``entries`` by micro-batch; append fillers to micro-batches without samples."""
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
    """Return the normalised reward of every sample of the batch."""
    raw = [row.reward for row in rows]
    if not options.normalize or options.estimator not in NORMALISED:
        return raw
    kind: Kind = "grpo" if NORMALISED[options.estimator] and options.std else "dr_grpo"
    return [float(value) for value in row_advantages(rows, raw, kind, masked=[row.masked for row in rows])]


def _micro_batches(batch: Batch, shares: Sequence[Sequence[int]], options: Options) -> Schedule:
    """Return the micro-batches of every rank; rows stay on their rank if the batch is dealt out (``strided``)."""
    lengths = [row.length for row in batch.all_rows]
    make = split_first if batch.manifest.split == Split.STRIDED else schedule
    return make(lengths, shares, options.max_tokens, options.max_samples, options.multiple)
