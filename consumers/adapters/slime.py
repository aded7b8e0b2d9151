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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumers.adapters.converting import Converted, Converter
from consumers.adapters.rows import RowArrays, rows_of
from consumers.batch import behaviour
from consumers.batch.advantages import Kind, group_advantages
from consumers.batch.batch import Batch
from penstock.errors import ConfigError, ProtocolError
from penstock.names import IMAGE_GRID, PIXEL_VALUES
from penstock.protocol import partition
from penstock.protocol.records.manifest import Row
from penstock.protocol.records.sample import SampleStatus

#: Estimators whose rewards are normalised by group -> divided by the standard deviation too.
NORMALISED = {"grpo": True, "gspo": True, "cispo": True, "reinforce_plus_plus_baseline": False}

#: Payload side arrays that slime has a key for: name -> key.
SIDES = {"routed_experts": "rollout_routed_experts", "teacher_logprobs": "teacher_log_probs"}

#: dtypes of slime's tensors; experts of uint8 would divide by zero where a model has 256 of them.
DTYPES = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "rollout_routed_experts": torch.int32,
}
#: The one key whose entries may be None, where a sample has no images.
MULTIMODAL = "multimodal_train_inputs"

#: Keys that every share has.
_KEYS = {
    "tokens", "response_lengths", "loss_masks", "rollout_log_probs", "rewards", "truncated", "temperatures",
    "oldest_versions", "newest_versions", "source_names", "partition", "sample_indices", "rollout_ids",
    "rollout_mask_sums", "raw_reward", "total_lengths", "global_batch_sizes", "num_microbatches", "micro_batch_indices",
}  # fmt: skip

