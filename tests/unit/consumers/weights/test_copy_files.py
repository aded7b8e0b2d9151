"""What is served of a copy is its folder, byte for byte, as long as the copy is there."""

import threading
from pathlib import Path

import pytest
import torch

from penstock.consumers.weights.copies import Arena, files_of_copy
from penstock.consumers.weights.publish import write_weights
from penstock.consumers.weights.sources import State
from penstock.weights.http.blobs import AnyBlob, make_offer


def weights(fill: float = 0.0) -> dict[str, torch.Tensor]:
    """Of several dtypes, sizes and shapes, which travel in another order than a file has them in."""
    return {
        "a": torch.full((4,), fill, dtype=torch.bfloat16),
        "b": torch.arange(8, dtype=torch.int8),
        "c": torch.full((7, 12), fill),
        "d": torch.tensor(2.5, dtype=torch.float64),
        "e": torch.empty((0, 4)),
        "f": torch.rand(3, 5).T.to(torch.float16),
        "g é": torch.tensor([True, False]),
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"no part of a version")
    return folder


def read(blob: AnyBlob) -> bytes:
    with blob.opened() as reads:
        return reads(0, blob.size)


@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**20], ids=["a file each", "some files", "one file"])
def test_T1_a_copy_is_served_as_its_folder_will_be(model: Path, tmp_path: Path, bucket_bytes: int) -> None:
    copy = Arena().take(State(weights(1.0)), {})
    served = files_of_copy(copy, model, bucket_bytes)
    written = write_weights(copy, model, tmp_path / "weights", 1, max_bucket_bytes=bucket_bytes)

    assert {name: read(blob) for name, blob in served.files.items()} == {
        file.name: file.read_bytes() for file in written.path.iterdir()
    }
    assert served.index_digest == written.index_digest
    # Whoever offers it holds every byte to that index.
    offer = make_offer(served.files, url="http://h:1", version=1, index=served.index_digest, range_bytes=64)
    assert sum(offer.sizes().values()) == sum(file.stat().st_size for file in written.path.iterdir())


def test_a_copy_that_went_is_read_no_more(model: Path) -> None:
    arena = Arena()
    copy = arena.take(State(weights(1.0)), {})
    served = files_of_copy(copy, model, 2**20)
    blob = served.files["model.safetensors"]
    with blob.opened() as reads:
        assert reads(0, 100)
        arena.take(State(weights(2.0)), {})
        with pytest.raises(OSError, match="taken its memory for a later version"):
            reads(0, 100)
    with pytest.raises(OSError, match="later version"), blob.opened():
        pass
    with pytest.raises(OSError, match="later version"):
        files_of_copy(copy, model, 2**20)


def test_memory_is_taken_when_what_is_being_read_was_read(model: Path) -> None:
    arena = Arena()
    copy = arena.take(State(weights(1.0)), {})
    taking = threading.Thread(target=lambda: arena.take(State(weights(2.0)), {}))
    with copy.kept():
        taking.start()
        before = dict(copy.tensors({}))["c"].clone()
        taking.join(0.05)
        assert taking.is_alive()
        assert torch.equal(dict(copy.tensors({}))["c"], before)
    taking.join(60)
    assert copy.is_gone
