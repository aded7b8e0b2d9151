"""A batch as the train data that slime's trainers take: one dict per data-parallel rank, a list entry per sample.

Keys and their meaning are slime's (``slime/ray/rollout.py``, Apache-2.0), with two differences on purpose: rewards are
normalised by group id whatever the sizes of the groups, and a key that only some samples have is there for all of
them (None where a sample has none), not only if the first one has it. It needs no slime, and blocks only for side
arrays that lie in keys of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from consumers import behaviour
from consumers.adapters.rows import RowArrays, rows_of
from consumers.advantages import Kind, group_advantages
from consumers.batch import Batch
from penstock import partition
from penstock.errors import ConfigError
from penstock.messages import Row

#: Estimators whose rewards are normalised by group -> divided by the standard deviation too.
NORMALISED = {"grpo": True, "gspo": True, "cispo": True, "reinforce_plus_plus_baseline": False}

#: Payload side arrays that slime has a key for: name -> key.
SIDES = {"routed_experts": "rollout_routed_experts", "teacher_logprobs": "teacher_log_probs"}

#: A row that nobody drew and nothing trains: one token of prompt, one of response.
_FILLER: dict[str, Any] = {
    "tokens": [0, 0],
    "response_lengths": 1,
    "rewards": 0.0,
    "truncated": 0,
    "loss_masks": [0],
    "rollout_log_probs": [0.0],
    "temperatures": 1.0,
    "source_names": "",
    "metadata": None,
}


def train_data(
    batch: Batch,
    *,
    estimator: str = "grpo",
    normalize: bool = True,
    std: bool = True,
    max_tokens: int | None = None,
    max_samples: int | None = None,
    first_index: int = 0,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    temperature: float | None = None,
) -> dict[str, Any]:
    """This rank's share of a batch as slime's train data.

    Args:
        estimator: ``grpo``, ``gspo`` and ``cispo`` subtract the mean of the group and divide by its unbiased standard
            deviation + 1e-6; ``reinforce_plus_plus_baseline`` subtracts the mean; any other leaves rewards as they
            are. A group of one has reward 0.
        normalize, std: False leaves that part out, as ``--disable-rewards-normalization`` and
            ``--disable-grpo-std-normalization`` do.
        max_tokens, max_samples: limits of a micro-batch; every rank gets equally many of them.
        first_index: ``sample_indices`` count from here.
        columns: further keys: name -> sample id -> value.
        temperature: what the trainer divides logits by, slime's ``--rollout-temperature``; None: whatever the batch
            was drawn at, if that is one number.

    Returns:
        Per sample of this rank, ordered by micro-batch: ``tokens`` (prompt and response), ``response_lengths``,
        ``rewards`` (normalised), ``truncated`` (0 or 1), ``loss_masks`` and ``rollout_log_probs`` (of the response),
        ``sample_indices``, ``rollout_ids`` (each sample is a rollout of its own), ``source_names`` (dataset),
        ``metadata`` (job, k, version range, train version), the side arrays and ``columns`` that any sample has, and
        ``partition`` (index into the whole batch).
        Of the whole batch: ``raw_reward`` and ``total_lengths``, to be indexed by ``partition``.
        Of the step: ``global_batch_sizes``, ``num_microbatches`` (one entry each) and ``micro_batch_indices``
        (positions in the lists of this rank).
        A sample whose payload is lost, and what evens out the number of micro-batches, is a row of two tokens with
        loss mask 0; the latter has a ``partition`` behind the batch.

    Raises:
        PayloadError: a payload is not what its row says.
        ConfigError: a column has the name of a key that is there already; the batch was drawn at another temperature,
            or at several, or its logprobs are from before it (T6).
    """
    check_temperature(batch, temperature)
    rows = rows_of(batch)
    rewards = _rewards(batch.all_rows, estimator, normalize, std)
    bins = _micro_batches(batch, rows, max_tokens, max_samples)
    order = [i for members in bins for i in members]
    entries = [_entry(batch, rows[i], rewards, first_index) for i in order]
    _add_optional(entries, [rows[i].row.sample for i in order], _optional(batch, columns or {}))
    indices = _tile(bins, entries, len(batch.all_rows), first_index)
    keys = list(dict.fromkeys(key for entry in entries for key in entry))
    data: dict[str, Any] = {key: [entry.get(key) for entry in entries] for key in keys}
    fillers = sum(1 for place in data["partition"] if place >= len(batch.all_rows))
    data["raw_reward"] = [row.reward for row in batch.all_rows]
    data["total_lengths"] = [len(_FILLER["tokens"]) if row.lost else row.length for row in batch.all_rows]
    for row in rows:
        if row.lost:
            data["total_lengths"][row.index] = len(_FILLER["tokens"])
    data["total_lengths"] += [len(_FILLER["tokens"])] * fillers
    data["global_batch_sizes"] = [len(batch.all_rows)]
    data["num_microbatches"] = [len(indices)]
    data["micro_batch_indices"] = indices
    return data


def check_temperature(batch: Batch, temperature: float | None) -> None:
    """Raise ConfigError where not all of a batch was drawn at what slime's trainer divides by; None: at one number."""
    what = f"batch {batch.n} of {batch.manifest.sub}"
    wanted = batch.temperature if temperature is None else temperature
    behaviour.check_temperature(batch.all_rows, wanted, what, "the trainer's --rollout-temperature")


