"""A publication is refused before an engine is touched."""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from penstock.errors import PublishError
from penstock.records.publication import Publication
from penstock.system import disk
from penstock.system.disk import file_xxh3
from penstock.weights.index import INDEX_FILE, TensorEntry, digest, index_bytes
from penstock.weights.safetensors_files import METADATA_BYTES, Tensors, has_tied_embeddings, read_folder
from penstock.workers.weights.verify import verify_publication

TORCH = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32"}
LAYOUT = {"model.embed_tokens.weight": [4, 2], "model.norm.weight": [2]}


def write(
    folder: Path,
    layout: dict[str, list[int]],
    dtype: str = "F32",
    name: str = "model.safetensors",
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> Path:
    """A safetensors file by hand: 8 bytes of length, JSON, then the bytes of the tensors."""
    folder.mkdir(exist_ok=True)
    header, offset = {}, 0
    for tensor, shape in layout.items():
        size = 1
        for extent in shape:
            size *= extent
        end = offset + size * (4 if dtype in ("F32", "I32") else 2)
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    data = json.dumps({"__metadata__": dict(metadata), **header}).encode()
    path = folder / name
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(offset))
    return path


def publish(folder: Path, tensors: Tensors | None = None, checksums: dict[str, int] | None = None) -> Publication:
    """Write the index of a folder, by default with the tensors and files that it has."""
    tensors = read_folder(folder) if tensors is None else tensors
    if checksums is None:
        checksums = {path.name: file_xxh3(path) for path in folder.iterdir() if path.name != INDEX_FILE}
    entries = [TensorEntry(name, TORCH[dtype], shape, "any") for name, (dtype, shape) in tensors.items()]
    index = index_bytes(entries, checksums, dict.fromkeys(checksums, 0))
    (folder / INDEX_FILE).write_bytes(index)
    return Publication("policy", 2, "disk", str(folder), index=digest(index))


@pytest.fixture
def reference(tmp_path: Path) -> Tensors:
    write(tmp_path / "reference", LAYOUT)
    return read_folder(tmp_path / "reference")


@pytest.fixture
def good(tmp_path: Path) -> Publication:
    write(tmp_path / "good", LAYOUT)
    return publish(tmp_path / "good")


def test_a_whole_publication_that_fits_passes(good: Publication, reference: Tensors) -> None:
    verify_publication(good, reference)
    verify_publication(good, {})


def test_floats_are_cast_and_other_dtypes_are_not(tmp_path: Path, reference: Tensors) -> None:
    write(tmp_path / "half", LAYOUT, "BF16")
    verify_publication(publish(tmp_path / "half"), reference)
    write(tmp_path / "whole", LAYOUT, "I32")
    with pytest.raises(PublishError, match="is I32"):
        verify_publication(publish(tmp_path / "whole"), reference)


def test_tied_output_embeddings_may_be_there_or_not(tmp_path: Path, reference: Tensors) -> None:
    write(tmp_path / "tied", {**LAYOUT, "lm_head.weight": [4, 2]})
    verify_publication(publish(tmp_path / "tied"), reference, tied=True)
    with pytest.raises(PublishError, match=r"lm_head\.weight"):
        verify_publication(publish(tmp_path / "tied"), reference)
    (tmp_path / "tied" / "config.json").write_text('{"tie_word_embeddings": true}')
    assert has_tied_embeddings(tmp_path / "tied")


def test_shapes_and_names_must_be_the_models(tmp_path: Path, reference: Tensors) -> None:
    for name, layout, text in (
        ("shape", {**LAYOUT, "model.norm.weight": [3]}, "has shape"),
        ("less", {"model.norm.weight": [2]}, "lacks 1 tensors"),
        ("more", {**LAYOUT, "extra": [1]}, "'extra'"),
    ):
        write(tmp_path / name, layout)
        with pytest.raises(PublishError, match=text):
            verify_publication(publish(tmp_path / name), reference)


def test_the_announcement_must_be_what_is_there(good: Publication, reference: Tensors) -> None:
    other = {**reference, "model.norm.weight": ("F16", (2,))}
    with pytest.raises(PublishError, match="what was announced"):
        verify_publication(publish(Path(good.path), other), reference)
    with pytest.raises(PublishError, match="not the index that was announced"):
        verify_publication(replace(good, index=""), reference)


def test_bytes_must_be_what_was_announced(good: Publication, reference: Tensors) -> None:
    path = Path(good.path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PublishError, match="its checksum differs"):
        verify_publication(good, reference)


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_file_that_is_cut_short_is_refused(good: Publication, reference: Tensors, cut: int) -> None:
    path = Path(good.path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(PublishError, match="publish it again"):
        verify_publication(publish(path.parent, reference), reference)


def test_missing_and_strange_files_are_refused(good: Publication, reference: Tensors, tmp_path: Path) -> None:
    write(Path(good.path), {"stray": [1]}, name="other.safetensors")
    with pytest.raises(PublishError, match=r"other\.safetensors"):
        verify_publication(good, reference)
    with pytest.raises(PublishError, match="invalid name"):
        verify_publication(publish(Path(good.path), reference, {"../reference/model.safetensors": 1}), reference)
    shutil.rmtree(good.path)
    with pytest.raises(PublishError, match="no folder"):
        verify_publication(good, reference)
    Path(good.path).mkdir()
    with pytest.raises(PublishError, match="lacks 2 tensors of what was announced"):
        verify_publication(publish(Path(good.path), reference), reference)


@pytest.mark.parametrize("path", ["/" + "x" * 5000, "loop", "a\0b"])
def test_a_folder_that_cannot_be_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """As one below a folder that this user may not enter."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PublishError, match=r"there is no folder .* that workers may read") as refused:
        verify_publication(Publication("policy", 2, "disk", path, index="a" * 32), {})
    assert len(str(refused.value)) < 1000


def test_a_header_has_no_more_room_than_its_index_gives_it(good: Publication, reference: Tensors) -> None:
    """Parsed, a long one would take gigabytes of a worker."""
    path = write(Path(good.path), LAYOUT, metadata={"format": "pt", "x": "y" * 2 * METADATA_BYTES})
    with pytest.raises(PublishError, match=r"a header of \d+ bytes in a file of"):
        verify_publication(publish(path.parent), reference)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["weights.index", "model.safetensors", "other.safetensors"])
def test_a_fifo_is_refused_and_not_waited_for(good: Publication, reference: Tensors, name: str) -> None:
    path = Path(good.path) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(PublishError, match=r"no plain file|also holds"):
        verify_publication(good, reference)


def test_files_that_cannot_be_opened_are_refused(good: Publication, reference: Tensors) -> None:
    with pytest.raises(PublishError, match="invalid name"):
        verify_publication(publish(Path(good.path), reference, {"x" * 300: 1}), reference)
    path = Path(good.path) / "model.safetensors"
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(PublishError, match="cannot be read"):
        verify_publication(publish(path.parent, reference, {path.name: 1}), reference)


def test_weights_are_not_hashed_in_the_worker_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event loop shares the interpreter with what hashes, while requests run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "large", {"model.norm.weight": [5 * 2**20]})
    large = publish(tmp_path / "large")
    monkeypatch.setattr(disk.xxhash, "xxh3_64", lambda: pytest.fail("it was hashed in the worker"))
    verify_publication(large, {})
    with (tmp_path / "large" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(PublishError, match="its checksum differs"):
        verify_publication(large, {})
    os.truncate(tmp_path / "large" / "model.safetensors", 17 * 2**20)
    with pytest.raises(PublishError, match="its checksum differs"):
        verify_publication(large, {})
