"""Weights by a process group of the trainer's rank 0 and the engines: buckets are broadcast."""

import os
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.consumers.weights.transfer import Bucket, Transfer
from penstock.consumers.weights.transports.device import trainers_device
from penstock.consumers.weights.transports.send_group import SendGroup
from penstock.consumers.weights.transports.sender import Sender
from penstock.system.tokens import new_token


class Collective(Sender):
    """One group, which is made anew when a member joins, leaves or starts its engine again."""

    backend: ClassVar[str]

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config)
        self._group: SendGroup | None = None
        #: Workers of the group -> first rank.
        self._ranks: dict[str, int] = {}

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device that buckets are sent from."""

    def send(self, transfer: Transfer) -> None:
        group = self._group_of(transfer)
        transfer.decide(
            self._ranks,
            group=group.name,
            address=self.config.transfer_address,
            port=group.port,
            world_size=group.world_size,
        )
        if not group.is_connected:
            group.connect()
        for bucket in transfer.buckets():
            group.broadcast(flatten(bucket, self.device))

    def _group_of(self, transfer: Transfer) -> SendGroup:
        """Return the existing group, or a new one that its members have yet to join."""
        group, workers = self._group, transfer.workers
        stays = group is not None and self._ranks.keys() == workers.keys()
        if group is not None and stays and all(one.group == group.name for one in workers.values()):
            return group
        self.abandon()
        self._ranks = {}
        world = 1
        for worker, one in sorted(workers.items()):
            self._ranks[worker] = world
            world += one.num_ranks
        name = f"penstock-{new_token()[:12]}"
        self._group = SendGroup(name, self.backend, self.config.transfer_address, world, transfer.timeout_s)
        return self._group

    def abandon(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class Gloo(Collective):
    """On CPUs, over the network."""

    backend = "gloo"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class Nccl(Collective):
    """GPU to GPU, on one machine or several."""

    backend = "nccl"

    @classmethod
    def set_up(cls) -> None:
        """Give NCCL the same settings at both ends of a group, unless they are set already.

        SGLang turns cuMem off in its servers, and a group whose ends differ in it never comes to be. NCCL reads it once
        in a process: before the first group on a GPU is made.
        """
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")

    @property
    def device(self) -> torch.device:
        return trainers_device(self.config)


def flatten(bucket: Bucket, device: torch.device) -> Tensor:
    """[N] the bytes of a bucket's tensors, one behind the other, on ``device``."""
    parts: list[Tensor] = [
        tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket
    ]
    return torch.cat(parts)
