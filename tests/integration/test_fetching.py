"""A version that comes over HTTP is complete and right, or does not come: cuts, wrong bytes, stalls, kills."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from penstock.config import Config
from penstock.consumers.weights import static_files
from penstock.consumers.weights.static_files import StaticFiles
from penstock.errors import PublishError
from penstock.records.cause import Cause
from penstock.records.keys import Keys
from penstock.records.publication import Offer
from penstock.records.worker_causes import WeightsFetched
from penstock.redis.server import RedisServer
from penstock.weights.index import INDEX_FILE, WeightsIndex, digest
from penstock.weights.serving import object_name
from penstock.workers.weights import download, version_folders
from penstock.workers.weights.download import Download
from penstock.workers.weights.machine_lock import Stopped
from tests.integration.fetch_parts import TOKEN, Version, config_of, forge, make_version, owner_of
from tests.integration.spoiling_proxy import How, SpoilingProxy

PATIENCE_S = 120.0


class Reported(Download):
    """A download of which tests see the cause of the wait, and that they may stop."""

    def __init__(self, config: Config, keys: Keys) -> None:
        super().__init__(config, keys, self._see)
        self.cause: Cause | None = None
        self.stop = threading.Event()

    def _see(self, cause: Cause | None) -> None:
        self.cause = cause or self.cause


class Play:
    """A trainer and workers of one run, each on a machine of its own."""

    def __init__(self, url: str, client: redis.Redis, keys: Keys, folder: Path, stack: ExitStack) -> None:
        self.url, self.client, self.keys, self.folder = url, client, keys, folder
        self._stack = stack

    def trainer(self, trainer: dict[str, Any] | None = None, **serving: Any) -> StaticFiles:
        config = config_of(self.url, self.keys, self.folder / "trainer", trainer=trainer, **serving)
        return self._stack.enter_context(closing(StaticFiles(config, owner_of(self.url, self.keys))))

    def worker(self, machine: str, **serving: Any) -> Reported:
        config = config_of(self.url, self.keys, self.folder / machine, **serving)
        return self._stack.enter_context(closing(Reported(config, self.keys)))

    def up(self, proxy: SpoilingProxy) -> SpoilingProxy:
        return self._stack.enter_context(proxy.up())

    def key(self, version: Version) -> str:
        return self.keys.offer("policy", version.number, version.index)

    def offer(self, version: Version) -> Offer:
        """Return the offer of a version; blocks until there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while (data := self.client.get(self.key(version))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return Offer.from_bytes(data)

    def offer_at(self, version: Version, url: str) -> None:
        """Offer a version at another address, for so long that its trainer does not renew its own offer."""
        forge(self.client, self.keys, replace(self.offer(version), url=url))


@pytest.fixture
def play(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Play]:
    monkeypatch.setattr(download, "STALL_S", 1.0)
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


async def fetched(worker: Reported, version: Version) -> Path:
    return await asyncio.wait_for(asyncio.to_thread(worker.get, version.publication, worker.stop.is_set), PATIENCE_S)


async def test_a_version_comes_from_the_trainer_as_it_was_published(play: Play, version: Version) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    path = await fetched(worker, version)
    assert version.is_at(path)
    assert path == play.folder / "a" / "fetched" / object_name(version.number, version.index)
    assert worker.num_bytes == version.num_bytes
    assert await fetched(worker, version) == path
    assert worker.num_bytes == version.num_bytes, "it is here"


async def test_a_tick_fetches_nothing(play: Play, version: Version) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    paths = set()
    for number in range(1, 6):
        trainer.offer(number, version.index, version.folder)
        paths.add(await fetched(worker, replace(version, number=number)))
    assert worker.num_bytes == version.num_bytes
    assert paths == {play.folder / "a" / "fetched" / object_name(1, version.index)}


async def test_workers_of_one_machine_fetch_once(play: Play, version: Version) -> None:
    trainer = play.trainer()
    workers = [play.worker("m") for _ in range(3)]
    trainer.offer(version.number, version.index, version.folder)
    paths = await asyncio.gather(*(fetched(worker, version) for worker in workers))
    assert len(set(paths)) == 1
    assert sum(worker.num_bytes for worker in workers) == version.num_bytes


async def test_more_workers_than_connections_all_get_a_version(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.consumers.weights.static_files.MAX_CONNECTIONS", 2)
    monkeypatch.setattr(download, "STALL_S", PATIENCE_S)
    trainer = play.trainer()
    workers = [play.worker(name) for name in "abcdef"]
    trainer.offer(version.number, version.index, version.folder)
    paths = await asyncio.gather(*(fetched(worker, version) for worker in workers))
    assert all(map(version.is_at, paths))


@pytest.mark.parametrize("how", ["cut", "change", "stall"])
async def test_a_trainer_whose_answers_are_spoilt_now_and_then_is_asked_again(
    play: Play, version: Version, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STALL_S", 0.3)
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    proxy = play.up(SpoilingProxy(play.offer(version).url, how, after=40_000, count=5))
    play.offer_at(version, proxy.url)
    path = None
    while path is None:
        with contextlib.suppress(PublishError) if how == "change" else contextlib.nullcontext():
            path = await fetched(worker, version)
    assert version.is_at(path)
    assert proxy.num_connections > 5


async def test_a_file_is_continued_where_it_was_cut(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "AGAIN_S", 0.01)
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    # Less than a file goes through any connection.
    proxy = play.up(SpoilingProxy(play.offer(version).url, "cut", after=100_000))
    play.offer_at(version, proxy.url)
    assert version.is_at(await fetched(worker, version))
    assert worker.num_bytes == version.num_bytes


async def test_a_file_is_requested_in_parts(play: Play, version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that workers take turns, however large a file is."""
    monkeypatch.setattr(download, "REQUEST_BYTES", 100_000)
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    proxy = play.up(SpoilingProxy(play.offer(version).url, "cut", after=1 << 40))
    play.offer_at(version, proxy.url)
    assert version.is_at(await fetched(worker, version))
    assert proxy.num_connections == 1 + 10 + 10 + 2  # index, two large files, two small ones


async def test_a_file_with_a_wrong_byte_is_fetched_again_and_no_other(play: Play, version: Version) -> None:
    """As a power loss leaves it."""
    trainer, worker = play.trainer(), play.worker("a")
    half = worker.temporary(version.index)
    half.mkdir(parents=True)
    for name in ("model-00001.safetensors", "model-00002.safetensors"):
        (half / name).write_bytes((version.folder / name).read_bytes()[:600_000])
    with (half / "model-00001.safetensors").open("r+b") as file:
        file.write(bytes(10))
    trainer.offer(version.number, version.index, version.folder)
    with pytest.raises(PublishError, match=r"model-00001\.safetensors does not match the index"):
        await fetched(worker, version)
    assert version.is_at(await fetched(worker, version))
    assert worker.num_bytes == version.num_bytes - 2 * 600_000 + 1_000_000


async def test_a_file_that_is_not_what_the_index_names_never_comes(play: Play, version: Version) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    with (version.folder / "model-00001.safetensors").open("r+b") as file:
        file.write(b"\0" * 10)
    trainer.offer(version.number, version.index, version.folder)
    with pytest.raises(PublishError, match=r"model-00001\.safetensors does not match the index"):
        await fetched(worker, version)
    assert not (worker.folder / object_name(1, version.index)).exists()
    before = worker.num_bytes
    with pytest.raises(PublishError, match="does not match the index"):
        await fetched(worker, version)
    assert worker.num_bytes == before + 1_000_000, "the wrong file alone"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://127.0.0.1:1", "is no address of http; give every part the same tls_cert"),
        ("ftp://127.0.0.1:1", "is no address of http"),
        ("http://127.0.0.1:1/../x", "is no address of http"),
        ("http://127.0.0.1:1", "check that its trainer is running"),
    ],
)
async def test_an_address_that_gives_nothing_is_named(
    play: Play, version: Version, url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "GIVE_UP_S", 0.5)
    worker = play.worker("a")
    forge(play.client, play.keys, Offer(url, version.number, version.index))
    with pytest.raises(PublishError, match=says):
        await fetched(worker, version)
    assert os.listdir(worker.folder) == [".lock"]


@pytest.mark.parametrize(
    ("num_bytes", "sent"), [(10**12, b"x" * 4096), (100, b"x" * 50)], ids=["endless", "always cut"]
)
async def test_an_index_that_is_endless_or_always_cut_fails(
    play: Play, version: Version, num_bytes: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(version_folders, "MAX_INDEX_BYTES", 2**20)
    head = (
        f"HTTP/1.1 206 P\r\nContent-Range: bytes 0-{num_bytes - 1}/{num_bytes}\r\nContent-Length: {num_bytes}\r\n\r\n"
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head.encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(num_bytes // 100):
                writer.write(sent)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    forge(play.client, play.keys, Offer(url, version.number, version.index))
    worker = play.worker("a")
    async with server:
        with pytest.raises(PublishError, match=r"answers with another range|is not completed"):
            await fetched(worker, version)
    assert worker.num_bytes <= 50


async def test_an_index_is_continued_where_it_was_cut(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "AGAIN_S", 0.01)
    trainer, worker, version = play.trainer(), play.worker("a"), make_version(tmp_path / "published", num_bytes=10)
    trainer.offer(version.number, version.index, version.folder)
    # The head of an answer and a part of the index.
    proxy = play.up(SpoilingProxy(play.offer(version).url, "cut", after=400, count=50))
    play.offer_at(version, proxy.url)
    assert version.is_at(await fetched(worker, version))
    assert proxy.num_connections < 50
    assert worker.num_bytes == version.num_bytes


@pytest.mark.parametrize("forged", [Offer("http://127.0.0.1:1", 2, "c" * 32), Offer("http://127.0.0.1:1", 9, "d" * 32)])
async def test_an_offer_of_another_version_is_refused(play: Play, forged: Offer) -> None:
    play.client.set(play.keys.offer("policy", 9, "c" * 32), forged.to_bytes())
    with pytest.raises(PublishError, match="is of another version or index"):
        await fetched(play.worker("a"), Version(9, "c" * 32, play.folder, 0))


async def test_an_index_that_is_not_the_announced_one_is_refused_before_anything_takes_room(
    play: Play, version: Version
) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    await asyncio.to_thread(play.offer, version)
    file = version.folder / INDEX_FILE
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(PublishError, match="is not the index that was announced"):
        await fetched(worker, version)
    assert os.listdir(worker.folder) == [".lock"]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({}, "has no valid size of a file 'config.json'"),
        ({"config.json": -1}, "has no valid size of a file 'config.json'"),
        ({"config.json": 2**50}, "has no valid size of a file 'config.json'"),
        ({"config.json": 2**45}, r"more than serving\.max_bytes"),
        ({"../escape": 1}, "names a file '../escape', which has an invalid name"),
        ({".hidden": 1}, "names a file '.hidden', which has an invalid name"),
        ({"weights.index": 1}, "names a file 'weights.index', which has an invalid name"),
    ],
)
async def test_an_index_that_claims_what_it_may_not_is_refused(
    play: Play, version: Version, sizes: dict[str, int], says: str
) -> None:
    """Also one that was announced."""
    data = WeightsIndex([], dict.fromkeys(sizes or {"config.json": 1}, 0), sizes).to_bytes()
    (version.folder / INDEX_FILE).write_bytes(data)
    trainer, worker = play.trainer(), play.worker("a")
    name = object_name(1, digest(data))
    trainer.server.versions[name] = version.folder, {INDEX_FILE: len(data)}
    forge(play.client, play.keys, Offer(trainer.server.url, 1, digest(data)))
    with pytest.raises(PublishError, match=says):
        await fetched(worker, replace(version, index=digest(data)))
    assert os.listdir(worker.folder) == [".lock"]
    assert not (play.folder / "a" / "escape").exists()


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Path]:
    """Certificate and key of 127.0.0.1, signed by itself."""
    found = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {found['tls_key']} -out {found['tls_cert']} -days 2"
    more = ["-subj", "/CN=penstock", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *more], check=True, capture_output=True, timeout=60)
    return found


async def test_a_version_comes_by_tls_from_a_trainer_whose_certificate_is_known(
    play: Play, version: Version, tls: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    play.trainer(**tls).offer(version.number, version.index, version.folder)
    assert version.is_at(await fetched(play.worker("a", **tls, tls_ca=tls["tls_cert"]), version))
    monkeypatch.setattr(download, "GIVE_UP_S", 0.5)
    with pytest.raises(
        PublishError, match=r"certificate.*; set serving\.tls_ca to what its certificate is signed with"
    ):
        await fetched(play.worker("b", **tls), version)


async def test_a_trainer_that_goes_and_returns_elsewhere_is_followed(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    proxy = play.up(SpoilingProxy(play.offer(version).url, "cut", after=100_000))
    play.offer_at(version, proxy.url)
    coming = asyncio.create_task(fetched(worker, version))
    await asyncio.to_thread(until, lambda: worker.num_bytes > 100_000)
    trainer.close()
    play.trainer().offer(version.number, version.index, version.folder)
    assert version.is_at(await coming)


async def test_what_came_before_the_trainer_went_is_kept_and_nothing_keeps_no_room(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "GIVE_UP_S", 0.5)
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(version.number, version.index, version.folder)
    proxy = play.up(SpoilingProxy(play.offer(version).url, "cut", after=100_000))
    play.offer_at(version, proxy.url)
    coming = asyncio.create_task(fetched(worker, version))
    await asyncio.to_thread(until, lambda: worker.num_bytes > 100_000)
    trainer.close()
    play.client.delete(play.key(version))
    with pytest.raises(PublishError, match=r"version 1 cannot be fetched: .*; check that its trainer is running"):
        await coming
    (half,) = worker.folder.glob(".making-*")
    came = sum(file.stat().st_size for file in half.iterdir())
    assert came > 0
    before = worker.num_bytes
    play.trainer().offer(version.number, version.index, version.folder)
    assert version.is_at(await fetched(worker, version))
    index = (version.folder / "weights.index").stat().st_size
    assert worker.num_bytes - before == version.num_bytes - came, f"{index} of it is the index"


async def test_a_trainer_offers_nothing_but_what_was_announced_and_goes_on(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every worker would fetch it, and refuse it, again and again."""
    made = [make_version(tmp_path / "published", number) for number in range(1, 5)]
    (made[0].folder / "config.json").write_text("[ ]")
    (made[1].folder / "weights.index").write_bytes(b"another")
    trainer, worker = play.trainer(), play.worker("a")
    for one in made[:2]:
        trainer.offer(one.number, one.index, one.folder)
    trainer.offer(3, "no digest", made[2].folder)
    trainer.offer(3, made[2].index, Path("no\0folder"))
    trainer.offer(4, made[3].index, made[3].folder)
    assert made[3].is_at(await fetched(worker, made[3]))
    assert [*trainer.server.versions] == [object_name(4, made[3].index)]
    for says in ("config.json' is not what its index says", "not the index that was announced", "is no digest"):
        assert says in caplog.text


async def test_the_newest_versions_are_served_while_their_folders_exist(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_files, "OFFER_EVERY_S", 0.05)
    monkeypatch.setattr(static_files, "KEPT", 2)
    made = [make_version(tmp_path / "published", number, num_bytes=10) for number in range(1, 4)]
    trainer = play.trainer()
    for one in made:
        trainer.offer(one.number, one.index, one.folder)
    await asyncio.to_thread(play.offer, made[2])
    await asyncio.to_thread(until, lambda: not play.client.exists(play.key(made[0])))
    assert [*trainer.server.versions] == [object_name(one.number, one.index) for one in made[1:]]
    made[1].folder.rename(tmp_path / "elsewhere")
    await asyncio.to_thread(until, lambda: not play.client.exists(play.key(made[1])))
    assert [*trainer.server.versions] == [object_name(3, made[2].index)]
    play.client.delete(play.key(made[2]))
    assert await asyncio.to_thread(play.offer, made[2]), "it is offered again"


async def test_ticks_withdraw_no_weights(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may still download them by the number of an earlier tick."""
    monkeypatch.setattr(static_files, "KEPT", 2)
    monkeypatch.setattr(static_files, "MAX_OFFERS", 6)
    one, two, three = (make_version(tmp_path / "published", number, num_bytes=10) for number in (1, 2, 3))
    trainer = play.trainer()

    async def settled() -> None:
        async with trainer._turn:  # after the offers that were submitted before
            pass

    async def serve(offered: dict[int, Version]) -> list[int]:
        for number, version in offered.items():
            trainer.offer(number, version.index, version.folder)
        await asyncio.wrap_future(trainer.server.submit(settled()))
        return [int(name[1:9]) for name in trainer.server.versions]

    assert await serve({1: one, 2: one, 3: one, 4: two}) == [1, 2, 3, 4]
    assert await serve({5: two, 6: two, 7: two}) == [2, 3, 4, 5, 6, 7], "at most MAX_OFFERS"
    assert await serve({8: three}) == [4, 5, 6, 7, 8], "at most KEPT weights"


async def test_a_download_is_continued_under_the_number_of_a_tick(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, worker = play.trainer(), play.worker("a")
    trainer.offer(1, version.index, version.folder)
    await asyncio.to_thread(play.offer, version)
    file = version.folder / "model-00002.safetensors"
    file.rename(play.folder / "elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr(download, "GIVE_UP_S", 0.5)
        with pytest.raises(PublishError, match="answers with status 404"):
            await fetched(worker, version)
    (play.folder / "elsewhere").rename(file)
    trainer.offer(2, version.index, version.folder)
    assert version.is_at(await fetched(worker, replace(version, number=2)))
    assert worker.num_bytes == version.num_bytes


async def test_an_error_of_redis_ends_no_renewal_of_offers(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(static_files, "OFFER_EVERY_S", 0.05)
    refused, made = (make_version(tmp_path / "published", number, num_bytes=10) for number in (1, 2))
    trainer = play.trainer()
    announce, attempts = trainer._announce, list[Offer]()

    async def refuse(offer: Offer) -> None:
        attempts.append(offer)
        if offer.version == 1:
            raise ResponseError("BUSY Redis is busy running a script.")
        await announce(offer)

    monkeypatch.setattr(trainer, "_announce", refuse)
    for one in (refused, made):
        trainer.offer(one.number, one.index, one.folder)
    await asyncio.to_thread(play.offer, made)
    play.client.delete(play.key(made))
    assert await asyncio.to_thread(play.offer, made), "it is offered again"
    assert [offer.version for offer in attempts].count(1) > 1
    assert "weights over HTTP: ResponseError: BUSY" in caplog.text


@pytest.mark.parametrize("index", ["x/../../../victim", "../" * 4 + "victim", "", "C" * 32, "c" * 31 + "\0"])
async def test_an_index_that_is_no_digest_is_no_path_on_this_machine(play: Play, index: str) -> None:
    """Both records come through Redis: what they name must not be emptied, nor written to."""
    kept = play.folder / "victim" / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    forge(play.client, play.keys, Offer("http://127.0.0.1:1", 9, index))
    worker = play.worker("a")
    with pytest.raises(PublishError, match="which is no digest"):
        await fetched(worker, Version(9, index, play.folder, 0))
    assert [one.name for one in kept.parent.iterdir()] == ["kept"]
    assert not worker.folder.exists()


async def test_who_waits_for_an_offer_holds_up_nobody_of_its_machine(play: Play, tmp_path: Path) -> None:
    unoffered, version = (make_version(tmp_path / "published", number) for number in (1, 2))
    first, second = play.worker("m"), play.worker("m")
    waits = asyncio.create_task(fetched(first, unoffered))
    await asyncio.to_thread(until, lambda: first.cause == WeightsFetched(1, "offer"))
    play.trainer().offer(2, version.index, version.folder)
    assert version.is_at(await fetched(second, version))
    assert first.cause == WeightsFetched(1, "offer")
    play.trainer().offer(1, unoffered.index, unoffered.folder)
    assert unoffered.is_at(await waits)


async def test_what_is_not_offered_or_not_allowed_is_said(
    play: Play, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "OFFER_WAIT_S", 0.5)
    monkeypatch.setattr(download, "GIVE_UP_S", 1.0)
    worker = play.worker("a", token="another-token-of-the-run")
    with pytest.raises(PublishError, match=r"version 1 is not offered over HTTP: set serving\.enabled"):
        await fetched(worker, version)
    play.trainer().offer(version.number, version.index, version.folder)
    says = r":\d+ refuses our token of the run; give every part the same \(serving\.token"
    with pytest.raises(PublishError, match=says):
        await fetched(worker, version)


async def test_old_versions_make_room_but_for_those_that_are_used(play: Play, tmp_path: Path) -> None:
    made = [make_version(tmp_path / "published", number) for number in range(1, 7)]
    trainer = play.trainer()
    worker = play.worker("a", max_bytes=int(3.5 * made[0].num_bytes))
    for one in made[:4]:
        trainer.offer(one.number, one.index, one.folder)
        await fetched(worker, one)
    there = sorted(path.name[:9] for path in worker.folder.iterdir() if path.name[0] == "v")
    assert there == ["v00000002", "v00000003", "v00000004"], "the oldest went"
    assert await fetched(worker, made[2])
    trainer.offer(made[4].number, made[4].index, made[4].folder)
    assert await fetched(worker, made[4])
    held = sorted(hold.path.name[:9] for hold in worker._holds)
    assert held == ["v00000003", "v00000005"], "an engine that went back to 3 has it still"
    small = play.worker("a", max_bytes=int(2.5 * made[0].num_bytes))
    trainer.offer(made[5].number, made[5].index, made[5].folder)
    with pytest.raises(PublishError, match=r"that engines use in .* are more than serving\.max_bytes"):
        await fetched(small, made[5])
    tiny = play.worker("c", max_bytes=1000)
    with pytest.raises(PublishError, match=r"more than serving\.max_bytes \(1,000\)"):
        await fetched(tiny, made[5])


def killed_in_the_middle(store: Path, version: Version, *arguments: str) -> None:
    """Fetch a version in a process that is killed when half of it has come."""
    process = subprocess.Popen([sys.executable, "-m", "tests.integration.fetch_parts", *arguments])
    try:
        until(lambda: sum(file.stat().st_size for file in store.glob(".making-*/*")) > version.num_bytes // 2)
    finally:
        process.kill()
        process.wait()


async def test_I4_a_worker_that_is_killed_in_the_middle_resumes_with_what_came(
    play: Play, tmp_path: Path, redis_server: RedisServer, keys: Keys
) -> None:
    version = make_version(tmp_path / "published", num_bytes=8_000_000)
    trainer = play.trainer({"serve_bytes_per_s": 4_000_000})
    trainer.offer(version.number, version.index, version.folder)
    play.offer(version)
    store = tmp_path / "w" / "fetched"
    arguments = [redis_server.url, keys.run, str(tmp_path / "w"), str(version.number), version.index]
    await asyncio.to_thread(killed_in_the_middle, store, version, *arguments)
    assert [name for name in os.listdir(store) if not name.startswith(".")] == []
    came = sum(file.stat().st_size for file in store.glob(".making-*/*"))
    assert version.num_bytes // 2 < came < version.num_bytes
    second = play.worker("w")
    path = await fetched(second, version)
    assert version.is_at(path)
    assert second.num_bytes == version.num_bytes - came, "what had come is proven by the index"
    assert sorted(os.listdir(store)) == sorted([".lock", path.name])


async def test_a_fetch_that_is_stopped_keeps_what_came_and_lets_another_version_be_fetched(
    play: Play, tmp_path: Path
) -> None:
    first, second = (make_version(tmp_path / "published", number) for number in (1, 2))
    trainer, worker = play.trainer({"serve_bytes_per_s": 500_000}), play.worker("a")
    trainer.offer(1, first.index, first.folder)
    trainer.offer(2, second.index, second.folder)
    coming = asyncio.create_task(fetched(worker, first))

    def has_come() -> bool:
        return isinstance(worker.cause, WeightsFetched) and 0 < worker.cause.missing < first.num_bytes - 300_000

    await asyncio.to_thread(until, has_come)
    assert isinstance(worker.cause, WeightsFetched)
    assert worker.cause.step == "files"
    worker.stop.set()
    with pytest.raises(Stopped):
        await coming
    came = sum(file.stat().st_size for file in worker.folder.glob(".making-*/*"))
    other = play.worker("a")
    assert first.is_at(await fetched(other, first))
    assert other.num_bytes <= first.num_bytes - 200_000
    assert came >= 200_000
    assert second.is_at(await fetched(other, second))


async def test_a_version_that_comes_slowly_comes(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "GIVE_UP_S", 1.0)
    version = make_version(tmp_path / "published", num_bytes=2_000_000)
    trainer, worker = play.trainer({"serve_bytes_per_s": 500_000}), play.worker("a")
    trainer.offer(1, version.index, version.folder)
    began = time.monotonic()
    assert version.is_at(await fetched(worker, version))
    assert time.monotonic() - began > 1.5, "longer than a silence may last"


def test_the_token_is_in_no_file(play: Play, version: Version) -> None:
    play.worker("a")
    play.trainer()
    assert TOKEN not in os.listdir(play.folder)
