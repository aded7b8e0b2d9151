"""What this machine sees is loaded from where it is; what it does not see is fetched first."""

import asyncio
import fcntl
from contextlib import closing
from pathlib import Path

import redis

from penstock.consumers.weights.static_files import StaticFiles
from penstock.protocol.waits import PublishedWaiting, read_waits
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.worker_causes import FolderLocked
from penstock.redis.server import RedisServer
from penstock.workers.services import Tally
from penstock.workers.weights.store import WeightStore
from tests.integration.fetch_parts import config_of, make_version, owner_of
from tests.integration.worker_play import until
from tests.unit.workers.weights.test_weight_store import fetched


async def test_a_folder_that_is_not_seen_is_fetched_and_any_other_is_left(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    version = make_version(tmp_path / "published")
    seen = Publication("policy", 1, "disk", str(version.folder), index=version.index)
    unseen = Publication("policy", 1, "disk", "/not/on/this/machine", index=version.index)
    earlier = make_version(tmp_path / "earlier", 1, num_bytes=100)
    left = Publication("policy", 1, "disk", str(earlier.folder), index=version.index)
    waiting = PublishedWaiting(client, keys, "worker:w:weights")
    with (
        closing(
            StaticFiles(config_of(redis_server.url, keys, tmp_path / "t"), owner_of(redis_server.url, keys))
        ) as files,
        closing(WeightStore(config_of(redis_server.url, keys, tmp_path / "w"), keys, waiting, Tally())) as nearby,
        closing(
            WeightStore(config_of(redis_server.url, keys, tmp_path / "w", enabled=False), keys, waiting, Tally())
        ) as without,
    ):
        files.offer(1, version.index, version.folder)
        assert await fetched(nearby, seen) is seen
        assert await fetched(without, unseen) is unseen
        found = await fetched(nearby, unseen)
        assert found.id == unseen.id
        assert version.is_at(Path(found.path))
        assert (await fetched(nearby, left)).path == found.path, "an earlier run had a folder of that name"


async def test_I8_whoever_is_waited_for_is_named(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    version = make_version(tmp_path / "published")
    unseen = Publication("policy", 1, "disk", "/not/on/this/machine", index=version.index)
    (tmp_path / "w" / "fetched").mkdir(parents=True)
    waiting = PublishedWaiting(client, keys, "worker:w:weights")
    with (
        closing(
            StaticFiles(config_of(redis_server.url, keys, tmp_path / "t"), owner_of(redis_server.url, keys))
        ) as files,
        closing(WeightStore(config_of(redis_server.url, keys, tmp_path / "w"), keys, waiting, Tally())) as here,
        (tmp_path / "w" / "fetched" / ".lock").open("w") as lock,
    ):
        files.offer(1, version.index, version.folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        coming = asyncio.create_task(fetched(here, unseen))
        locked = FolderLocked(4711, str(tmp_path / "w" / "fetched"))
        await until(lambda: [wait.cause for wait in read_waits(client, keys)] == [locked])
        lock.close()
        assert version.is_at(Path((await coming).path))
        assert read_waits(client, keys) == []