#: Key -> sample id -> value.
Columns = Mapping[str, Mapping[str, Any]]


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
            ``multimodal_train_inputs`` -> dict, for any.
        temperature: what the trainer divides logits by, slime's ``--rollout-temperature``; None: whatever the batch
            was drawn at, if that is one number.

    Raises:
        PayloadError: a payload is not what its row says.
        ProtocolError: a sample that bears loss lacks a side array that others have, or it has another length.
        ConfigError: a column has the name of a key that is there already, or no value for a sample; the batch was
            drawn at another temperature, or at several, or its logprobs are from before it (T6).
    """
    return _Maker(batch, Options(**options)).share(batch)


def train_shares(batch: Batch, dp_size: int, **options: Any) -> list[dict[str, Any]]:
    """The shares of all ranks, of a batch whose payloads are all here (``dp_size`` 1); as :func:`train_data`.

    Side arrays that any sample has are there on every rank, and any real row of the batch may stand as a filler.
    ``convert``, a ``Converter``, is asked of the whole batch.

    Raises:
        HookError: what it gave cannot be taken.
    """
    maker = _Maker(batch, Options(**options))
    return [maker.share(batch.share(rank, dp_size)) for rank in range(dp_size)]


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
        sides = _sides(source, found)
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
        _check_sides(source, found, sides)
        images = _images(source, found)
        columns = {**(options.columns or {}), **converted.columns}
        for key in columns.keys() & (_KEYS | sides.keys() | images.keys()):
            raise ConfigError(f"columns[{key!r}]: the train data has a key of that name already.")
        self.columns: dict[str, Mapping[str, Any]] = {**sides, **images, **_checked(found, columns)}
        #: Rows that are no fillers, the shortest first.
        self.real = sorted((row for row in found if self._is_real(row)), key=lambda row: len(row.tokens))

    def share(self, batch: Batch) -> dict[str, Any]:
        """One rank's dict."""
        bins = _micro_batches(batch, [row.length for row in batch.rows], self.options)
        entries = [self._entry(batch.indices[i]) for members in bins for i in members]
        indices = self._tile(bins, entries)
        data: dict[str, Any] = {key: [entry[key] for entry in entries] for key in entries[0]}
        data["rollout_mask_sums"] = torch.tensor(data["rollout_mask_sums"], dtype=torch.float32)
        data["raw_reward"] = list(self.raw)
        data["total_lengths"] = [row.length for row in batch.all_rows]
        for place, tokens in zip(data["partition"], data["tokens"], strict=True):
            data["total_lengths"][place] = len(tokens)
        data["global_batch_sizes"] = [len(batch.all_rows)]
        data["num_microbatches"] = [len(indices)]
        data["micro_batch_indices"] = indices
        return data

    def _is_real(self, row: RowArrays) -> bool:
        """False where its payload is lost, or it lacks what others have; it bears no loss then."""
        return not row.lost and all(row.row.sample in of for key, of in self.columns.items() if key != MULTIMODAL)

    def _entry(self, index: int) -> dict[str, Any]:
        """What stands for one sample, by key."""
        row = self.rows[index]
        values = self._values(row) if self._is_real(row) else self._stand_in(row.row.length)
        return values | self._identity(index)

    def _values(self, row: RowArrays) -> dict[str, Any]:
        """The arrays of a real row."""
        values: dict[str, Any] = {
            "tokens": _tensor("tokens", row.tokens),
            "response_lengths": row.row.length - row.row.prompt_length,
            "loss_masks": _tensor("loss_masks", row.response("loss_mask")),
            "rollout_log_probs": _tensor("rollout_log_probs", row.response("logprobs")),
            "rollout_mask_sums": row.divisor,
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
            "rollout_ids": self.options.first_index + index,
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
            "tokens": _tensor("tokens", [0, 0]),
            "response_lengths": 1,
            "loss_masks": _tensor("loss_masks", [0]),
            "rollout_log_probs": _tensor("rollout_log_probs", [0.0]),
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


def _tensor(key: str, values: Any) -> Tensor:
    """A tensor of its own, of slime's dtype."""
    return torch.tensor(np.asarray(values), dtype=DTYPES[key])


def _sides(batch: Batch, rows: Sequence[RowArrays]) -> dict[str, dict[str, Tensor]]:
    """Key -> sample id -> tensor, of the side arrays that any sample has."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, key in SIDES.items():
        arrays = zip(rows, batch.side(name), strict=True)
        if values := {row.row.sample: _side(key, row, array) for row, array in arrays if array is not None}:
            found[key] = values
    return found


def _images(batch: Batch, rows: Sequence[RowArrays]) -> dict[str, dict[str, dict[str, Tensor]]]:
    """What slime hands to a model beside the tokens, by sample, where the batch has images."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in (PIXEL_VALUES, IMAGE_GRID):
        for row, array in zip(rows, batch.side(name) if batch.has_side(name) else (), strict=False):
            if array is not None:
                found.setdefault(row.row.sample, {})[name] = torch.tensor(array)
    return {MULTIMODAL: found} if found else {}


def _check_sides(batch: Batch, rows: Sequence[RowArrays], sides: Columns) -> None:
    """Raise ProtocolError for a sample that bears loss, and lacks what others have."""
    for name, values in ((name, sides[key]) for name, key in SIDES.items() if key in sides):
        for row in rows:
            if row.row.sample not in values and not row.lost and row.loss_mask.any():
                raise ProtocolError(
                    f"sample {row.row.sample} has no side array {name!r}, and others of batch {batch.n} have: slime "
                    "takes it of every sample or of none. Name it in rollout.sides, so that a sample without it fails."
                )


def _side(key: str, row: RowArrays, array: NDArray[Any] | Sequence[float]) -> Tensor:
    """One sample's side array as slime has it. Raises ProtocolError for one of another length."""
    length, response = row.row.length, row.row.length - row.row.prompt_length
    # Teachers: of the whole sequence, or of the response alone.
    wanted = {length, response} if key == "teacher_log_probs" else {length - 1}
    if len(array) not in wanted:
        raise ProtocolError(
            f"sample {row.row.sample}: {key} has {len(array)} entries for {length} tokens, {response} of them drawn; "
            f"it needs {' or '.join(map(str, sorted(wanted)))}."
        )
    whole = key == "teacher_log_probs" and len(array) == length
    return _tensor(key, array[row.row.prompt_length :] if whole else array)


def _checked(rows: Sequence[RowArrays], columns: Columns) -> dict[str, Mapping[str, Any]]:
    """Columns as slime can take means of them; those that no sample has are left out. Raises ConfigError."""
    found: dict[str, Mapping[str, Any]] = {}
    for key, values in columns.items():
        if not values:
            continue
        if key == MULTIMODAL:
            found[key] = values
            continue
        found[key] = {row.row.sample: _column(key, row, values) for row in rows if not row.lost}
    return found


def _column(key: str, row: RowArrays, values: Mapping[str, Any]) -> Any:
    value = values.get(row.row.sample)
    if value is None:
        raise ConfigError(
            f"columns[{key!r}] has no value for sample {row.row.sample}: slime takes a mean over all, so give one for "
            "every sample, or leave the column out."
        )
    if key in DTYPES and np.ndim(value):
        return _side(key, row, value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return value
    array = np.asarray(value)
    if array.dtype.kind != "f" or not array.ndim:
        raise ConfigError(
            f"columns[{key!r}]: sample {row.row.sample} has a value of {type(value).__name__}; slime takes means, so "
            "give numbers, or arrays of floats."
        )
    return torch.tensor(array, dtype=torch.float32)


def _micro_batches(batch: Batch, lengths: Sequence[int], options: Options) -> list[list[int]]:
    """Positions in the rank's rows by micro-batch, as many on every rank; empty ones where it has too few samples."""
    bins = partition.micro_batches(lengths, options.max_tokens, options.max_samples)
    count = partition.num_micro_batches(batch.all_rows, batch.shares, options.max_tokens, options.max_samples)
    count = -(-count // options.multiple) * options.multiple
    while len(bins) < count:
        longest = max(bins, key=lambda members: (len(members) > 1, sum(lengths[i] for i in members)), default=[])
        if len(longest) < 2:
            break
        bins.remove(longest)
        bins += [longest[::2], longest[1::2]]
    return bins + [[] for _ in range(count - len(bins))]
