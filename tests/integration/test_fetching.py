"""A version that comes over HTTP is whole and right, or does not come: cuts, lies, silence, kills and full disks."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.consumers.weights.http.serving import Serving
from penstock.errors import PublishError
from penstock.protocol.scripts import relay_have, run
from penstock.records.keys import Keys
from penstock.records.offer import Offer, range_digest
from penstock.redis.server import RedisServer
from penstock.weights.http.blobs import files_of, object_name
from penstock.weights.http.server import WeightsServer
from penstock.workers.weights.fetch import fetcher as fetcher_module
from penstock.workers.weights.fetch import swarm
from penstock.workers.weights.fetch.fetcher import Fetcher
from penstock.workers.weights.fetch.progress import Progress
from tests.integration.fetch_parts import RANGE_BYTES, TOKEN, Version, config_of, forge, make_version, owner_of
from tests.integration.spoiling_proxy import How, SpoilingProxy

PATIENCE_S = 120.0


class Play:
    """A trainer and workers of one run, each on a machine of its own."""

    def __init__(self, url: str, client: redis.Redis, keys: Keys, folder: Path, stack: ExitStack) -> None:
        self.url, self.client, self.keys, self.folder = url, client, keys, folder
        self._stack = stack

    def trainer(self, range_bytes: int = RANGE_BYTES, **trainer: Any) -> Serving:
        folder = self.folder / "trainer"
        config = config_of(self.url, self.keys, folder, trainer=trainer, range_bytes=range_bytes)
        return self._stack.enter_context(closing(Serving(config, owner_of(self.url, self.keys))))

    def worker(self, name: str, machine: str = "", **serving: Any) -> Fetcher:
        config = config_of(self.url, self.keys, self.folder / (machine or name), **serving)
        return self._stack.enter_context(closing(Fetcher(config, self.keys, name)))

    def up(self, proxy: SpoilingProxy) -> SpoilingProxy:
        return self._stack.enter_context(proxy.up())

    def thing(self, version: Version) -> str:
        return f"policy:{object_name(version.number, version.index)}"

    def offer(self, version: Version) -> Offer:
        """What is offered of it; blocks until it is."""
        deadline = time.monotonic() + PATIENCE_S
        while (data := self.client.get(self.keys.relay(self.thing(version)))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return Offer.from_bytes(data)

    def offer_at(self, version: Version, url: str) -> None:
        """The same offer, at another address and for so long that its trainer does not say it anew."""
        offer = self.offer(version)
        changed = Offer(url, offer.version, offer.index, offer.range_bytes, offer.files, offer.digests)
        forge(self.client, self.keys, self.thing(version), changed)

    def lie(self, trainer: Serving, version: Version) -> None:
        """Offer the folder as it is by now, whatever its index says."""
        name, blobs = object_name(version.number, version.index), files_of(version.folder)
        trainer.server.shelf.put(name, blobs)
        digests = b"".join(
            range_digest(data[start : start + RANGE_BYTES]).digest()
            for data in (blob.path.read_bytes() for blob in blobs.values())
            for start in range(0, max(1, len(data)), RANGE_BYTES)
        )
        files = [[file, blob.size] for file, blob in blobs.items()]
        offer = Offer(trainer.server.url, version.number, version.index, RANGE_BYTES, files, digests)
        forge(self.client, self.keys, self.thing(version), offer)

    def has_all(self, version: Version, name: str, url: str) -> None:
        """A peer says that it has all ranges."""
        full = b"\xff" * -(-len(self.offer(version).ranges()) // 8)
        run(self.client, relay_have(self.keys, self.thing(version), name, url, full, ttl_ms=10**6))


@pytest.fixture
def play(redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path) -> Iterator[Play]:
    with ExitStack() as stack:
        yield Play(redis_server.url, client, keys, tmp_path, stack)


@pytest.fixture
def version(tmp_path: Path) -> Version:
    return make_version(tmp_path / "published")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def fetched(worker: Fetcher, version: Version) -> Path:
    return await asyncio.wait_for(worker.fetch(version.number, version.index), PATIENCE_S)


async def test_a_version_comes_from_the_trainer_as_it_was_published(play: Play, version: Version) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    path = await fetched(worker, version)
    assert version.is_at(path)
    assert path == play.folder / "a" / "fetched" / object_name(version.number, version.index)
    assert (worker.from_trainer, worker.from_peers) == (version.num_bytes, 0)
    assert trainer.server.sent_bytes == version.num_bytes
    assert await fetched(worker, version) == path
    assert trainer.server.sent_bytes == version.num_bytes, "it is here"


async def test_a_tick_fetches_nothing(play: Play, version: Version) -> None:
    trainer, worker, other = play.trainer(), play.worker("a"), play.worker("b")
    paths = set()
    for number in range(1, 6):
        trainer.offer(number, version.index, version.folder)
        paths.add(await asyncio.wait_for(worker.fetch(number, version.index), PATIENCE_S))
    assert trainer.server.sent_bytes == version.num_bytes
    assert paths == {play.folder / "a" / "fetched" / object_name(1, version.index)}
    names = [object_name(number, version.index) for number in (4, 5)]
    await asyncio.to_thread(until, lambda: sorted(worker._announced) == names)
    assert worker.server.shelf.names() == names
    trainer.server.shelf.remove(names[-1])
    assert version.is_at(await asyncio.wait_for(other.fetch(5, version.index), PATIENCE_S))
    assert other.from_peers == version.num_bytes


async def test_workers_fetch_from_one_another_and_the_trainer_sends_once(play: Play, version: Version) -> None:
    trainer = play.trainer()
    workers = [play.worker(name) for name in "abcd"]
    trainer.offer(version.number, version.index, version.folder)
    paths = await asyncio.gather(*(fetched(worker, version) for worker in workers))
    assert all(map(version.is_at, paths))
    assert trainer.server.sent_bytes <= 1.5 * version.num_bytes
    assert sum(worker.from_peers for worker in workers) >= 2.5 * version.num_bytes
    late = play.worker("late")
    assert version.is_at(await fetched(late, version))
    assert late.from_trainer == 0, "those who have it give it"


async def test_workers_of_one_machine_fetch_once(play: Play, version: Version) -> None:
    trainer = play.trainer()
    workers = [play.worker(name, machine="m") for name in "abc"]
    trainer.offer(version.number, version.index, version.folder)
    paths = await asyncio.gather(*(fetched(worker, version) for worker in workers))
    assert len(set(paths)) == 1
    assert sum(worker.from_trainer + worker.from_peers for worker in workers) == version.num_bytes


@pytest.mark.parametrize("how", ["cut", "change", "stall"])
async def test_a_trainer_whose_answers_are_spoilt_now_and_then_is_asked_again(
    play: Play, version: Version, how: How
) -> None:
    trainer, worker = play.trainer(), play.worker("a", stall_s=0.3)
    trainer.offer(version.number, version.index, version.folder)
    proxy = play.up(SpoilingProxy(play.offer(version).url, how, after=40_000, count=3))
    play.offer_at(version, proxy.url)
    assert version.is_at(await fetched(worker, version))
    assert proxy.num_connections > 3


async def test_a_range_is_gone_on_with_where_it_was_cut(play: Play, version: Version) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    # Less than a range goes through any connection: only who goes on gets one.
    proxy = play.up(SpoilingProxy(play.offer(version).url, "cut", after=RANGE_BYTES // 2))
    play.offer_at(version, proxy.url)
    assert version.is_at(await fetched(worker, version))


@pytest.mark.parametrize("how", ["cut", "change", "stall"])
async def test_a_peer_that_spoils_its_answers_costs_a_range_and_no_more(
    play: Play, version: Version, how: How, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, worker = play.trainer(), play.worker("a", stall_s=0.3, fetches=1)
    trainer.offer(version.number, version.index, version.folder)
    proxy = play.up(SpoilingProxy(play.offer(version).url, how, after=600 if how == "change" else 0))
    play.has_all(version, "liar", proxy.url)
    with caplog.at_level(logging.INFO):
        assert version.is_at(await fetched(worker, version))
    assert "worker liar did not send a range of version 1" in caplog.text
    # Small files end before the byte that is changed, and may come from it before.
    assert caplog.text.count("gives other bytes") == (how == "change")
    assert how != "stall" or proxy.num_connections <= 2, "once for the index, and once"


async def test_a_peer_that_is_gone_is_done_without(play: Play, version: Version) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    play.has_all(version, "gone", "http://127.0.0.1:1")
    play.has_all(version, "strange", "ftp://127.0.0.1:1/x")
    assert version.is_at(await fetched(worker, version))


async def test_a_folder_that_changed_since_it_was_offered_never_comes(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "GIVE_UP_S", 1.0)
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    play.offer(version)
    with (version.folder / "model-00001.safetensors").open("r+b") as file:
        file.write(b"\0" * 10)
    with pytest.raises(
        PublishError, match=r"version 1 cannot be fetched: \d+ of its \d+ ranges are not received, .*other bytes"
    ):
        await fetched(worker, version)
    assert not worker._store.path(object_name(1, version.index)).exists()


async def test_what_the_index_does_not_name_is_refused(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offer that fits its bytes and not the publication: the index decides."""
    monkeypatch.setattr(swarm, "GIVE_UP_S", 1.0)
    (version.folder / "more.txt").write_text("more")
    (version.folder / "config.json").write_text("[]")
    trainer, worker = play.trainer(), play.worker("a")
    play.lie(trainer, version)
    with pytest.raises(PublishError, match=r"other files than its index names, .* such as 'more\.txt'"):
        await fetched(worker, version)
    other = make_version(play.folder / "other", 2)
    (other.folder / "config.json").write_text("[]")
    play.lie(trainer, other)
    with pytest.raises(PublishError, match=r"config\.json is not the file that its index names"):
        await fetched(worker, other)
    assert [one.name for one in worker._store.folder.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([["../escape", 10]], "without an index"),
        ([["weights.index", 0]], "without an index"),
        ([["a", 10], ["a", 10]], "names a file twice"),
        ([["a", -1]], "has an invalid entry of files"),
        ([["a", 10**9]], "too many ranges"),
        ([["a", 100_000]], "bytes of digests for 2 ranges"),
        ([], "has 0 files"),
    ],
)
async def test_an_offer_that_no_trainer_writes_is_refused(
    play: Play, files: list[Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm, "GIVE_UP_S", 0.5)
    worker, index = play.worker("a"), "c" * 32
    offer = Offer("http://127.0.0.1:1", 9, index, RANGE_BYTES, files, bytes(16 * len(files)))
    forge(play.client, play.keys, f"policy:{object_name(9, index)}", offer)
    with pytest.raises(PublishError, match=says):
        await asyncio.wait_for(worker.fetch(9, index), PATIENCE_S)
    assert not (play.folder / "escape").exists()


@pytest.mark.parametrize("file", ["../escape", ".hidden", "a/b"])
async def test_a_delta_of_files_that_are_no_plain_names_is_refused(play: Play, file: str) -> None:
    worker, name = play.worker("a"), f"d00000009-{'c' * 32}"
    forge(play.client, play.keys, f"policy:{name}", Offer("http://h:1", 9, "c" * 32, 10, [[file, 10]], bytes(16)))
    coming = worker.bring(name, play.folder / "into" / "fetched", lambda num_bytes: None)
    with pytest.raises(PublishError, match="no plain name"):
        await asyncio.wait_for(asyncio.wrap_future(coming), PATIENCE_S)
    assert not (play.folder / "into").exists()


async def test_what_was_offered_and_never_came_keeps_no_room(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever offers more than there is must not leave the disk full; what did come is gone on with."""
    monkeypatch.setattr(swarm, "GIVE_UP_S", 1.0)
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    real = play.offer(version)
    digests = [one.digest if one.file == "weights.index" else bytes(16) for one in real.ranges()]
    forge(play.client, play.keys, play.thing(version), replace(real, digests=b"".join(digests)))
    with pytest.raises(PublishError, match="ranges are not received"):
        await fetched(worker, version)
    assert [one.name for one in worker._store.folder.iterdir()] == [".lock"]
    trainer.close()
    temporary = worker._store.temporary(object_name(version.number, version.index))
    temporary.mkdir()
    half = version.folder / "model-00001.safetensors"
    for file in (half, version.folder / "weights.index"):
        (temporary / file.name).write_bytes(file.read_bytes())
    forge(play.client, play.keys, play.thing(version), real)
    with pytest.raises(PublishError, match="ranges are not received"):
        await fetched(worker, version)
    assert (temporary / half.name).read_bytes() == half.read_bytes()


async def test_a_trainer_offers_nothing_but_what_was_announced_and_goes_on(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every worker would fetch it, and refuse it, again and again."""
    made = [make_version(tmp_path / "published", number) for number in range(1, 6)]
    (made[0].folder / "config.json").write_text("[]")
    (made[1].folder / "more.txt").write_text("more")
    (made[2].folder / "weights.index").write_bytes(b"another")
    trainer, worker = play.trainer(), play.worker("a")
    for one in made[:3]:
        trainer.offer(one.number, one.index, one.folder)
    trainer.offer(4, "no digest", made[3].folder)
    trainer.offer(4, made[3].index, Path("no\0folder"))
    trainer.offer(5, made[4].index, made[4].folder)
    assert made[4].is_at(await fetched(worker, made[4]))
    assert trainer.server.shelf.names() == [object_name(5, made[4].index)]
    for says in ("config.json is not what its index says", "differ by 'more.txt'", "not the one that was announced"):
        assert says in caplog.text


@pytest.mark.parametrize("index", ["x/../../../victim", "../" * 4 + "victim", "", "C" * 32, "c" * 31 + "\0"])
async def test_an_index_that_is_no_digest_is_no_path_on_this_machine(play: Play, index: str) -> None:
    """Both records come through Redis: what they name must not be emptied, nor written to."""
    kept = play.folder / "victim" / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    offer = Offer("http://127.0.0.1:1", 9, index, RANGE_BYTES, [["a", 10]], bytes(16))
    forge(play.client, play.keys, f"policy:{object_name(9, index)}", offer)
    worker = play.worker("a")
    with pytest.raises(PublishError, match="which is no digest"):
        await asyncio.wait_for(worker.fetch(9, index), PATIENCE_S)
    assert [one.name for one in kept.parent.iterdir()] == ["kept"]
    assert not worker._store.folder.exists()


async def test_who_waits_for_an_offer_holds_up_nobody_of_its_machine(play: Play, tmp_path: Path) -> None:
    unoffered, version = (make_version(tmp_path / "published", number) for number in (1, 2))
    first, second = play.worker("first", machine="m"), play.worker("second", machine="m")
    progress = Progress()
    waits = asyncio.create_task(first.fetch(1, unoffered.index, progress=progress))
    await asyncio.to_thread(until, lambda: progress.cause.step == "offer")
    play.trainer().offer(2, version.index, version.folder)
    assert version.is_at(await fetched(second, version))
    assert progress.cause.step == "offer"
    play.trainer().offer(1, unoffered.index, unoffered.folder)
    assert unoffered.is_at(await asyncio.wait_for(waits, PATIENCE_S))


async def test_what_is_not_offered_or_not_allowed_is_said(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "OFFER_WAIT_S", 0.5)
    monkeypatch.setattr(swarm, "GIVE_UP_S", 1.0)
    worker = play.worker("a", token="another-token-of-the-run")
    with pytest.raises(PublishError, match=r"version 1 is not offered over HTTP: set serving\.enabled"):
        await fetched(worker, version)
    play.trainer().offer(version.number, version.index, version.folder)
    says = r":\d+: it refuses our token of the run; give every part the same \(serving\.token"
    with pytest.raises(PublishError, match=says):
        await fetched(worker, version)


async def test_old_versions_make_room_but_for_those_that_are_used(play: Play, tmp_path: Path) -> None:
    made = [make_version(tmp_path / "published", number) for number in range(1, 7)]
    trainer = play.trainer()
    worker = play.worker("a", max_bytes=int(3.5 * made[0].num_bytes))
    for one in made[:4]:
        trainer.offer(one.number, one.index, one.folder)
        await fetched(worker, one)
    there = sorted(path.name[:9] for path in worker._store.folder.iterdir() if path.name[0] == "v")
    assert there == ["v00000002", "v00000003", "v00000004"], "the oldest went"
    assert len(worker.server.shelf.names()) == 2, "what the engine had and has"
    assert await fetched(worker, made[2])
    trainer.offer(made[4].number, made[4].index, made[4].folder)
    assert await fetched(worker, made[4])
    held = sorted(hold.path.name[:9] for hold in worker._holds)
    assert held == ["v00000003", "v00000005"], "an engine that went back to 3 has it still"
    small = play.worker("b", machine="a", max_bytes=int(2.5 * made[0].num_bytes))
    trainer.offer(made[5].number, made[5].index, made[5].folder)
    with pytest.raises(PublishError, match=r"what engines use here .* serving\.max_bytes"):
        await fetched(small, made[5])
    tiny = play.worker("c", max_bytes=1000)
    with pytest.raises(PublishError, match=r"more than serving\.max_bytes \(1,000\)"):
        await fetched(tiny, made[5])


def killed_in_the_middle(trainer: Serving, version: Version, *arguments: str) -> None:
    """A worker fetches in a process that is killed when half of it was sent."""
    process = subprocess.Popen([sys.executable, "-m", "tests.integration.fetch_parts", *arguments])
    try:
        deadline = time.monotonic() + PATIENCE_S
        while trainer.server.sent_bytes < version.num_bytes // 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


async def test_I4_a_worker_that_is_killed_in_the_middle_goes_on_with_what_came(
    play: Play, tmp_path: Path, redis_server: RedisServer, keys: Keys
) -> None:
    version = make_version(tmp_path / "published", num_bytes=8_000_000)
    trainer = play.trainer(serve_bytes_per_s=4_000_000)
    trainer.offer(version.number, version.index, version.folder)
    play.offer(version)
    arguments = [redis_server.url, keys.run, str(tmp_path / "w"), "first", str(version.number), version.index]
    await asyncio.to_thread(killed_in_the_middle, trainer, version, *arguments)
    assert version.num_bytes // 2 <= trainer.server.sent_bytes < version.num_bytes
    store = tmp_path / "w" / "fetched"
    assert [name for name in os.listdir(store) if not name.startswith(".")] == []
    second = play.worker("second", machine="w")
    path = await fetched(second, version)
    assert version.is_at(path)
    assert second.from_trainer <= version.num_bytes * 0.75, "what had come is believed by its digests"
    assert sorted(os.listdir(store)) == sorted([".lock", path.name])


async def test_what_is_half_here_is_served_as_far_as_it_is_right(play: Play, version: Version) -> None:
    """A worker with a spoilt half of a version gives the rest of it."""
    peer = play.worker("peer")
    half = peer._store.temporary(object_name(version.number, version.index))
    half.mkdir(parents=True)
    for file in version.folder.iterdir():
        (half / file.name).write_bytes(file.read_bytes()[:100_000] + bytes(max(0, file.stat().st_size - 100_000)))
    trainer = play.trainer()
    trainer.offer(version.number, version.index, version.folder)
    assert version.is_at(await fetched(peer, version))
    assert peer.from_trainer < version.num_bytes - RANGE_BYTES


def test_a_server_of_a_worker_is_that_of_a_trainer(play: Play, version: Version) -> None:
    assert type(play.worker("a").server) is type(play.trainer().server) is WeightsServer
    assert files_of(version.folder)["config.json"].size == 2
    assert TOKEN not in os.listdir(play.folder)
