"""Memory that processes which the trainer starts can read: copies are made in it that they are to load (copies.py).

    trainer    a file of memory, mapped ─> piece ─> piece ─> ... ─> what was put behind them
    process    the same file, inherited, mapped to be read

The file has no name: nobody else finds it, the size of /dev/shm does not bound it, and it is gone with the last process
that has it.
"""

import logging
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

#: All pinned memory is for every GPU (cudaHostRegisterPortable).
_PORTABLE = 1


class SharedMemory:
    """Memory for one copy, of as much as there is on the machine. Not thread-safe."""

    def __init__(self) -> None:
        #: Of the file.
        self.fd = os.memfd_create("penstock-weights")
        pinned: list[int] = []
        self._pinned = pinned
        self._end = weakref.finalize(self, _end, self.fd, pinned)
        self._end.atexit = False  # the process takes it all along
        # Nothing is taken before a piece is; so all of them are in one mapping, at the same distance as in the file.
        self._bound = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        os.ftruncate(self.fd, self._bound)
        self._mapped = mmap.mmap(self.fd, self._bound)
        self._start = torch.frombuffer(self._mapped, dtype=torch.uint8, count=1).data_ptr()
        self._filled = 0

    def piece(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """[num_bytes] of memory, which is not given back before the end: each version has the same tensors.

        Args:
            is_pinned: of a kind that a GPU copies to without the processor, where that is to be had.

        Raises:
            OSError: there is no memory.
        """
        at, room = self._filled, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Now: where there is none when it is written to, the process is killed.
        self._allocate(at, room)
        self._filled += room
        piece = torch.frombuffer(self._mapped, dtype=torch.uint8, count=num_bytes, offset=at)
        if is_pinned:
            self._pin(piece)
        return piece

    def offset_of(self, tensor: Tensor) -> int:
        """Location of a tensor in the file."""
        return tensor.data_ptr() - self._start if tensor.nbytes else 0

    def put(self, data: bytes) -> int:
        """Write ``data`` behind all pieces, until there is a new one or more is put; where. Raises OSError."""
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
            log.warning("copies of weights take ordinary memory, which is slower: CUDA error %d", error)
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
