"""Roles on one manifest and the columns that they write back (T13), on a real buffer and real payloads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, OwnershipLost, PayloadError, ProtocolError, WaitTimeout
from penstock.protocol.audit import audit
from penstock.records.causes import ColumnPending, RanksAbsent, RoleNotStarted
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import (
    PATIENCE_S,
    Player,
    admit,
    buffering,
    kill,
    make_config,
    publish,
    until,
    until_waits,
)

ROLES = ("actor", "critic")
GROUPS = 3


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Config:
    staleness = {"mode": "async", "bound": 20}
    return make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, trainer={"batch_groups": GROUPS})


@pytest.fixture
def buffer(config: Config) -> Iterator[None]:
    with buffering(config):
        yield


def actor(config: Config, **seat: Any) -> Trainer:
    return Trainer(config, roles=ROLES, **seat)


def critic(config: Config, **seat: Any) -> Trainer:
    return Trainer(config, role="critic", roles=ROLES, **seat)


def begin(trainer: Trainer, client: redis.Redis, keys: Keys, batches: int) -> None:
    """First version, and so many batches of it; answers of unlike lengths."""
    publish(trainer)
    admit(client, keys, batches * GROUPS)
    worker = Player(client, keys)
    for i, held in enumerate(worker.lease(batches * GROUPS, version=1)):
        assert worker.answer(held, [1], length=2 + i % 3).outcome == "ready"


def state_at(keys: Keys, n: int) -> dict[str, Any]:
    return {"run": keys.run, "subscription": "actor", "batch": n}


def values_of(batch: Any) -> Any:
    """[B, L] numbers that name sample and token."""
    data = batch.arrays()
    return (100 * data["rows"][:, None] + np.arange(data["tokens"].shape[1])).astype(np.float32)


def wanted_by(batch: Any) -> Any:
    """What ``values_of`` of all ranks leaves for this one."""
    data = batch.arrays()
    inside = np.arange(data["tokens"].shape[1]) < data["lengths"][:, None]
    return np.where(inside, values_of(batch), 0)


@pytest.mark.usefixtures("buffer")
def test_T13_a_batch_is_committed_when_every_rank_of_every_role_has_it_behind_it(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with (
        actor(config) as one,
        critic(config, dp_rank=0, dp_size=2) as left,
        critic(config, dp_rank=1, dp_size=2) as right,
    ):
        begin(one, client, keys, 2)
        batches = [trainer.next(timeout=PATIENCE_S) for trainer in (one, left, right)]
        assert len({batch.digest for batch in batches}) == 1
        assert [len(batch) for batch in batches] == [6, 3, 3]
        left.commit(batches[1])
        one.commit(batches[0])
        assert client.hget(keys.sub("actor"), "cursor") is None
        with pytest.raises(WaitTimeout, match=r"Not every rank committed batch 1 .*check rank 1 of role critic"):
            one.publish({"weight": torch.zeros(1)}, timeout=0.7)
        with ThreadPoolExecutor(1) as pool:
            published = pool.submit(publish, one)
            until_waits(
                client, keys, "trainer:actor", RanksAbsent, purpose="commit", batch=1, ranks=("rank 1 of role critic",)
            )
            right.commit(batches[2])
            assert published.result(PATIENCE_S) == 2
        assert client.hget(keys.sub("actor"), "cursor") == b"1"
        for act in (left.tick, lambda: publish(left)):
            with pytest.raises(ProtocolError, match="only role actor drives the clock"):
                act()
        again = [trainer.next(timeout=PATIENCE_S) for trainer in (one, left, right)]
        for trainer, batch in zip((one, left, right), again, strict=True):
            trainer.commit(batch)
        assert one.tick() == 3


@pytest.mark.usefixtures("buffer")
def test_T13_columns_reach_the_other_role_whatever_its_split(config: Config, client: redis.Redis, keys: Keys) -> None:
    with (
        actor(config, dp_rank=0, dp_size=2) as zero,
        actor(config, dp_rank=1, dp_size=2) as one,
        critic(config) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        begin(zero, client, keys, 1)
        halves, mine = [t.next(timeout=PATIENCE_S) for t in (zero, one)], other.next(timeout=PATIENCE_S)
        early = pool.submit(halves[0].get, "values")
        until_waits(client, keys, "trainer:actor", ColumnPending, column="values", batch=1, missing=3, rows=3)
        mine.put("values", torch.from_numpy(values_of(mine)))
        mine.put("baseline", torch.arange(6, dtype=torch.bfloat16))
        mine.put("top", np.stack([values_of(mine), values_of(mine) + 1], axis=-1))
        np.testing.assert_array_equal(early.result(PATIENCE_S), wanted_by(halves[0]))
        for half in halves:
            np.testing.assert_array_equal(half.get("values"), wanted_by(half))
            np.testing.assert_array_equal(half.get("baseline"), half.arrays()["rows"])
            top, inside = half.get("top"), wanted_by(half) > 0
            assert top.shape == (*half.arrays()["tokens"].shape, 2)
            np.testing.assert_array_equal(top[inside][:, 1] - top[inside][:, 0], 1)
            # Back by micro-batches, one layout each; the critic reads the whole.
            micros = half.packed(10) if half is halves[0] else list(half.micro_batches(max_samples=1))
            for micro in micros:
                half.put("logprobs", micro["logprobs"], micro=micro)
        np.testing.assert_allclose(mine.get("logprobs"), mine.arrays()["logprobs"])
        for micro in mine.packed(12):
            np.testing.assert_allclose(mine.get("logprobs", micro=micro), micro["logprobs"].numpy())
        assert client.ttl(next(iter(client.scan_iter(match=keys.of("column:actor:1:*"))))) > 0


@pytest.mark.usefixtures("buffer")
def test_T13_a_role_that_is_ahead_waits_for_the_others_to_commit_what_it_has_behind_it(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with actor(config, prefetch=1) as one, critic(config) as other, ThreadPoolExecutor(1) as pool:
        begin(one, client, keys, 2)
        slow = one.next(timeout=PATIENCE_S)  # the second is cut ahead of it
        fast = other.next(timeout=PATIENCE_S)
        fast.put("values", values_of(fast))
        other.commit(fast)
        ahead = other.next(timeout=PATIENCE_S)
        ahead.put("values", values_of(ahead))
        committed = pool.submit(other.commit, ahead)
        until_waits(client, keys, "trainer:actor/critic", RanksAbsent, ranks=("every rank of role actor",))
        assert not committed.done()
        np.testing.assert_array_equal(slow.get("values"), wanted_by(slow))
        one.commit(slow)
        committed.result(PATIENCE_S)
        publish(one)
        last = one.next(timeout=PATIENCE_S)
        np.testing.assert_array_equal(last.get("values"), wanted_by(last))
        with pytest.raises(ProtocolError, match="put columns before the commit"):
            ahead.put("late", values_of(ahead))
        one.commit(last)
        assert client.hget(keys.sub("actor"), "cursor") == b"2"


@pytest.mark.usefixtures("buffer")
def test_T13_what_cannot_be_a_column_is_refused(config: Config, client: redis.Redis, keys: Keys) -> None:
    with actor(config) as one, critic(config) as other:
        begin(one, client, keys, 2)
        batch, mine = one.next(timeout=PATIENCE_S), other.next(timeout=PATIENCE_S)
        longest = mine.arrays()["tokens"].shape[1]
        with pytest.raises(ProtocolError, match=rf"shape \(6, {longest + 1}\): batch 1 .* needs \[6, {longest}\] or"):
            mine.put("values", np.zeros((6, longest + 1), np.float32))
        with pytest.raises(ProtocolError, match=r"has unsupported dtype complex128"):
            mine.put("values", np.zeros((6, longest), np.complex128))
        with pytest.raises(ConfigError, match="column 'a b' is not a name"):
            mine.put("a b", values_of(mine))
        with pytest.raises(ProtocolError, match=r"rows .* which are not of this rank of batch 1"):
            mine.put("values", np.zeros(1), micro={"rows": np.array([77]), "lengths": np.array([1])})
        with pytest.raises(
            WaitTimeout, match=r"column values of batch 1, 6 of 6 rows, did not arrive within 0.1 s: check the role"
        ):
            batch.get("values", timeout=0.1)
        mine.put("values", values_of(mine))
        mine.put("values", values_of(mine))  # again the same: a repeated put after a lost reply
        with pytest.raises(
            ProtocolError, match=r"already has another value for sample d/0/.*as a column is written once"
        ):
            mine.put("values", values_of(mine) + 1)
        np.testing.assert_array_equal(batch.get("values"), wanted_by(batch))
        other.commit(mine)
        with pytest.raises(ProtocolError, match="this rank has committed the batch: put columns before the commit"):
            mine.put("late", values_of(mine))
        batch.put("reply", np.zeros(6))  # the actor has not
        one.commit(batch)
        with pytest.raises(ProtocolError, match="put columns before the commit"):
            batch.put("late", np.zeros(6))
        # Another batch of that number, as after a failover.
        second = other.next(timeout=PATIENCE_S) if publish(one) and one.next(timeout=PATIENCE_S) else None
        assert second is not None
        *earlier, (entry, fields) = client.xrange(keys.batches("actor"), max="2-0")
        client.delete(keys.batches("actor"))
        for one, kept in earlier:
            client.xadd(keys.batches("actor"), kept, id=one)
        client.xadd(keys.batches("actor"), {**fields, b"dg": b"f" * 24}, id=entry)
        with pytest.raises(ProtocolError, match="cannot be put on batch 2 of 'actor': Redis has another batch"):
            second.put("values", values_of(second))


@pytest.mark.usefixtures("buffer")
def test_a_damaged_column_is_refused(config: Config, client: redis.Redis, keys: Keys) -> None:
    with actor(config) as one, critic(config) as other:
        begin(one, client, keys, 1)
        batch, mine = one.next(timeout=PATIENCE_S), other.next(timeout=PATIENCE_S)
        mine.put("values", values_of(mine))
        key = next(iter(client.scan_iter(match=keys.of("column:actor:1:*"))))
        good = client.hget(key, 0)
        damages = [
            (good[:-1] + bytes([good[-1] ^ 1]), "is damaged: wrong checksum"),
            (good[:-4], "is damaged: wrong checksum"),
            (client.hget(key, 1), "is damaged: wrong checksum"),
            (b"????" + good[4:], "has an invalid header"),
            (b"", "invalid size of 0 bytes"),
        ]
        for bad, words in damages:
            client.hset(key, 0, bad)
            with pytest.raises(PayloadError, match=words):
                batch.get("values")


@pytest.mark.usefixtures("buffer")
def test_T13_what_the_writer_of_a_column_lost_is_named_and_counted(
    config: Config, client: redis.Redis, keys: Keys, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    template = str(tmp_path / "{rollout_id}.bin")
    recorded = config.model_copy(update={"debug": config.debug.model_copy(update={"save_batches": template})})
    with actor(recorded) as one, critic(config) as other:
        begin(one, client, keys, 1)
        batch = one.next(timeout=PATIENCE_S)
        batch.decode()
        gone = batch.rows[0].job
        assert client.delete(*client.scan_iter(match=keys.of(f"payload:{gone}/*")))
        mine = other.next(timeout=PATIENCE_S)
        assert mine.lost == [row.sample for row in mine.rows if row.job == gone]
        mine.put("values", values_of(mine))

        expected = np.where([[row.job == gone] for row in batch.rows], 0, wanted_by(batch))
        with pytest.raises(ProtocolError, match="was not read yet"):
            batch.no_value("values")
        np.testing.assert_array_equal(batch.get("values"), expected)
        assert batch.no_value("values").tolist() == [row.job == gone for row in batch.rows]
        for micro in batch.packed(20):
            batch.get("values", micro=micro)
            rows = [batch.all_rows[i].job if i >= 0 else gone for i in micro["rows"].tolist()]
            assert batch.no_value("values", micro=micro).tolist() == [job == gone for job in rows]
        assert batch.lost == []
    assert play.counter(client, keys, "column_lost") == 2, "once, however often it is read"
    assert f"column values of batch 1 has no value for 2 samples, including {gone}/0" in caplog.text

    with Trainer.replay(template) as replay:  # what was read is recorded with the batch
        again = replay.next()
        np.testing.assert_array_equal(again.get("values"), expected)
        assert again.no_value("values").tolist() == batch.no_value("values").tolist()


@pytest.mark.usefixtures("buffer")
def test_T13_columns_of_an_older_generation_are_not_read_and_their_writer_is_told(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with actor(config) as one, critic(config) as other, ThreadPoolExecutor(1) as pool:
        begin(one, client, keys, 1)
        one.next(timeout=PATIENCE_S)
        old = other.next(timeout=PATIENCE_S)
        old.put("values", values_of(old))
        waiting = pool.submit(old.get, "reply")
        until_waits(client, keys, "trainer:actor/critic", ColumnPending, column="reply", batch=1)
        one.load_state_dict(state_at(keys, 0))
        publish(one)
        with pytest.raises(OwnershipLost, match="Restore role critic from a checkpoint"):
            waiting.result(PATIENCE_S)
        again = one.next(timeout=PATIENCE_S)
        with pytest.raises(WaitTimeout):
            again.get("values", timeout=0.2)
        for act in (
            lambda: old.put("more", values_of(old)),
            lambda: other.commit(old),
            lambda: other.next(timeout=5),
        ):
            with pytest.raises(OwnershipLost):
                act()
        other.load_state_dict(state_at(keys, 0))
        new = other.next(timeout=PATIENCE_S)
        assert new.digest == old.digest
        new.put("values", values_of(new) + 1)
        np.testing.assert_array_equal(
            again.get("values"), np.where(wanted_by(again) > 0, wanted_by(again) + 1, again.get("values"))
        )
        one.commit(again)
        other.commit(new)
        assert publish(one) == 3


@pytest.mark.usefixtures("buffer")
def test_T13_a_role_restored_to_an_older_batch_trains_alone_what_the_others_have_committed(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with actor(config) as one:
        with critic(config) as other:
            begin(one, client, keys, 4)
            for _ in range(3):
                batch, mine = one.next(timeout=PATIENCE_S), other.next(timeout=PATIENCE_S)
                batch.put("returns", values_of(batch))
                mine.put("values", values_of(mine))
                batch.get("values")
                one.commit(batch)
                other.commit(mine)
                publish(one)
            one.state_dict()
            one.checkpointed()
            assert (client.hget(keys.sub("actor"), "ckpt") or b"0") == b"0", "role critic has no file yet"
            kill(other, client, owner=False)
        with critic(config) as other:
            other.load_state_dict(state_at(keys, 1))
            for n in (2, 3):
                mine = other.next(timeout=PATIENCE_S)
                assert mine.n == n
                np.testing.assert_array_equal(mine.get("returns"), wanted_by(mine))
                mine.put("values", values_of(mine) + 5)  # nobody needs them any more
                other.commit(mine)
                assert other.state_dict()["batch"] == n
            batch, mine = one.next(timeout=PATIENCE_S), other.next(timeout=PATIENCE_S)
            assert (batch.n, mine.n) == (4, 4)
            mine.put("values", values_of(mine))
            np.testing.assert_array_equal(batch.get("values"), wanted_by(batch))
            one.commit(batch)
            other.commit(mine)
            publish(one)
            other.state_dict()
            other.checkpointed()
            until(lambda: client.hget(keys.sub("actor"), "ckpt") == b"3", "what both have in a file")
            one.state_dict()
            one.checkpointed()
            until(lambda: play.counter(client, keys, "retired") == 4 * GROUPS)
            until(
                lambda: not list(client.scan_iter(match=keys.of("column:actor:*"))),
                "columns are freed with their batches",
            )
            assert not client.exists(keys.columns("actor"))
        assert audit(client, keys).ok


@pytest.mark.usefixtures("buffer")
def test_T13_a_rewind_takes_back_what_every_role_has_in_a_file(config: Config, client: redis.Redis, keys: Keys) -> None:
    """Else the file of one role before the rewind would stand for one that it never wrote after it."""
    with actor(config) as one, critic(config) as other:
        begin(one, client, keys, 3)

        def train() -> None:
            for trainer in (one, other):
                trainer.commit(trainer.next(timeout=PATIENCE_S))
            publish(one)

        train()
        train()
        other.state_dict()
        other.checkpointed()  # batch 2
        one.load_state_dict(state_at(keys, 0))
        publish(one)
        other.load_state_dict(state_at(keys, 0))
        train()
        one.state_dict()
        one.checkpointed()  # batch 1, of which role critic has no file in this lineage
        assert client.hget(keys.sub("actor"), "ckpt") == b"0"
        other.state_dict()
        other.checkpointed()
        assert client.hget(keys.sub("actor"), "ckpt") == b"1"


@pytest.mark.usefixtures("buffer")
def test_T13_a_role_waits_for_the_driving_one_to_begin_and_refuses_what_it_has_not_seen(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    with actor(config) as one:
        begin(one, client, keys, 2)
        one.load_state_dict(state_at(keys, 0))
        publish(one)
        with critic(config) as other, ThreadPoolExecutor(1) as pool:
            other.load_state_dict(state_at(keys, 1))
            waiting = pool.submit(other.next)
            until_waits(client, keys, "trainer:actor/critic", RoleNotStarted, role="actor")
            one.next(timeout=PATIENCE_S)
            with pytest.raises(
                ProtocolError, match="Role critic was restored at batch 1, but role actor continues from batch 0"
            ):
                waiting.result(PATIENCE_S)


def test_roles_that_cannot_be_are_refused(config: Config, client: redis.Redis, keys: Keys) -> None:
    with pytest.raises(ConfigError, match=r"role 'judge' is not in roles \(actor, critic"):
        Trainer(config, role="judge", roles=ROLES)
    with pytest.raises(ConfigError, match=r"is not in roles \(none\)"):
        Trainer(config, role="judge")
    with pytest.raises(ConfigError, match="list each role once"):
        Trainer(config, roles=("a", "a"))
    with buffering(config), actor(config) as one:
        begin(one, client, keys, 1)
        one.next(timeout=PATIENCE_S)
        with Trainer(config, role="judge", roles=("actor", "judge")) as stranger:
            batch = stranger.next(timeout=PATIENCE_S)
            with pytest.raises(ProtocolError, match="has no role 'judge': pass the same roles to all its trainers"):
                stranger.commit(batch)
