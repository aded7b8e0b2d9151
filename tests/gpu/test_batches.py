"""Batches as tensors on one GPU, by way of pinned memory: what the host has."""

from typing import Any

import torch

from penstock.consumers.batch.batch import Batch
from tests.batch_factory import make_batch, make_samples, tiny_model


def drawn() -> Batch:
    return make_batch(make_samples({4: tiny_model(0), 5: tiny_model(1)}), train_version=6)


def assert_same(there: dict[str, Any], here: dict[str, Any]) -> None:
    assert there.keys() == here.keys()
    for key, value in here.items():
        if isinstance(value, torch.Tensor):
            assert there[key].is_cuda, key
            assert torch.equal(there[key].cpu(), value), key
        else:
            assert there[key] == value, key


def test_padded_on_the_gpu_is_padded_on_the_host() -> None:
    assert_same(drawn().padded("cuda"), drawn().padded())


def test_packed_on_the_gpu_is_packed_on_the_host() -> None:
    there, here = list(drawn().packed(40, device="cuda")), list(drawn().packed(40))
    assert len(there) == len(here) > 1
    for one, other in zip(there, here, strict=True):
        assert_same(one, other)


def test_copies_that_run_beside_the_host_hold_what_was_there_at_their_start() -> None:
    """The host goes on, and frees what it gave, while the GPU is busy and copies wait behind its work."""
    busy = torch.ones(8192, 8192, device="cuda")
    batch = drawn()
    for _ in range(20):
        busy = busy @ busy / 8192
    there = [batch.padded("cuda") for _ in range(20)]
    # Would take the place of pinned memory that was given up too early.
    waste = [torch.full((4096,), 7.0).pin_memory() for _ in range(200)]
    torch.cuda.synchronize()
    for one in there:
        assert_same(one, batch.padded())
    assert len(waste) == 200
