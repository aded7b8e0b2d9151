"""Prompts under way side by side, on a real buffer; the worker's part is played."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.config import Config
from penstock.consumers.adapters.asking import Answer, Asking
from penstock.consumers.adapters.prompts import Request
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol import scripts
from penstock.protocol.audit import audit
from penstock.protocol.scripts import RawLease, run
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play
from tests.integration.parts import Player, buffering, make_config, publish, until


@pytest.fixture
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> Iterator[Config]:
    config = make_config(redis_server.url, keys.run, tmp_path)
    with buffering(config):
        yield config


def lease(worker: Player, count: int) -> list[RawLease]:
    held: list[RawLease] = []
    until(lambda: held.extend(worker.lease(count - len(held), version=worker.clock)) or len(held) == count, "leases")
    return held


def come(asking: Asking, count: int) -> list[Answer]:
    found: list[Answer] = []
    until(lambda: found.extend(asking.poll(0.1)) or len(found) >= count, "answers")
    return found


def test_an_answer_comes_as_soon_as_its_worker_is_done_whatever_was_asked_before(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    worker = Player(client, keys)
    with Asking(config) as asking:
        assert asking.poll(0.1) == []
        assert publish(asking) == 1
        first, second = asking.submit([Request(prompt="a"), Request(prompt="b", n=2)])
        held = {one.job: one for one in lease(worker, 2)}
        worker.answer(held[second], [1])
        [answer] = come(asking, 1)
        assert (answer.job, [row.row.k for row in answer.rows], answer.error) == (second, [0, 1], None)
        [third] = asking.submit([Request(prompt="c")])
        [late] = lease(worker, 1)
        worker.answer(late, [1])
        assert [answer.job for answer in come(asking, 1)] == [third]
        worker.answer(held[first], [1])
        assert [answer.job for answer in come(asking, 1)] == [first]
        assert asking.num_live == 0
        until(lambda: play.counter(client, keys, "retired") == 3)
    assert audit(client, keys).ok


def test_what_is_taken_back_is_never_handed_out_and_what_comes_after_it_is(
    config: Config, client: redis.Redis, keys: Keys
) -> None:
    worker = Player(client, keys)
    with Asking(config) as asking:
        publish(asking)
        jobs = asking.submit([Request(prompt=text) for text in "abc"])
        held = {one.job: one for one in lease(worker, 3)}
        worker.answer(held[jobs[0]], [1])  # its batch may be cut, and is not read
        assert asking.abort() == jobs
        assert asking.poll(0.1) == []
        assert publish(asking) == 2
        [again] = asking.submit([Request(prompt="a")])
        [one] = lease(worker, 1)
        assert one.job == again
        worker.answer(one, [2])
        [answer] = come(asking, 1)
        assert (answer.job, answer.rows[0].row.oldest) == (again, 2)
        until(lambda: play.counter(client, keys, "retired") >= 1)
        assert play.counter(client, keys, "cancelled") >= 2
    assert audit(client, keys).ok


def test_a_prompt_that_fails_fails_alone(config: Config, client: redis.Redis, keys: Keys) -> None:
    worker = Player(client, keys)
    with Asking(config) as asking:
        publish(asking)
        buried, hot, fine = asking.submit([Request(prompt=text) for text in "abc"])
        held = {one.job: one for one in lease(worker, 3)}
        why = {"reason": "refused", "detail": "too long", "max_attempts": 0, "retry_ms": 0}
        assert run(client, scripts.fail(keys, buried, held[buried].token, "w1", **why)) == "dead"
        worker.answer(held[hot], [1], temperature=0.5)
        worker.answer(held[fine], [1])
        answers = {answer.job: answer for answer in come(asking, 3)}
        assert isinstance(answers[buried].error, ProtocolError)
        assert "refused: too long" in str(answers[buried].error)
        assert isinstance(answers[hot].error, ConfigError)
        assert "temperature 0.5" in str(answers[hot].error)
        assert answers[fine].error is None
