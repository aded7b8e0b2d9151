"""Share memory with processes that the trainer starts, for copies that they load (copies.py).

    trainer    memory file, mapped ─> piece ─> piece ─> ... ─> data put behind them
    process    the same file, inherited and mapped read-only

The file has no name: no other process can open it, the size of /dev/shm does not limit it, and it is freed with the
last process that has it open.
"""

import logging
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

#: Pinned for all GPUs (cudaHostRegisterPortable).
_PORTABLE = 1


class SharedMemory:
    """Allocate shared memory for one copy, up to the memory of the machine. Not thread-safe."""

    def __init__(self) -> None:
        #: Descriptor of the memory file.
        self.fd = os.memfd_create("penstock-weights")
        pinned: list[int] = []
        self._pinned = pinned
        self._end = weakref.finalize(self, _end, self.fd, pinned)
        self._end.atexit = False  # freed with the process
        # Only pieces are allocated, so one mapping can span all memory, and offsets equal those in the file.
        self._bound = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        os.ftruncate(self.fd, self._bound)
        self._mapped = mmap.mmap(self.fd, self._bound)
        self._start = torch.frombuffer(self._mapped, dtype=torch.uint8, count=1).data_ptr()
        self._filled = 0

    def piece(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """Allocate [num_bytes] of memory, which is not freed before the end: each version has the same tensors.

        Args:
            is_pinned: pin it if possible.

        Raises:
            OSError: out of memory.
        """
        at, room = self._filled, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Allocate now: a write without memory would kill the process.
        self._allocate(at, room)
        self._filled += room
        piece = torch.frombuffer(self._mapped, dtype=torch.uint8, count=num_bytes, offset=at)
        if is_pinned:
            self._pin(piece)
        return piece

    def offset_of(self, tensor: Tensor) -> int:
        """Return the offset of a tensor in the file."""
        return tensor.data_ptr() - self._start if tensor.nbytes else 0

    def put(self, data: bytes) -> int:
        """Write ``data`` behind all pieces, valid until the next call; return its offset. Raises OSError."""
        self._allocate(self._filled, len(data))
        self._mapped[self._filled : self._filled + len(data)] = data
        return self._filled

    def close(self) -> None:
        """Unpin the memory and forbid new mappings. Tensors that are in use stay valid."""
        self._end()

    def _allocate(self, at: int, num_bytes: int) -> None:
        if at + num_bytes > self._bound:
            raise OSError(f"{at + num_bytes} bytes are more than the memory of this machine, {self._bound}")
        os.posix_fallocate(self.fd, at, num_bytes)

    def _pin(self, piece: Tensor) -> None:
        error = int(_cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, _PORTABLE))
        if error:
            log.warning("copies of weights use pageable memory, which is slower: CUDA error %d", error)
        else:
            self._pinned.append(piece.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _end(fd: int, pinned: list[int]) -> None:
    os.close(fd)
    for address in pinned:
        error = int(_cudart().cudaHostUnregister(address))
        if error:
            log.warning("memory of a copy of weights is still pinned: CUDA error %d", error)
