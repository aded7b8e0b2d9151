"""Checkpoints of a trainer, complete or absent, without pickled data beyond what ``weights_only`` loads.

``step00000040-0123456789abcdef.pt``: the step, and the XXH3 of the file, so that damage is detected before loading.
Ranks other than 0 first write ``step00000040-rank1-XXH3.pt`` with their shards of the policy; the file of rank 0 names
those files, and completes the checkpoint. Calls block for as long as the disk takes.
"""

import contextlib
import logging
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from penstock.errors import DiskFull, PenstockError
from penstock.system.disk import file_xxh3, fsync, is_full

log = logging.getLogger(__name__)

_NAME = re.compile(r"step\d{8,}-[0-9a-f]{16}\.pt")
_SHARD_NAME = re.compile(r"step\d{8,}-rank\d+-[0-9a-f]{16}\.pt")
_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    #: ``GRPO.state_dict()`` of every rank, in order of ranks.
    learner: list[dict[str, Any]]
    #: Result of ``Trainer.state_dict()``.
    trainer: dict[str, Any]
    rng: dict[str, Any]

    def restore_rng(self) -> None:
        """Restore the random number generators of Python and torch."""
        version, words, gauss = self.rng["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(self.rng["torch"])
        if self.rng["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(self.rng["cuda"])


def save_shard(folder: str | Path, *, step: int, rank: int, learner: dict[str, Any]) -> str:
    """Write the shards of a rank other than 0, durable when this returns; return the file's name, for ``save``.

    Args and errors: as for ``save``.
    """
    return _save(Path(folder), step, f"rank{rank}-", {"learner": learner}).name


def save(
    folder: str | Path,
    *,
    step: int,
    learner: dict[str, Any],
    trainer: dict[str, Any],
    keep: int = 2,
    shards: Sequence[str] = (),
) -> Path:
    """Write a checkpoint durably, and delete all but the last ``keep``.

    Args:
        learner: result of ``GRPO.state_dict()``: tensors, numbers, strings, and lists and maps of them.
        trainer: result of ``Trainer.state_dict()``, with the same types.
        shards: what ``save_shard`` returned on the other ranks, in order of ranks.

    Raises:
        DiskFull: the disk is full; the call may be retried.
        PenstockError: writing failed. Earlier checkpoints are unchanged in both cases.
    """
    content = {"step": step, "learner": learner, "trainer": trainer, "rng": _rng(), "shards": list(shards)}
    path = _save(Path(folder), step, "", content)
    try:
        _delete_others(path, shards, keep)
    except OSError as exc:
        raise PenstockError(f"old checkpoints in {folder} cannot be deleted: {exc}.") from exc
    return path


def _delete_others(path: Path, shards: Sequence[str], keep: int) -> None:
    """Delete all files but those of this checkpoint and of the ``keep`` - 1 before it."""
    step = _step(path)
    earlier = [file for file in _files(path.parent) if _step(file) < step]
    kept = {_step(file) for file in earlier[-keep + 1 :]} if keep > 1 else set()
    # Other checkpoints of this step or later belong to an abandoned lineage.
    for file in path.parent.glob("step*.pt"):
        is_ours = _NAME.fullmatch(file.name) or _SHARD_NAME.fullmatch(file.name)
        if is_ours and file.name not in {path.name, *shards} and _step(file) not in kept:
            file.unlink()
    # An earlier start may have had more ranks.
    for leftover in path.parent.glob(f"{_TEMPORARY}rank*"):
        if int(leftover.name.removeprefix(f"{_TEMPORARY}rank").partition("-")[0]) > len(shards):
            leftover.unlink()


def _save(directory: Path, step: int, kind: str, content: dict[str, Any]) -> Path:
    """Write a file, sync it, and give it its name; see ``save``."""
    prefix = f"{_TEMPORARY}{kind}"
    temporary = directory / f"{prefix}{os.getpid()}.pt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{prefix}[0-9]*"):
            leftover.unlink()
        _write(content, temporary)
        path = directory / f"step{step:08d}-{kind}{file_xxh3(temporary):016x}.pt"
        temporary.replace(path)
        fsync(directory)
    except (OSError, RuntimeError) as exc:
        error = DiskFull if is_full(exc) else PenstockError
        raise error(f"the checkpoint of step {step} cannot be written to {directory}: {exc}.") from exc
    finally:
        with contextlib.suppress(OSError):  # a leftover is removed by the next save
            temporary.unlink()
    return path


class _Stream:
    """Record the cause of a failed write, which torch does not report."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as exc:
            self.failure = exc
            raise

    def flush(self) -> None:
        self._file.flush()


def _write(content: dict[str, Any], path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        stream = _Stream(file)
        try:
            torch.save(content, cast(IO[bytes], stream))
        except RuntimeError:
            if stream.failure is not None:
                raise stream.failure from None
            raise
        os.fsync(file.fileno())


def latest(
    folder: str | Path,
    at_most: int | None = None,
    fits: Callable[[dict[str, Any]], bool] = lambda trainer: True,
) -> Checkpoint | None:
    """Return the newest complete checkpoint that fits, or None without checkpoints; log skipped checkpoints.

    Args:
        at_most: newest step to consider.
        fits: called with ``Trainer.state_dict()`` of a checkpoint; returns whether a rewind to it is possible.

    Raises:
        PenstockError: all checkpoints are damaged, or none fits.
    """
    files = [path for path in _files(Path(folder)) if at_most is None or _step(path) <= at_most]
    beyond: list[Path] = []
    for path in reversed(files):
        try:
            found = _load(path)
        except Exception as exc:  # torch.load may raise any exception for damaged data
            log.warning("checkpoint %s is damaged (%s); trying the one before.", path, exc)
            continue
        if fits(found.trainer):
            return found
        beyond.append(path)
        log.warning(
            "checkpoint %s is at batch %s, which Redis does not know as committed, or no longer has: it lost "
            "acknowledged writes, as after a power loss, or is another one; trying the one before.",
            path,
            found.trainer.get("batch"),
        )
    if beyond:
        raise PenstockError(
            f"no checkpoint in {folder} fits what Redis knows (the oldest is {beyond[-1].name}): bring Redis back as "
            "it was, or begin a new run, whose model.path may be the weights of that checkpoint."
        )
    if files:
        raise PenstockError(
            f"every checkpoint in {folder} is damaged; move them away to start over, or bring back a copy."
        )
    return None


def _load(path: Path) -> Checkpoint:
    content = _read(path)
    shards = [path.with_name(name) for name in content["shards"]]
    if wrong := [one.name for one in shards if not _SHARD_NAME.fullmatch(one.name)]:
        raise PenstockError(f"it names {wrong[0]} as a file of shards")
    parts = [content["learner"], *(_read(one)["learner"] for one in shards)]
    return Checkpoint(path, int(content["step"]), parts, content["trainer"], content["rng"])


def _read(path: Path) -> dict[str, Any]:
    """Check and map a file, so that a rank holds its own part and one full tensor at a time."""
    if (found := file_xxh3(path)) != int(path.stem.rpartition("-")[2], 16):
        raise PenstockError(f"the XXH3 of {path.name} is {found:016x}")
    content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    return content


def _files(directory: Path) -> list[Path]:
    """Return the files of rank 0 in order of step."""
    return sorted((path for path in directory.glob("step*.pt") if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step").partition("-")[0])


def _rng() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": [version, list(words), gauss], "torch": torch.get_rng_state(), "cuda": cuda}
