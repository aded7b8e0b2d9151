"""A parameter server, and what an engine process does at its socket."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed as dist
import zmq
from safetensors.torch import load_file

#: Environment: start of a FIFO's name, which goes on with the rank: where it is there, a checkpoint waits for its end.
HOLD = "STAND_IN_HOLD"


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What the real one copies into pinned memory."""
    return tensor.view(-1).view(dtype=torch.uint8).numpy().tobytes()


class ParameterServer:
    def __init__(self, *, auto_pg: bool) -> None:
        assert not auto_pg
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        self._context = zmq.Context()
        self._zmq_addr_counter = 0
        self._held: dict[str, dict[str, bytes]] = {}
        self._pool_sizes: list[int] = []
        self._every: list[Any] = []

    def init_process_group(self) -> None:
        port = int(os.environ["MASTER_PORT"]) + 1
        store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], port, self.size, is_master=self.rank == 0
        )
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def register_checkpoint(
        self,
        name: str,
        *,
        files: list[str] | None = None,
        named_tensors: dict[str, torch.Tensor] | None = None,
        use_shared_memory_pool: bool = False,
        use_inplace_pin_memory: bool = True,
    ) -> None:
        assert not (use_shared_memory_pool and self._held), "the pool is in use"
        hold = Path(f"{os.environ.get(HOLD)}.{self.rank}")
        if hold.exists():
            hold.read_bytes()
        tensors = {key: tensor for file in files or [] for key, tensor in load_file(file).items()}
        tensors |= named_tensors or {}
        self._held[name] = {key: bytes_of(tensor) for key, tensor in tensors.items()}
        sizes = [len(data) for _, data in sorted(self._held[name].items())]
        assert not (use_shared_memory_pool and self._pool_sizes) or sizes == self._pool_sizes, "the pool is of others"
        self._pool_sizes = sizes
        if use_inplace_pin_memory and not use_shared_memory_pool:
            for file in files or []:
                os.remove(file)

    def unregister_checkpoint(self, name: str) -> None:
        self._held.pop(name, None)

    def gather_metas(self, name: str) -> None:
        self._every = [None] * self.size
        dist.all_gather_object(self._every, (self.gpu, self._zmq_addr_counter, self._held.get(name, {})))

    def update(self, name: str, req_func: Callable[[list[tuple[str, str]]], None]) -> None:
        number = max(counter for _, counter, _ in self._every)
        where = {gpu: f"ipc://@checkpoint-engine-{gpu}-{number}.sock" for gpu, _, _ in self._every}
        peer = self._context.socket(zmq.REQ)
        peer.bind(where[self.gpu])
        self._zmq_addr_counter = number + 1
        asking = threading.Thread(target=req_func, args=(list(where.items()),))
        asking.start()
        peer.send_pyobj(("memory", ()))
        for _, _, tensors in self._every:
            answer = peer.recv()
            dist.barrier()
            assert answer == b"", answer
            peer.send_pyobj(list(tensors.items()))
        for _ in range(2):
            peer.recv()
            peer.send_pyobj(None)
        peer.recv()
        asking.join()
        dist.barrier()
        peer.close()


def receive(where: str) -> dict[str, bytes]:
    """What an engine process does: take everything from the server at ``where``. Raises what the server says."""
    got: dict[str, bytes] = {}
    with zmq.Context() as context, context.socket(zmq.REP) as peer:
        peer.rcvtimeo = 60_000  # the real one waits for ever
        peer.connect(where)
        first = peer.recv_pyobj()
        if not isinstance(first, tuple):
            peer.send_string(f"no memory: {first!r}")
            peer.recv()
            raise RuntimeError(f"no memory: {first!r}")
        peer.send(b"")
        released = False
        while True:
            said = peer.recv_pyobj()
            if isinstance(said, Exception):
                raise said
            if said is not None:
                got |= said
            peer.send(b"")
            if said is None and released:
                return got
            released = said is None