def _rewards(rows: Sequence[Row], estimator: str, normalize: bool, std: bool) -> list[float]:
    """Normalised reward of every sample of the batch."""
    raw = [row.reward for row in rows]
    if not normalize or estimator not in NORMALISED:
        return raw
    kind: Kind = "grpo" if NORMALISED[estimator] and std else "dr_grpo"
    return [float(value) for value in group_advantages(raw, [row.job for row in rows], kind)]


def _entry(batch: Batch, row: RowArrays, rewards: Sequence[float], first_index: int) -> dict[str, Any]:
    """What stands for one sample, by key."""
    identity = {
        "partition": row.index,
        "sample_indices": first_index + row.index,
        "rollout_ids": first_index + row.index,
    }
    lineage = {
        "job": row.row.job,
        "k": row.row.k,
        "oldest_version": row.row.oldest,
        "newest_version": row.row.newest,
        "train_version": batch.train_version,
    }
    common = {
        "rewards": rewards[row.index],
        "truncated": int(row.row.status == "truncated"),
        "temperatures": row.row.temperature,
        "source_names": row.row.job.rsplit("/", 2)[0],
        "metadata": lineage,
    }
    if row.lost:
        return _FILLER | common | identity
    return {
        "tokens": row.tokens.tolist(),
        "response_lengths": row.row.length - row.row.prompt_length,
        "loss_masks": row.response("loss_mask").astype("int64").tolist(),
        "rollout_log_probs": row.response("logprobs").tolist(),
        **common,
        **identity,
    }


def _optional(batch: Batch, columns: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Key -> sample id -> value, of what any sample has."""
    sides = {
        key: {row.sample: value for row, value in zip(batch.rows, batch.side(name), strict=True) if value is not None}
        for name, key in SIDES.items()
    }
    return {key: values for key, values in (sides | dict(columns)).items() if values}


def _add_optional(
    entries: Sequence[dict[str, Any]], samples: Sequence[str], optional: Mapping[str, Mapping[str, Any]]
) -> None:
    for key, values in optional.items():
        if entries and key in entries[0]:
            raise ConfigError(f"columns[{key!r}]: the train data has a key of that name already.")
        for entry, sample in zip(entries, samples, strict=True):
            entry[key] = values.get(sample)


def _micro_batches(
    batch: Batch, rows: Sequence[RowArrays], max_tokens: int | None, max_samples: int | None
) -> list[list[int]]:
    """Positions in ``rows`` by micro-batch, as many on every rank; empty ones where a rank has too few samples."""
    lengths = [row.row.length for row in rows]
    bins = partition.micro_batches(lengths, max_tokens, max_samples)
    shares = partition.split(batch.all_rows, batch.dp_size, batch.manifest.seed, batch.manifest.split)
    count = partition.num_micro_batches(batch.all_rows, shares, max_tokens, max_samples)
    while len(bins) < count:
        longest = max(bins, key=lambda members: (len(members) > 1, sum(lengths[i] for i in members)), default=[])
        if len(longest) < 2:
            break
        bins.remove(longest)
        bins += [longest[::2], longest[1::2]]
    return bins + [[] for _ in range(count - len(bins))]


def _tile(
    bins: Sequence[Sequence[int]], entries: list[dict[str, Any]], num_rows: int, first_index: int
) -> list[list[int]]:
    """Positions of ``entries`` by micro-batch; fillers are appended where one has no sample."""
    indices: list[list[int]] = []
    at = 0
    for members in bins:
        indices.append(list(range(at, at + len(members))))
        at += len(members)
    for place in (i for i, members in enumerate(bins) if not members):
        index = num_rows + len(entries) - at
        indices[place] = [len(entries)]
        entries.append(_FILLER | {"partition": index, "sample_indices": first_index + index, "rollout_ids": -1})
    return indices
