"""Memory of copies that other processes map: what a file of it has, that it is bounded, pinned and let go."""

import logging
import os
import weakref
from types import SimpleNamespace

import pytest
import torch

from penstock.consumers.weights.copies import Arena
from penstock.consumers.weights.shared_memory import SharedMemory
from penstock.consumers.weights.sources import as_source
from penstock.errors import PublishError


@pytest.fixture
def made() -> SharedMemory:
    return SharedMemory()


def test_what_is_copied_is_in_the_file(made: SharedMemory) -> None:
    given = {"a": torch.arange(6.0).view(2, 3), "none": torch.empty(0, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    copy = Arena(made).take(as_source(given), {})
    assert copy.memory is made
    for name, tensor in copy.tensors({}):
        raw = os.pread(made.fd, tensor.nbytes, made.offset_of(tensor))
        assert raw == given[name].view(-1).view(torch.uint8).numpy().tobytes(), name


def test_it_takes_no_memory_before_a_piece_is_taken_and_has_no_name(made: SharedMemory) -> None:
    assert os.fstat(made.fd).st_blocks == 0
    made.piece(10_000, is_pinned=False)
    assert 10_000 <= os.fstat(made.fd).st_blocks * 512 < 2**20
    assert not os.get_inheritable(made.fd)
    assert os.fstat(made.fd).st_nlink == 0


def test_pieces_are_apart_and_what_is_put_is_behind_them(made: SharedMemory) -> None:
    pieces = [made.piece(num_bytes, is_pinned=False).fill_(value) for num_bytes, value in ((10, 1), (5000, 2), (1, 3))]
    at = made.put(b"table")
    assert [piece.unique().tolist() for piece in pieces] == [[1], [2], [3]]
    assert os.pread(made.fd, 5, at) == b"table"
    assert made.put(b"other") == at


def test_more_than_the_machine_has_is_said(made: SharedMemory) -> None:
    bound = os.fstat(made.fd).st_size
    with pytest.raises(OSError, match="more than the memory of this machine"):
        made.piece(bound + 1, is_pinned=False)
    huge = torch.empty(1).expand(bound)
    with pytest.raises(PublishError, match=r"cannot be copied into memory .*more than the memory of this machine"):
        Arena(made).take(as_source({"huge": huge}), {})


class Cudart:
    def __init__(self, error: int) -> None:
        self.error = error
        self.pinned: dict[int, tuple[int, int]] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.error:
            self.pinned[address] = (num_bytes, flags)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_is_pinned_is_so_until_it_is_closed_or_let_go(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    cudart = Cudart(0)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: cudart))
    memory = SharedMemory()
    piece = memory.piece(5000, is_pinned=True)
    memory.piece(5000, is_pinned=False)
    assert cudart.pinned == {piece.data_ptr(): (5000, 1)}
    fd, gone = memory.fd, weakref.ref(memory)
    if is_closed:
        memory.close()
        memory.close()
    else:
        del memory
        assert gone() is None
    assert cudart.pinned == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    piece.fill_(7)  # whoever still has some of it has it


def test_what_cannot_be_pinned_is_pageable_memory(
    made: SharedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: Cudart(2)))
    with caplog.at_level(logging.WARNING):
        made.piece(10, is_pinned=True).fill_(1)
    assert "pageable memory, which is slower: CUDA error 2" in caplog.text
