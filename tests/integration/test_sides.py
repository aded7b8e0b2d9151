"""Side arrays in keys of their own: written with the sample, read only when asked for, freed with the group (T17)."""

import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import PayloadError
from penstock.names import Lane
from penstock.payloads import checksum_of, sides
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease
from penstock.protocol.waits import Waiting
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.control import AsyncControl
from penstock.redis.server import RedisServer
from penstock.workers.jobs.commits import Commits
from tests.integration import play
from tests.integration.parts import admit, buffering, make_config, make_sample, publish, step, until


def left(client: redis.Redis, keys: Keys) -> list[bytes]:
    return list(client.scan_iter(match=keys.of("side:*").replace("{", "[{]"), count=1000))


def experts(k: int) -> Any:
    return np.arange(7 * 3 * 2, dtype=np.int16).reshape(7, 3, 2) + k


@pytest.fixture
async def commits(redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path) -> AsyncIterator[Commits]:
    config = make_config(redis_server.url, keys.run, tmp_path, rollout={"n": 2, "sides": ["routed_experts"]})
    control = await AsyncControl(redis_server.url).open()
    made = Commits(config, keys, control, Waiting(), "w1")
    yield made
    await made.close()
    await control.close()


def config_of(url: str, keys: Keys, folder: Path) -> Config:
    return make_config(url, keys.run, folder, trainer={"batch_groups": 1})


async def commit(commits: Commits, held: RawLease, *, image: bool) -> str:
    job = Job.from_bytes(held.body)
    samples = [make_sample(job, k, [1], 2) for k in range(2)]
    for sample in samples:
        sample.sides = {"routed_experts": experts(sample.k)}
    if image:
        samples[1].sides["image"] = np.full((2, 2), 0.5, np.float32)
    return (await commits.submit(held.job, held.token, samples, 1.0, "scaled")).outcome


async def test_T17_side_arrays_are_read_when_asked_for_and_freed_with_their_group(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, commits: Commits
) -> None:
    config = config_of(redis_server.url, keys, tmp_path)
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 2)
        first, second = play.lease(client, keys, most=2, version=1)
        assert await commit(commits, first, image=True) == "ready"
        batch = step(trainer)
        assert {client.ttl(key) for key in left(client, keys)} == {-1}, "permanent with the payload"
        assert len(left(client, keys)) == 3
        by_k = dict(zip([row.k for row in batch.rows], batch.side("routed_experts"), strict=True))
        for k in range(2):
            np.testing.assert_array_equal(by_k[k], experts(k))
            assert by_k[k].dtype == np.int16
        images = dict(zip([row.k for row in batch.rows], batch.side("image"), strict=True))
        assert images[0] is None
        assert images[1].tolist() == [[0.5, 0.5], [0.5, 0.5]]
        assert batch.side("no_such") == [None, None]
        trainer.state_dict()
        trainer.checkpointed()
        until(lambda: not left(client, keys), "freed with the group")

        assert await commit(commits, second, image=False) == "ready"
        batch = trainer.next(timeout=60)
        client.delete(keys.side(f"{second.job}/0", second.token, "routed_experts"))
        assert batch.arrays()["tokens"].shape[0] == 2, "nobody asked for it, so nobody read it"
        with pytest.raises(PayloadError, match="its side array 'routed_experts' is gone from its payload server"):
            batch.side("routed_experts")
    assert audit(client, keys).ok


async def test_T17_one_that_was_asked_for_and_is_not_there_fails_the_sample(
    client: redis.Redis, keys: Keys, commits: Commits
) -> None:
    admit(client, keys, 1)
    (held,) = play.lease(client, keys)
    sample = make_sample(Job.from_bytes(held.body), 0, [1], 2)
    with pytest.raises(PayloadError, match=r"d/0/0/0: rollout.sides asks for routed_experts, and the sample has none"):
        await commits.submit(held.job, held.token, [sample], 1.0, "scaled")
    assert client.hget(keys.group(held.job), "c") == b"0"
    assert not left(client, keys)


async def test_what_is_evaluated_needs_no_side_array_that_training_asks_for(
    client: redis.Redis, keys: Keys, commits: Commits
) -> None:
    play.admit(client, keys, [Job("h/1/0", 1, prompt="a", lane=Lane.EVAL)], lane=Lane.EVAL, source="eval@1")
    (held,) = play.lease(client, keys)
    sample = make_sample(Job.from_bytes(held.body), 0, [1], 2)
    await commits.submit(held.job, held.token, [sample], 1.0, "scaled")
    assert client.hget(keys.group(held.job), "c") == b"1"


async def test_a_side_array_that_is_gone_before_the_cut_makes_a_lost_row(
    redis_server: RedisServer, client: redis.Redis, keys: Keys, tmp_path: Path, commits: Commits
) -> None:
    config = config_of(redis_server.url, keys, tmp_path)
    with Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 1)
        (held,) = play.lease(client, keys, version=1)
        await commit(commits, held, image=True)
        client.delete(keys.side(f"{held.job}/1", held.token, "image"))
        with buffering(config):
            batch = step(trainer)
    assert {row.k: row.lost for row in batch.all_rows} == {0: False, 1: True}
    assert play.counter(client, keys, "payload_lost") == 1


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 3), np.uint8), np.array(5, np.int64), np.eye(3, dtype=np.float16)[::2].T, np.array([True, False])],
)
def test_any_shape_comes_back(array: Any) -> None:
    data = sides.pack("x", array, "s")
    back = sides.unpack("x", data, "s", checksum_of(data))
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(back, array)


def forged(code: int, shape: list[int], body: bytes = b"") -> bytes:
    return struct.pack(f"<4sBB2x{len(shape)}Q", sides.MAGIC, code, len(shape), *shape) + body


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PS", "too few for any"),
        (b"????\x01\0\0\0\0", "does not begin as one"),
        (forged(99, [1], b"x"), "does not begin as one"),
        (forged(1, [1] * 9, b"x"), "does not begin as one"),
        (forged(1, [1])[:-1], "does not begin as one"),
        (forged(1, [2**64 - 1], b"x"), "do not fit its shape"),
        (forged(1, [2**40, 2**40]), "do not fit its shape"),
        (forged(1, [0, 2**62, 2**62]), "do not fit its shape"),
        (forged(1, [9], b"x" * 8), "do not fit its shape"),
        (forged(3, [1], b"x" * 3), "do not fit its shape"),
    ],
)
def test_bytes_that_penstock_did_not_write_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        sides.unpack("x", data, "s", checksum_of(data))


def test_another_array_than_the_committed_one_is_refused() -> None:
    with pytest.raises(PayloadError, match="its checksum differs"):
        sides.unpack("x", sides.pack("x", np.zeros(3), "s"), "s", 0)


def test_a_side_array_that_cannot_be_stored_is_a_sentence() -> None:
    with pytest.raises(PayloadError, match="is of object; convert it"):
        sides.pack("x", np.array([object()]), "d/0/0/0")
    with pytest.raises(PayloadError, match="'a:b' is not a name"):
        sides.pack("a:b", np.zeros(1), "d/0/0/0")
    with pytest.raises(PayloadError, match="17 side arrays are more than the 16 allowed"):
        sides.pack_all({str(i): np.zeros(1) for i in range(17)}, "d/0/0/0")
