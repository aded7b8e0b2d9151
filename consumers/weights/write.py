"""Write the weights of one version to disk, complete and verified before their folder is announced (T16).

A version is written to a temporary folder, read back, compared, synced, and renamed to ``v00000042``: the name exists
only for a folder that can be loaded. One trainer writes to a parent folder; a replaced one that still runs does not
disturb it. Calls block for the disk.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64

from penstock.consumers.clock import folder_of, versions_in
from penstock.consumers.weights.sources import Source, Weights, as_source, buckets, dtype_name
from penstock.errors import DiskFull, PublishError
from penstock.system.disk import file_xxh3, fsync, is_full, locks, remove_whole
from penstock.weights.index import DTYPE_BYTES, INDEX_FILE, TensorEntry, digest, index_bytes
from penstock.weights.safetensors_files import as_safetensors, compare_layouts, has_tied_embeddings, read_folder

log = logging.getLogger(__name__)

_TEMPORARY = ".writing-"
#: Most bytes of tensors in host memory at once, and of a file.
BUCKET_BYTES = 2 * 1024**3
#: Other files of a model's folder: config, tokenizer, chat template, code.
_COMPANIONS = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken"}


class Written(NamedTuple):
    """Description of a written version for its publication."""

    path: Path
    index_digest: str
    #: Bytes of all tensors.
    num_bytes: int


def write_weights(
    weights: Weights,
    source_model_path: str | Path,
    into: str | Path,
    version: int,
    *,
    keep: int = 3,
    in_use: Callable[[], Collection[int]] = tuple,
    claim: Callable[[], None] = lambda: None,
    max_bucket_bytes: int = BUCKET_BYTES,
) -> Written:
    """Write version ``version`` of a model under ``into``, and delete all but the last ``keep`` versions there.

    One bucket at a time is in host memory; each becomes a file. A folder of this number is replaced: the caller has
    claimed the number, or does so in ``claim``. Leftovers of killed processes are removed.

    Args:
        weights: every rank of a source of shards walks meanwhile.
        source_model_path: local folder of the first policy, whose config and tokenizer files are copied; the weights
            must have the names and shapes of its weights.
        in_use: returns older versions to keep in any case; called before a folder is deleted, and again once it is
            renamed, so that it is restored if a worker began to load it.
        claim: called once the version is complete, before it has its name; its errors propagate.
        max_bucket_bytes: a larger tensor has a file to itself.

    Raises:
        PublishError: the source is no model folder, the weights have other names or shapes, a disk error, or the
            weights read back differ.
        DiskFull: the disk is full; nothing is left of the attempt, and it may be retried.
    """
    folder, parent = Path(source_model_path), Path(into)
    if version < 1 or keep < 1:
        raise PublishError(f"version {version}, keep {keep}: both must be at least 1.")
    config = require_config(folder)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(parent, version) as temporary:
            for file in sorted(folder.iterdir()):
                is_hidden = file.name.startswith(".")  # for example ._config.json of macOS
                if file.suffix in _COMPANIONS and file.is_file() and not is_hidden and not file.match("*.index.json"):
                    shutil.copyfile(file, temporary / file.name)
            entries, saved = _write_tensors(as_source(weights), config, temporary, max_bucket_bytes)
            check_layout([(entry.name, entry.dtype, entry.shape) for entry in entries], folder)
            checksums = {file.name: file_xxh3(file) for file in temporary.iterdir()}
            if changed := [name for name, checksum in saved.items() if checksums[name] != checksum]:
                raise PublishError(f"{changed[0]} was read back changed: check the disk of {parent}.")
            sizes = {name: (temporary / name).stat().st_size for name in checksums}
            index = index_bytes(entries, checksums, sizes)
            (temporary / INDEX_FILE).write_bytes(index)
            for file in temporary.iterdir():
                fsync(file)
            fsync(temporary)
            claim()
            path = _put_in_place(temporary, folder_of(parent, version))
            _delete_old(parent, version, keep, in_use)
    except OSError as exc:
        kind = DiskFull if is_full(exc) else PublishError
        raise kind(f"version {version} cannot be written to {parent}: {exc}.") from exc
    return Written(path, digest(index), sum(entry.num_bytes for entry in entries))


def require_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model's folder; raise PublishError."""
    try:
        return dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as exc:
        raise PublishError(
            f"{folder}/config.json cannot be read ({exc}): give the local folder of the first policy as model.path."
        ) from exc


