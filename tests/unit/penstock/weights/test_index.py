"""An index names files, and nothing that would end who reads them."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PublishError
from penstock.records.codec import pack
from penstock.weights.index import INDEX_FILE, as_publish_error, digest, index_in, read_index


@pytest.mark.parametrize("name", ["a\0b", b"config.json", "x" * 256, "../a", "..", ".hidden", "a/b", "", INDEX_FILE])
def test_a_name_that_no_file_has_is_refused(tmp_path: Path, name: Any) -> None:
    data = pack({"files": {name: 1, "config.json": 2}})
    (tmp_path / INDEX_FILE).write_bytes(data)
    with pytest.raises(PublishError, match=r"names a file .* which has an invalid name"):
        read_index(tmp_path, digest(data))


def test_a_folder_of_no_name_has_no_index() -> None:
    with pytest.raises(PublishError, match="cannot be read"):
        read_index(Path("a\0b"), "0" * 32)


@pytest.mark.timeout(20)
def test_a_fifo_is_no_index(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_FILE)
    with pytest.raises(PublishError, match="no plain file"):
        read_index(tmp_path, "0" * 32)


@pytest.mark.parametrize(
    "tensor",
    [
        ["t", "float32", [1] * 65, "f"],
        ["t", "float32", [2**50], "f"],
        ["t", "float32", [2**30, 2**30], "f"],
        ["t", "float32", [-1], "f"],
        ["t", "float32", [True], "f"],
        ["t", "float32", ["1"], "f"],
        ["t", "float32", "1", "f"],
        [["t"], "float32", [1], "f"],
        ["t", "float32", [1], 1],
        ["t", ["float32"], [1], "f"],
        ["t", "x" * 2**20, [1], "f"],
        ["t" * 2**20, "float32", [1] * 2**20, "f", "more"],
        ["t" * 2**20],
    ],
)
def test_what_is_no_tensor_is_refused_shortly(tensor: list[Any]) -> None:
    """A shape of 100,000 numbers would take half a minute to multiply."""
    index = index_in(pack({"tensors": [["a", "int8", [], "f"], tensor]}), "it")
    with pytest.raises(PublishError, match=r"not a tensor|cannot be loaded") as caught:
        index.entries()
    assert len(str(caught.value)) < 300


def test_the_largest_tensors_are_taken() -> None:
    tensors = [["t", "int8", [1] * 63 + [2**49], "f"], ["u", "int8", [0, 2**49], "f"]]
    first, second = index_in(pack({"tensors": tensors}), "it").entries()
    assert (first.num_bytes, len(first.shape), second.num_bytes) == (2**49, 64, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_full_disk_and_a_want_of_handles_say_nothing_of_the_weights(code: int) -> None:
    with pytest.raises(OSError, match="short") as raised, as_publish_error("x"):
        raise OSError(code, "short")
    assert raised.value.errno == code


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG])
def test_whatever_else_is_of_them(code: int) -> None:
    with pytest.raises(PublishError, match=r"x: \[Errno \d+\] lost: 'file'\."), as_publish_error("x"):
        raise OSError(code, "lost", "file")
