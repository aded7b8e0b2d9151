"""A copy of weights in memory: the same bits, whatever becomes of the weights; its memory is taken again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.consumers.weights import copies
from penstock.consumers.weights.claim import claim, claimed
from penstock.consumers.weights.copies import ALIGN_BYTES, Arena
from penstock.consumers.weights.sources import as_source
from penstock.consumers.weights.write import write_weights
from penstock.errors import PublishError
from penstock.weights.index import layout_digest, read_index


def weights(value: float) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((3, 5), value, dtype=torch.bfloat16),
        "of.no.axis": torch.tensor(value),
        "empty": torch.empty(0, 4),
        "larger than a piece": torch.full((100, 7), value),
        "strided": torch.full((6, 4), value).t(),
    }


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 256)


def tensors(arena: Arena, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(arena.take(as_source(given), {}).tensors({}))


def test_a_copy_has_the_bits_of_its_source_and_keeps_them() -> None:
    given = weights(1.5)
    found = tensors(Arena(), given)
    for tensor in given.values():
        tensor.zero_()
    assert list(found) == list(given)
    for name, tensor in weights(1.5).items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
        assert found[name].is_contiguous()
        assert found[name].data_ptr() % ALIGN_BYTES == 0, name


def test_memory_is_taken_again_and_grows_where_it_must() -> None:
    arena = Arena()
    first = tensors(arena, weights(1.0))
    places = [tensor.data_ptr() for tensor in first.values()]
    assert [tensor.data_ptr() for tensor in tensors(arena, weights(2.0)).values()] == places
    larger = {"first": torch.full((1000,), 3.0), **weights(4.0)}
    found = tensors(arena, larger)
    assert all(torch.equal(found[name], tensor) for name, tensor in larger.items())


def test_what_cannot_be_copied_is_said_after_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[str] = []

    class Walked:
        is_sharded = False

        def tensors(self, config: Mapping[str, Any]) -> Any:
            for name, tensor in weights(1.0).items():
                walked.append(name)
                yield name, tensor

    def full(num_bytes: int, *, is_pinned: bool) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(copies, "_allocate", full)
    with pytest.raises(PublishError, match=r"cannot be copied into memory.*can't allocate"):
        Arena().take(Walked(), {})
    assert walked == list(weights(1.0)), "other ranks are in the walk until its end"
    with pytest.raises(PublishError, match="no tensor"):
        Arena().take(as_source({}), {})


def test_the_folder_of_a_copy_is_that_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    copy = Arena().take(as_source(weights(1.0)), {})
    direct = write_weights(weights(1.0), tmp_path / "model", tmp_path / "direct", 1)
    behind = write_weights(copy, tmp_path / "model", tmp_path / "behind", 1)
    assert behind.index_digest == direct.index_digest
    found = {name for file in behind.path.glob("*.safetensors") for name in load_file(file)}
    assert found == weights(1.0).keys()
    entries = read_index(behind.path, behind.index_digest).entries()
    layout = [(entry.name, entry.dtype, entry.shape) for entry in entries]
    assert copy.layout == layout
    assert copy.layout_digest == layout_digest(layout)
    assert copy.num_bytes == behind.num_bytes


def test_T1_a_number_that_was_claimed_stays_claimed(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    assert claimed(folder) == 0
    claim(folder, 7)
    claim(folder, 12)
    assert claimed(folder) == 12
    assert [path.name for path in folder.iterdir()] == ["claimed-00000012"]
