"""Versions on a disk that is smaller than their bound: what nobody uses goes, and no disk is left full."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DiskFull, PublishError
from penstock.system.disk import free_bytes
from penstock.weights.delta_store import DeltaStore
from penstock.workers.weights import version_folders
from penstock.workers.weights.local_copies import LocalCopies
from tests.integration.fetch_parts import make_version
from tests.integration.small_disk import SmallDisk, small_disk
from tests.integration.test_fetching import Play, fetched, play
from tests.small_disks import fill
from tests.unit.consumers.weights.test_deltas import Line
from tests.unit.penstock.weights.deltas.version_folders import a_model

__all__ = ["play", "small_disk"]

Disks = Callable[[str, int], SmallDisk]


async def test_fetched_versions_that_nobody_uses_go_before_the_disk_is_full(
    play: Play, tmp_path: Path, small_disk: Disks
) -> None:
    disk, trainer = small_disk("w", 7), play.trainer()
    worker = play.worker("w")
    for number in range(1, 6):
        version = make_version(tmp_path / "published", number)
        trainer.offer(number, version.index, version.folder)
        assert version.is_at(await fetched(worker, version))
    there = sorted(name[:9] for name in os.listdir(disk.path / "fetched") if name[0] == "v")
    assert there == ["v00000003", "v00000004", "v00000005"]


async def test_a_full_disk_has_room_for_a_version_after_one_that_nobody_uses_is_deleted(
    play: Play, tmp_path: Path, small_disk: Disks
) -> None:
    """Others have filled the disk, so that not even the index of the next version fits."""
    disk, trainer = small_disk("w", 12), play.trainer()
    worker = play.worker("w")
    made = [make_version(tmp_path / "published", number) for number in range(1, 5)]
    for version in made[:3]:
        trainer.offer(version.number, version.index, version.folder)
        await fetched(worker, version)
    fill(disk.path / "ballast")
    trainer.offer(4, made[3].index, made[3].folder)
    assert made[3].is_at(await fetched(worker, made[3]))
    there = sorted(name[:9] for name in os.listdir(disk.path / "fetched") if name[0] == "v")
    assert there == ["v00000002", "v00000003", "v00000004"]


async def test_a_version_for_which_there_is_no_room_takes_none(play: Play, tmp_path: Path, small_disk: Disks) -> None:
    disk, trainer = small_disk("w", 8), play.trainer()
    before = free_bytes(disk.path)
    worker, version = play.worker("w"), make_version(tmp_path / "published", num_bytes=10_000_000)
    trainer.offer(1, version.index, version.folder)
    with pytest.raises(PublishError, match=r"no room for more than [\d,]+ on the disk of .*: make room there"):
        await fetched(worker, version)
    assert free_bytes(disk.path) == before


async def test_a_disk_that_fills_meanwhile_is_not_left_full(
    play: Play, tmp_path: Path, small_disk: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a quota fills, which is not known before."""
    disk, trainer = small_disk("w", 8), play.trainer()
    before = free_bytes(disk.path)
    monkeypatch.setattr(version_folders, "free_bytes", lambda folder: 2**40)
    worker, version = play.worker("w"), make_version(tmp_path / "published", num_bytes=10_000_000)
    trainer.offer(1, version.index, version.folder)
    monkeypatch.setattr(version_folders, "FULL_PAUSE", 10**6)
    received = list[int]()
    for _ in range(3):
        with pytest.raises(DiskFull, match=r"cannot be kept in .*: .*No space left"):
            await fetched(worker, version)
        received.append(worker.num_bytes)
        assert free_bytes(disk.path) == before
    assert received == received[:1] * 3, "each attempt received everything again"

    monkeypatch.setattr(worker, "_full_until", 0.0)
    with pytest.raises(DiskFull):
        await fetched(worker, version)
    assert worker.num_bytes > received[0], "after the pause it is tried again"


def test_copies_that_no_engine_reads_go_before_the_disk_is_full(tmp_path: Path, small_disk: Disks) -> None:
    line = Line(tmp_path, anchor_every=100)
    line.model = a_model(size=50_000)
    line.publish(1)
    disk = small_disk("copies", 6)
    assert line.written[1].num_bytes * 5 > free_bytes(disk.path)
    copies = LocalCopies(disk.path, DeltaStore(str(line.path / "store")), 2**30)
    for version in range(1, 8):
        if version > 1:
            line.publish(version)
        assert line.announced is not None
        path = copies.get(line.announced)
        assert {file.name for file in path.iterdir()} == {file.name for file in line.written[version].path.iterdir()}
    copies.close()
