"""Weights of one version on disk, complete and proven before anybody hears of them (T16).

A version is written into a temporary folder beside its place, flushed to the disk, read back, compared, and renamed to
``v00000042``: the name exists only for a folder that can be loaded. One process writes into one parent folder. Calls
block for as long as the disk takes.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.checksum import file_crc32
from penstock.errors import PublishError

WEIGHTS_FILE = "model.safetensors"
_TEMPORARY = ".writing-"
#: Beside weights, what a model's folder is made of: config, tokenizer, chat template, code.
_COMPANIONS = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}


class Written(NamedTuple):
    """What a publication says of a written version."""

    #: Folder with config, tokenizer and weights.
    path: Path
    #: Name -> [dtype, shape] of every tensor.
    tensors: dict[str, list[Any]]
    #: File name -> CRC-32 of its bytes.
    checksums: dict[str, int]


def write_weights(
    weights: torch.nn.Module | Mapping[str, Tensor],
    source_model_path: str | Path,
    into: str | Path,
    version: int,
    *,
    keep: int = 3,
) -> Written:
    """Write version ``version`` of a model under ``into``, and delete all but the last ``keep`` versions there.

    Tied weights are stored once, as ``save_pretrained`` does: ``lm_head.weight`` is left out where the config ties it
    to the embedding. A folder of the same version that was never announced is replaced.

    Args:
        weights: a model, or its tensors by the names that the engine loads.
        source_model_path: local folder of the first policy; its config and tokenizer files are copied.
        into: parent folder, made where it is missing. Temporary folders that a killed process left are removed.
        keep: at least 1; workers may still load older versions, so 2 or more is wise.

    Raises:
        PublishError: the source is no model folder, the disk refuses, or what was read back differs.
    """
    source, parent = Path(source_model_path), Path(into)
    if version < 1 or keep < 1:
        raise PublishError(f"version {version}, keep {keep}: both must be at least 1.")
    if not (source / "config.json").is_file():
        raise PublishError(f"{source} has no config.json; give the local folder of the first policy as model.path.")
    tensors = _storable(weights, json.loads((source / "config.json").read_text()))
    temporary = parent / f"{_TEMPORARY}{version:08d}-{os.getpid()}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(parent)
        temporary.mkdir()
        for file in _companions(source):
            shutil.copyfile(file, temporary / file.name)
        save_file(tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        for file in temporary.iterdir():
            _fsync(file)
        _fsync(temporary)
        compare(tensors, temporary / WEIGHTS_FILE)
        checksums = {file.name: file_crc32(file) for file in sorted(temporary.iterdir())}
        path = _put_in_place(temporary, parent / f"v{version:08d}")
        for old in [older for older in versions(parent) if older <= version][:-keep]:
            _remove(parent / f"v{old:08d}")
    except OSError as exc:
        raise PublishError(f"version {version} cannot be written to {parent}: {exc}.") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    described = {name: [_dtype_name(tensor), list(tensor.shape)] for name, tensor in tensors.items()}
    return Written(path, described, checksums)


def versions(into: str | Path) -> list[int]:
    """Versions that are complete under a folder, ascending."""
    return sorted(int(path.name[1:]) for path in Path(into).glob("v*") if path.name[1:].isdigit() and path.is_dir())


def compare(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Read a safetensors file back and compare it by name, shape, dtype and CRC-32; PublishError on a difference."""
    try:
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            if names != tensors.keys():
                raise PublishError(f"{file} holds other tensors than were written: {sorted(names ^ tensors.keys())}.")
            for name, tensor in tensors.items():
                found = stored.get_tensor(name)
                if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                    raise PublishError(
                        f"{file}: {name} was read back as {found.dtype} {list(found.shape)}, "
                        f"not {tensor.dtype} {list(tensor.shape)}."
                    )
                if _tensor_crc32(found) != _tensor_crc32(tensor):
                    raise PublishError(f"{file}: the values of {name} were read back changed; check the disk.")
    except SafetensorError as exc:
        raise PublishError(f"{file} cannot be read back: {exc}.") from exc


def _storable(weights: torch.nn.Module | Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors in host memory, contiguous, none sharing memory with another."""
    state = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    embedding = next((tensor for name, tensor in state.items() if name.endswith("embed_tokens.weight")), None)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if name == "lm_head.weight" and embedding is not None and _tied(tensor, embedding, config):
            continue
        host = tensor.detach().to("cpu").contiguous()
        if host.numel() and host.untyped_storage().data_ptr() in seen:
            host = host.clone()
        seen.add(host.untyped_storage().data_ptr())
        tensors[name] = host
    if not tensors:
        raise PublishError("there is no tensor to publish; give the model or its state dict.")
    return tensors


def _tied(head: Tensor, embedding: Tensor, config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings")) or head.data_ptr() == embedding.data_ptr() != 0


def _companions(source: Path) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COMPANIONS and not file.name.endswith(".index.json"):
            yield file


def _put_in_place(temporary: Path, target: Path) -> Path:
    if target.exists():
        _remove(target)
    temporary.rename(target)
    _fsync(target.parent)
    return target


def _remove(folder: Path) -> None:
    """Delete a version; its name goes first, so that no half of it is ever found under it."""
    doomed = folder.with_name(f"{_TEMPORARY}gone-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _remove_leftovers(parent: Path) -> None:
    for leftover in parent.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensor_crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