def _write_tensors(
    source: Source, config: Mapping[str, Any], folder: Path, max_bucket_bytes: int
) -> tuple[list[TensorEntry], dict[str, int]]:
    """Write each bucket; return the tensors, and the XXH3-64 of what was written to each file.

    After a failure it finishes the walk, in which other ranks take part.
    """
    entries: list[TensorEntry] = []
    saved: dict[str, int] = {}
    failure: Exception | None = None
    for number, bucket in enumerate(buckets(source, config, max_bucket_bytes), start=1):
        if failure is not None:
            continue
        try:
            file = folder / f"model-{number:05d}.safetensors"
            tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in bucket}
            saved[file.name] = save(tensors, file)
            entries += [
                TensorEntry(name, dtype_name(one), tuple(one.shape), file.name) for name, one in tensors.items()
            ]
        except Exception as exc:
            failure = exc
    if failure is not None:
        raise failure
    if not saved:
        raise PublishError("there is no tensor to publish; give the model or its state dict.")
    if len(saved) == 1:
        ((only, checksum),) = saved.items()
        (folder / only).rename(folder / "model.safetensors")
        return [entry._replace(file="model.safetensors") for entry in entries], {"model.safetensors": checksum}
    total = sum(entry.num_bytes for entry in entries)
    files = {"metadata": {"total_size": total}, "weight_map": {entry.name: entry.file for entry in entries}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(files, indent=1))
    return entries, saved


def check_layout(layout: Iterable[tuple[str, str, tuple[int, ...]]], model: Path) -> None:
    """Check that engines can load these tensors (T16).

    Args:
        layout: name, dtype (torch's, without ``torch.``) and shape of each tensor.
        model: folder of the first policy.

    Raises PublishError: names or shapes are not those of the first policy.
    """
    reference = read_folder(model)
    if not reference:
        return
    found = {name: (as_safetensors(dtype), shape) for name, dtype, shape in layout}
    ignored = {"lm_head.weight"} if has_tied_embeddings(model) else set()
    compare_layouts("the new version", f"the model in {model}", found, reference, ignored, cast=True)


def _delete_old(parent: Path, version: int, keep: int, in_use: Callable[[], Collection[int]]) -> None:
    for old in [older for older in versions_in(parent) if older <= version][:-keep]:
        if old not in in_use():
            folder = folder_of(parent, old)
            remove_whole(folder, _gone(folder), lambda old=old: old in in_use())  # type: ignore[misc]


def save(tensors: Mapping[str, Tensor], file: Path) -> int:
    """Write a safetensors file of tensors in host memory; return its XXH3-64. Raises OSError, PublishError.

    Old releases of the library copy the tensors, and block all threads while they write.
    """
    if unknown := {dtype_name(tensor) for tensor in tensors.values()} - DTYPE_BYTES.keys():
        raise PublishError(f"There are tensors of {min(unknown)}, which no engine loads: publish another dtype.")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    # Larger elements first, so that each tensor is aligned to its element size.
    names, at = sorted(tensors, key=lambda name: -tensors[name].element_size()), 0
    for name in names:
        tensor, start, at = tensors[name], at, at + tensors[name].nbytes
        dtype, shape = as_safetensors(tensor.dtype), list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    hasher = xxh3_64()
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
    with file.open("wb") as out:
        for part in parts + [_bytes_of(tensors[name]) for name in names]:
            hasher.update(part)
            out.write(part)
    return hasher.intdigest()


def _put_in_place(temporary: Path, target: Path) -> Path:
    if target.exists():
        remove_whole(target, _gone(target))
    temporary.rename(target)
    fsync(target.parent)
    return target


def _gone(folder: Path) -> Path:
    """Return the name of a version's folder while it is deleted."""
    return folder.with_name(f"{_TEMPORARY}gone-{folder.name}-{os.getpid()}")


@contextmanager
def temporary_folder(parent: Path, version: int) -> Iterator[Path]:
    """Make a folder that is removed at the end; first remove those of dead processes, as live ones lock theirs."""
    for leftover in parent.glob(f"{_TEMPORARY}*"):
        with suppress(FileNotFoundError):  # its writer has just ended
            if (lock := _lock(leftover)) >= 0:
                shutil.rmtree(leftover)
                os.close(lock)
    folder = parent / f"{_TEMPORARY}{version:08d}-{secrets.token_hex(4)}"
    folder.mkdir()
    lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder until the handle is closed or this process dies; return -1 if another process holds the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not locks(handle):
            os.close(handle)
            return -1
    except OSError as exc:  # the file system has no locks
        log.debug("%s is not locked: %s", folder, exc)
    return handle


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
