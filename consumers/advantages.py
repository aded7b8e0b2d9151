"""Advantages of whole groups, from rewards alone, before the split over ranks (T11)."""

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, ProtocolError

Kind = Literal["grpo", "dr_grpo", "rloo"]

#: Added to the standard deviation, so that a group of equal rewards has advantage 0.
EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], kind: Kind = "grpo") -> NDArray[np.float64]:
    """[N] advantage of each sample among the samples of its own group; groups may differ in size.

    With m the mean of the group and n the number of its samples present:

    - ``grpo``: (r - m) / (s + 1e-6), s the unbiased standard deviation (Shao et al. 2024, arXiv 2402.03300)
    - ``dr_grpo``: r - m (Liu et al. 2025, arXiv 2503.20783)
    - ``rloo``: r minus the mean of the others, (r - m) n / (n - 1) (Ahmadian et al. 2024, arXiv 2402.14740)

    A group of one has nothing to compare with: its advantage is 0 in all three.

    Raises:
        ConfigError: the kind is none of the three.
        ProtocolError: rewards and groups differ in number, or a reward is not finite.
    """
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ConfigError(f"advantage {kind!r} is not known: use grpo, dr_grpo or rloo.")
    if len(rewards) != len(groups):
        raise ProtocolError(f"{len(rewards)} rewards for {len(groups)} group ids.")
    values = np.asarray(rewards, np.float64)
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ProtocolError(f"a sample of group {groups[where]} has the reward {values[where]}, not a number (T11).")
    if not len(values):
        return values
    ids: dict[Hashable, int] = {}
    index = np.array([ids.setdefault(group, len(ids)) for group in groups])
    count = np.bincount(index).astype(np.float64)
    centred: NDArray[np.float64] = values - (np.bincount(index, values) / count)[index]
    others = np.maximum(count - 1, 1)
    if kind == "grpo":
        deviation = np.sqrt(np.bincount(index, centred**2) / others)
        centred = centred / (deviation + EPSILON)[index]
    elif kind == "rloo":
        centred = centred * (count / others)[index]
    return centred
