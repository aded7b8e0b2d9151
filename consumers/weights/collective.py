"""Broadcast weights in buckets through a process group of the trainer's rank 0 and the engines."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from penstock.config import TrainerConfig
from penstock.consumers.weights.sender import Sender, Transfer, TransferFailed, trainers_device
from penstock.names import new_token

log = logging.getLogger(__name__)

_POLL_S = 0.0005
#: Longest wait for a group to be aborted.
_ABORT_S = 2.0
#: Device in torch's store prefix of a group, by backend.
_DEVICE = {"gloo": "cpu", "nccl": "cuda"}


class SendGroup:
    """Broadcast buckets from rank 0, this process, to engines, the other ranks of a process group. Not thread-safe.

    Workers make their engines join over HTTP (SGLang's ``/init_weights_update_group``), so both sides must use the
    store prefixes that torch gives to a group of this name. The group is not part of ``torch.distributed``'s global
    state: it does not affect the trainer's own groups, and can be discarded when a member is dead.

    Args:
        address: of this machine, at which the engines connect; it listens only there.
        world_size: including this process.
        timeout_s: longest wait in every call.
    """

    def __init__(self, backend: str, address: str, world_size: int, timeout_s: float) -> None:
        self.name = f"penstock-{new_token()[:12]}"
        self.world_size = world_size
        self._backend, self._timeout_s, self._timeout = backend, timeout_s, timedelta(seconds=timeout_s)
        self._group: Any = None
        listener = socket.create_server((address, 0))
        #: Port at which engines connect.
        self.port = int(listener.getsockname()[1])
        self._store: Any = TCPStore(
            address,
            self.port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )

    def connect(self) -> None:
        """Create the group, once, and wait until every engine has joined (gloo; nccl: they join with the first bucket).

        Raises TransferFailed after ``timeout_s``.
        """
        if self._group is None:
            self._in_time(self._make, f"not every engine joined group {self.name}")

    def _make(self) -> None:
        # The same prefixes as torch.distributed's for a group of this name: the caller's, the group's, the device's.
        store: Any = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        store = PrefixStore(f"{_DEVICE[self._backend]}/", store)
        if self._backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, 0, self.world_size, timeout=self._timeout)
            return
        options = dist.ProcessGroupNCCL.Options()
        # Longer than our own timeout, because torch's would kill the process.
        options._timeout = self._timeout + timedelta(hours=1)
        with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
            self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, options)

    def broadcast(self, flat: Tensor) -> None:
        """Send [N] bytes to every member. Blocks until they have them, at most ``timeout_s``; raises TransferFailed."""
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)  # the caller may fill it on another stream

        def send() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.asyncOp = True  # else a broadcast on a GPU is bound to this thread's stream
            work = self._group.broadcast([flat], options)
            while not work.is_completed():
                time.sleep(_POLL_S)
            work.wait()

        self._in_time(send, f"a member of group {self.name} did not take a bucket")

    def _in_time(self, work: Callable[[], None], what: str) -> None:
        """Run a call that may never return in a thread, and abandon the thread: NCCL waits for a dead peer forever."""
        failures: list[str] = []

        def body() -> None:
            try:
                work()
            except Exception as exc:
                failures.append(str(exc).partition("\n")[0][:200])

        thread = threading.Thread(target=body, name=f"transfer-{self.name}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise TransferFailed(f"{what} in {self._timeout_s:g} s")
        if failures:
            raise TransferFailed(f"{what} ({failures[0]})")

    def close(self) -> None:
        """Abort the group without waiting for members; those that wait in it get an error."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            thread = threading.Thread(target=_abort, args=(group,), name=f"abort-{self.name}", daemon=True)
            del group
            thread.start()
            thread.join(_ABORT_S)


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as exc:
        log.debug("a group was not aborted: %s", exc)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables that torch reads while a group is created."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Gloo(Sender):
    """Send from CPU to CPU, over the network.

    One group is used until a member joins, leaves or restarts its engine.
    """

    backend: ClassVar[str] = "gloo"

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config)
        self._group: SendGroup | None = None
        #: Workers of the group -> first rank.
        self._ranks: dict[str, int] = {}

    @property
    def device(self) -> torch.device:
        """Return the device that buckets are sent from."""
        return torch.device("cpu")

    def send(self, transfer: Transfer) -> None:
        group, address = self._group_of(transfer), self.config.transfer_address
        transfer.decide(self._ranks, group=group.name, address=address, port=group.port, world_size=group.world_size)
        group.connect()
        for bucket in transfer.buckets():
            parts = [tensor.detach().to(self.device).contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket]
            group.broadcast(torch.cat(parts))

    def _group_of(self, transfer: Transfer) -> SendGroup:
        """Return the existing group, or a new one that its members have yet to join."""
        group, workers = self._group, transfer.workers
        is_same = group is not None and self._ranks.keys() == workers.keys()
        if group is not None and is_same and all(one.group == group.name for one in workers.values()):
            return group
        self.abandon()
        self._ranks, world_size = {}, 1
        for worker, one in sorted(workers.items()):
            self._ranks[worker], world_size = world_size, world_size + one.num_ranks
        self._group = SendGroup(self.backend, self.config.transfer_address, world_size, transfer.timeout_s)
        return self._group

    def abandon(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class Nccl(Gloo):
    """Send from GPU to GPU, on one or several machines."""

    backend = "nccl"

    @classmethod
    def set_up(cls) -> None:
        """Give NCCL the same settings at both ends of a group, unless they are set already.

        SGLang disables cuMem in its servers, and a group whose ends differ in it is never established. NCCL reads the
        setting once per process, before the first group on a GPU is created.
        """
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")

    @property
    def device(self) -> torch.device:
        return trainers_device(self.config)
