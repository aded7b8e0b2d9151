"""An offer comes through Redis: the index that was announced says what is fetched, and how much room that takes."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.consumers.weights.http import serving
from penstock.errors import PublishError
from penstock.records.offer import Offer
from penstock.weights.index import INDEX_FILE, WeightsIndex, digest, read_index
from penstock.workers.weights.fetch import swarm
from penstock.workers.weights.fetch.progress import Progress
from tests.integration.fetch_parts import Version, forge, make_version
from tests.integration.test_fetching import PATIENCE_S, Play, fetched, play, until, version

__all__ = ["play", "version"]


def forged(real: Offer, files: list[list[Any]]) -> Offer:
    """An offer of these files, with the digests that the index has in the real one."""
    digests = {one.start: one.digest for one in real.ranges() if one.file == INDEX_FILE}
    made = replace(real, files=files, digests=b"")
    num = sum(max(1, -(-size // real.range_bytes)) for _, size in files)
    made = replace(made, digests=bytes(16 * num))
    found = [digests.get(one.start, bytes(16)) if one.file == INDEX_FILE else one.digest for one in made.ranges()]
    return replace(made, digests=b"".join(found))


@pytest.mark.parametrize("how", ["larger", "more", "fewer"])
async def test_what_differs_from_the_index_takes_no_room_and_nobody_elses(
    play: Play, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged offer of a real version would have earlier ones deleted, and the disk filled."""
    made = [make_version(tmp_path / "published", number) for number in (1, 2, 3)]
    trainer = play.trainer()
    worker = play.worker("a", max_bytes=int(3.5 * made[0].num_bytes), stall_s=PATIENCE_S)
    for one in made[:2]:
        trainer.offer(one.number, one.index, one.folder)
        await fetched(worker, one)
    trainer.offer(3, made[2].index, made[2].folder)
    real = await asyncio.to_thread(play.offer, made[2])
    monkeypatch.setattr(serving, "OFFER_EVERY_S", PATIENCE_S)  # its trainer says nothing anew meanwhile
    sizes = real.sizes()
    if how == "larger":
        sizes["model-00001.safetensors"] = 3 * made[0].num_bytes
    elif how == "more":
        sizes["more.safetensors"] = 2 * made[0].num_bytes
    else:
        del sizes["config.json"]
    before = sorted(os.listdir(worker._store.folder))
    forge(play.client, play.keys, play.thing(made[2]), forged(real, [[*one] for one in sizes.items()]))
    monkeypatch.setattr(swarm, "GIVE_UP_S", 0.5)
    with pytest.raises(PublishError, match=r"version 3 is offered with other files than its index names, .* such as"):
        await fetched(worker, made[2])
    assert sorted(os.listdir(worker._store.folder)) == before
    monkeypatch.setattr(swarm, "GIVE_UP_S", PATIENCE_S)
    progress = Progress()
    coming = asyncio.create_task(worker.fetch(3, made[2].index, progress=progress))
    await asyncio.to_thread(until, lambda: progress.cause.step == "index")
    forge(play.client, play.keys, play.thing(made[2]), real)
    assert made[2].is_at(await asyncio.wait_for(coming, PATIENCE_S)), "its trainer offers it again and again"


async def test_an_index_that_is_not_the_one_that_was_announced_says_nothing(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "GIVE_UP_S", 0.5)
    trainer, worker = play.trainer(), play.worker("a", stall_s=PATIENCE_S)
    trainer.offer(version.number, version.index, version.folder)
    await asyncio.to_thread(play.offer, version)
    monkeypatch.setattr(serving, "OFFER_EVERY_S", PATIENCE_S)  # its trainer says nothing anew meanwhile
    (version.folder / INDEX_FILE).write_bytes((version.folder / INDEX_FILE).read_bytes() + b" ")
    play.lie(trainer, version)
    with pytest.raises(PublishError, match="offered with another index than was announced"):
        await fetched(worker, version)
    assert os.listdir(worker._store.folder) == [".lock"]


async def test_an_index_that_names_no_sizes_is_refused_in_words(play: Play, version: Version) -> None:
    index = read_index(version.folder, version.index)
    data = WeightsIndex(index.tensors, index.files).to_bytes()
    (version.folder / INDEX_FILE).write_bytes(data)
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, digest(data), version.folder)
    with pytest.raises(PublishError, match=r"does not say how large its files are, .*: publish again"):
        await asyncio.wait_for(worker.fetch(version.number, digest(data)), 60)


async def test_an_index_comes_from_whoever_has_it(play: Play, version: Version) -> None:
    """A trainer that does not answer any more, and workers that have all of it."""
    trainer, first, second = play.trainer(), play.worker("first"), play.worker("second")
    trainer.offer(version.number, version.index, version.folder)
    await fetched(first, version)
    offer = play.offer(version)
    trainer.close()
    play.has_all(version, "gone", "http://127.0.0.1:1")
    forge(play.client, play.keys, play.thing(version), offer)
    assert version.is_at(await fetched(second, version))
    assert (second.from_trainer, second.from_peers) == (0, version.num_bytes)
