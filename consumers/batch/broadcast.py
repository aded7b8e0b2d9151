"""Let one replica read the payloads and broadcast them to the others of its share: tensor, pipeline, context (T14).

Every replica has read the manifest by itself before, and they synchronize outside the collective: no rank waits for
data inside one. ``torch.distributed`` carries bytes only, never objects.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.consumers.batch.fetch import Bytes
from penstock.errors import ConfigError, PayloadError
from penstock.records.manifest import Row

#: Bytes of one broadcast.
CHUNK_BYTES = 256 * 1024 * 1024
_GONE, _FAILED = -1, -2

Read = Callable[[Sequence[Row]], dict[str, Bytes | None]]


def check_group(group: Any, replica: int, num_replicas: int) -> None:
    """Raise ConfigError if ``group`` is not that of the replicas, in their order, or carries no host memory."""
    if dist.get_world_size(group) != num_replicas or dist.get_rank(group) != replica:
        raise ConfigError(
            f"replica_group has {dist.get_world_size(group)} ranks and this is number {dist.get_rank(group)} of them, "
            f"but this is replica {replica} of {num_replicas}: give the group of the replicas of one dp_rank, in order."
        )
    if "gloo" not in str(dist.get_backend(group)):
        raise ConfigError(
            f"replica_group uses {dist.get_backend(group)}, which carries no host memory: make it with "
            "torch.distributed.new_group(ranks, backend='gloo')."
        )


def share(group: Any, rows: Sequence[Row], read: Read) -> dict[str, Bytes | None]:
    """Return payloads of ``rows``, one for each sample, by its id on every replica; only the first calls ``read``.

    Collective, blocks.

    Raises:
        PayloadError: the reading replica could not read; its own error says why.
    """
    first = dist.get_global_rank(group, 0)
    sizes = torch.full((len(rows) + 1,), _FAILED, dtype=torch.int64)
    if dist.get_rank(group) == 0:
        try:
            found = read(rows)
            sizes[0] = 0
            for i, row in enumerate(rows):
                data = found[row.payload_id]
                sizes[i + 1] = _GONE if data is None else len(data)
        finally:
            dist.broadcast(sizes, first, group=group)
        joined = b"".join(data for row in rows if (data := found[row.payload_id]) is not None)
        _broadcast(torch.from_numpy(np.frombuffer(bytearray(joined), np.uint8)), first, group)
        return found
    dist.broadcast(sizes, first, group=group)
    counts = sizes.tolist()
    if counts[0] == _FAILED:
        raise PayloadError("The replica that reads payloads could not; its own log says why. Stop all replicas.")
    whole = torch.empty(sum(max(count, 0) for count in counts[1:]), dtype=torch.uint8)
    _broadcast(whole, first, group)
    view, at = memoryview(whole.numpy().data), 0
    out: dict[str, Bytes | None] = {}
    for row, count in zip(rows, counts[1:], strict=True):
        out[row.payload_id] = None if count == _GONE else view[at : at + count]
        at += max(count, 0)
    return out


def _broadcast(data: torch.Tensor, first: int, group: Any) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        dist.broadcast(data[start : start + CHUNK_BYTES], first, group=group)
