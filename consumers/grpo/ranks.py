"""Provide collective operations of the reference trainer's data-parallel ranks; a single rank never blocks."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PenstockError

log = logging.getLogger(__name__)

Made = TypeVar("Made")


class Ranks:
    """Exchange data in one process group. With several ranks, every method blocks until all have called it.

    Args:
        size: number of ranks; more than 1 needs torch.distributed to be initialised.
        group: process group; None: the default group.
        device: device of the exchanged tensors.
    """

    def __init__(self, size: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.size = size
        self._group = group
        self.device = device

    def add_up(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over all ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank."""
        if self.size == 1:
            return flag
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def all_or_none(self, make: Callable[[], Made], what: str) -> Made:
        """Return the result of ``make`` if it succeeds on every rank; otherwise raise on all ranks.

        Args:
            what: description of the data for messages.

        Raises:
            PenstockError: ``make`` raised on another rank only.
            Exception: error of ``make`` on this rank.
        """
        try:
            made = make()
        except Exception as exc:
            if self.size > 1:
                # Log before another rank exits, which may end this one.
                log.error("%s cannot be trained: %s", what, exc)
            self.any(True)
            raise
        if self.any(False):
            raise PenstockError(
                f"Another rank could not take its share of {what}, so none trains it: the log of that rank says why."
            )
        return made
