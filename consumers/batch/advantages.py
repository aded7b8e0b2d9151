"""Compute advantages of complete groups from rewards, before the split over ranks (T11)."""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, ProtocolError
from penstock.records.manifest import Row, sample_numbers

Kind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]
KINDS = get_args(Kind)

#: Added to the standard deviation, so that groups with equal rewards have advantage 0.
EPSILON = 1e-6
#: Largest advantage, because batches store float32.
LARGEST = float(np.finfo(np.float32).max)


def row_advantages(
    rows: Sequence[Row],
    rewards: Sequence[float],
    kind: Kind = "grpo",
    weights: Sequence[float] | None = None,
    masked: Sequence[bool] | None = None,
) -> NDArray[np.float64]:
    """Return [N] the advantage of each row of a complete batch, computed by ``group_advantages``.

    A sample of several parts counts once in its group, with the reward of its first row; all its rows get its
    advantage.
    """
    if all(row.begin < 0 for row in rows):
        return group_advantages(rewards, [row.job for row in rows], kind, weights, masked)
    numbers = np.array(sample_numbers(rows))
    _, firsts = np.unique(numbers, return_index=True)
    sums = None if weights is None else np.bincount(numbers, weights).tolist()
    hidden = None if masked is None else (np.bincount(numbers, masked) > 0).tolist()
    found = group_advantages([rewards[i] for i in firsts], [rows[i].job for i in firsts], kind, sums, hidden)
    of_rows: NDArray[np.float64] = found[numbers]
    return of_rows


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    kind: Kind = "grpo",
    weights: Sequence[float] | None = None,
    masked: Sequence[bool] | None = None,
) -> NDArray[np.float64]:
    """Return [N] the advantage of each sample within its group; groups may differ in size.

    With m the mean of the group and n its number of samples, both without masked samples:

    - ``grpo``: (r - m) / (s + 1e-6), s the unbiased standard deviation (Shao et al. 2024, arXiv 2402.03300). GSPO
      (arXiv 2507.18071) and CISPO (arXiv 2506.13585) take the same advantage; they differ in the loss.
    - ``dr_grpo``: r - m (Liu et al. 2025, arXiv 2503.20783)
    - ``rloo``: r minus the mean of the others, (r - m) n / (n - 1) (Ahmadian et al. 2024, arXiv 2402.14740)
    - ``reinforce_pp_baseline``: a = r - m, then (a - M) / (S + 1e-6) with M and S the mean and the standard deviation
      of a over all loss tokens of the batch (Hu et al. 2025, arXiv 2501.03262)

    In a group of one, a is 0 for all kinds, and no deviation is computed. Advantages are finite for finite rewards of
    any size; values beyond the range of float32 are clipped to ``LARGEST``.

    Args:
        weights: loss tokens of each sample of the complete batch, only used by ``reinforce_pp_baseline``; None: equal
        weights. They come from the manifest, so ranks need not communicate.
        masked: samples that never bore loss (``Row.masked``), whose rewards must not be trained on: they have advantage
        0 and do not count in m, s or n, as in the filter ``nonzero_std``. None: no sample is masked.

    Raises:
        ConfigError: the kind is unknown.
        ProtocolError: rewards, groups and weights differ in number, or a reward is not finite.
    """
    if masked is not None and any(masked):
        return _of_unmasked(rewards, groups, kind, weights, masked)
    if kind not in KINDS:
        raise ConfigError(f"unknown advantage {kind!r}: use {', '.join(KINDS[:-1])} or {KINDS[-1]}.")
    if len(rewards) != len(groups):
        raise ProtocolError(f"{len(rewards)} rewards for {len(groups)} group ids.")
    values = np.asarray(rewards, np.float64)
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ProtocolError(f"a sample of group {groups[where]} has reward {values[where]}: rewards must be finite.")
    if not len(values):
        return values
    ids: dict[Hashable, int] = {}
    index = np.array([ids.setdefault(group, len(ids)) for group in groups])
    count = np.bincount(index).astype(np.float64)
    # Scale each group exactly by a power of 2 to at most 1, so that no sum or square overflows.
    largest = np.zeros(len(ids))
    np.maximum.at(largest, index, np.abs(values))
    exponent = np.maximum(np.frexp(largest)[1], 0)
    values = np.ldexp(values, -exponent[index])
    centred: NDArray[np.float64] = values - (np.bincount(index, values) / count)[index]
    # The mean of large rewards is rounded: subtract the error, so that equal rewards have advantage exactly 0.
    centred = centred - (np.bincount(index, centred) / count)[index]
    others = np.maximum(count - 1, 1)
    with np.errstate(over="ignore"):
        if kind == "grpo":
            deviation = np.sqrt(np.bincount(index, centred**2) / others)
            centred = centred / (deviation + np.ldexp(EPSILON, -exponent))[index]
        elif kind == "reinforce_pp_baseline":
            common = exponent.max()
            centred = _whitened(np.ldexp(centred, exponent[index] - common), weights, np.ldexp(EPSILON, -common))
        else:
            factor = count / others if kind == "rloo" else np.ones_like(count)
            centred = np.ldexp(centred * factor[index], exponent[index])
    return centred.clip(-LARGEST, LARGEST)


def _of_unmasked(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    kind: Kind,
    weights: Sequence[float] | None,
    masked: Sequence[bool],
) -> NDArray[np.float64]:
    kept = [index for index, one in enumerate(masked) if not one]
    out = np.zeros(len(rewards))
    out[kept] = group_advantages(
        [rewards[i] for i in kept],
        [groups[i] for i in kept],
        kind,
        None if weights is None else [weights[i] for i in kept],
    )
    return out


def _whitened(values: NDArray[np.float64], weights: Sequence[float] | None, epsilon: float) -> NDArray[np.float64]:
    """Scale to mean 0 and deviation 1 over the batch, counting each value ``weights`` times."""
    counts = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    if len(counts) != len(values):
        raise ProtocolError(f"{len(counts)} weights for {len(values)} rewards.")
    total = counts.sum()
    if not total:
        return np.zeros_like(values)
    mean = (counts * values).sum() / total
    deviation = np.sqrt((counts * (values - mean) ** 2).sum() / total)
    whitened: NDArray[np.float64] = (values - mean) / (deviation + epsilon)
    return whitened
