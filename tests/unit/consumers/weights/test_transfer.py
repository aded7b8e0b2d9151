"""Whatever becomes of a transfer, nobody is left waiting in it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config import TrainerConfig
from penstock.consumers.weights.sender import Sender, Transfer, TransferFailed, deliver
from penstock.consumers.weights.sources import Bucket
from penstock.errors import EngineError, ProtocolError, PublishError, QueueUnavailable
from penstock.protocol.transfers import Decision, Enrollment
from penstock.records.keys import Keys
from penstock.records.publication import Publication


class Redis:
    """Takes down what is decided and reported."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self.decisions: list[Decision] = []
        self.reports: list[tuple[str, str]] = []
        self.fields: dict[str, bytes] = {"id": b"3-0"}

    def do(self, work: Any) -> list[bytes | None]:
        return work(self)  # type: ignore[no-any-return]

    def hmget(self, key: str, names: list[str]) -> list[bytes | None]:
        return [self.fields.get(name) for name in names]

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return {name.encode(): value for name, value in self.fields.items()}

    def call(self, call: Any) -> bool:
        if len(call.args) == 3:
            self.decisions.append(Decision.from_bytes(call.args[2]))
        else:
            self.reports.append((call.args[2], call.args[3]))
        return self.is_open


def a_transfer(redis: Redis, walk: Iterator[Bucket] | None = None) -> Transfer:
    publication = Publication(model="policy", version=3, transport="cuda_ipc", path="/weights")
    control: Any = redis
    waiting: Any = SimpleNamespace(end=lambda: None)
    transfer = Transfer(
        publication, TrainerConfig(), walk or iter(()), keys=Keys("run"), control=control, waiting=waiting
    )
    transfer.workers = {name: Enrollment(name, "http://127.0.0.1:1", 1) for name in ("a", "b")}
    return transfer


def buckets(count: int, failure: Exception | None = None) -> Iterator[Bucket]:
    for number in range(count):
        yield [(str(number), torch.zeros(1))]
    if failure is not None:
        raise failure


def test_a_sender_that_fails_before_it_decided_lets_workers_go() -> None:
    redis = Redis()
    a_transfer(redis).close("no room")
    assert redis.decisions == [Decision("3-0")]
    assert redis.reports == []


def test_a_sender_that_fails_later_tells_who_still_waits() -> None:
    redis = Redis()
    transfer = a_transfer(redis)
    transfer.decide()
    transfer.end("a", "its engine is gone")
    transfer.close("out of memory")
    assert [sorted(one.ranks) for one in redis.decisions] == [["a", "b"]]
    assert redis.reports == [("s:a", "its engine is gone"), ("s:b", "out of memory")]


def test_workers_that_were_left_out_are_not_waited_for() -> None:
    redis = Redis()
    transfer = a_transfer(redis)
    transfer.decide({"a": 1})
    redis.fields = {"id": b"3-0", "r:a": b""}
    transfer.await_received()
    redis.fields = {"id": b"3-0", "r:a": b"no room"}
    with pytest.raises(TransferFailed, match="worker a did not take the weights: no room"):
        transfer.await_received()


def test_a_version_that_was_overtaken_is_not_sent() -> None:
    with pytest.raises(TransferFailed, match="another version took its place"):
        a_transfer(Redis(is_open=False)).decide()


def test_T1_what_workers_say_of_another_version_is_not_heard() -> None:
    """A trainer that stood still goes on: its successor sends by now, and workers answer that one."""
    redis, of_b = Redis(), Enrollment("b", "http://127.0.0.1:2", 1)
    transfer = a_transfer(redis)
    transfer.decide()
    redis.fields = {"id": b"4-0", "m:b": of_b.to_bytes(), "f:a": b"", "f:b": b"", "r:a": b"", "r:b": b""}
    for wait in (transfer.await_held, transfer.await_received):
        with pytest.raises(TransferFailed, match="another version took its place"):
            wait()
    transfer.workers = {}
    transfer.await_workers(lambda: {"b"})
    assert transfer.workers == {}


def test_the_walk_is_gone_to_its_end_for_the_other_ranks() -> None:
    walk = buckets(3)
    transfer = a_transfer(Redis(), walk)
    for _ in transfer.buckets():
        break
    transfer.close("the first bucket failed")
    assert next(walk, None) is None


def test_what_the_source_raises_is_not_taken_for_a_failed_transfer() -> None:
    transfer = a_transfer(Redis(), buckets(1, RuntimeError("a rank is gone")))
    with pytest.raises(RuntimeError):
        list(transfer.buckets())
    with pytest.raises(RuntimeError, match="a rank is gone"):
        transfer.close("the weights could not be sent")


@pytest.mark.parametrize("kind", [ValueError, PublishError, EngineError, ProtocolError])
def test_whatever_a_sender_raises_its_version_goes_by_disk_and_workers_learn_why(kind: type[Exception]) -> None:
    class Broken(Sender):
        def send(self, transfer: Transfer) -> None:
            transfer.decide()
            raise kind("the wire is broken")

    redis = Redis()
    transfer = a_transfer(redis)
    failure = deliver(Broken(TrainerConfig()), transfer)
    transfer.close(failure)
    assert "the wire is broken" in failure
    assert redis.reports == [("s:a", failure), ("s:b", failure)]


@pytest.mark.parametrize("kind", [ValueError, QueueUnavailable])
def test_workers_learn_of_a_failure_whatever_clearing_it_away_raises(kind: type[Exception]) -> None:
    class Gone(Sender):
        def send(self, transfer: Transfer) -> None:
            transfer.decide()
            raise kind("the device is gone")

        def abandon(self) -> None:
            raise RuntimeError("nothing can be dropped there")

    redis = Redis()
    transfer = a_transfer(redis)
    if kind is QueueUnavailable:
        with pytest.raises(QueueUnavailable, match="the device is gone"):
            deliver(Gone(TrainerConfig()), transfer)
        return
    transfer.close(deliver(Gone(TrainerConfig()), transfer))
    assert [who for who, _ in redis.reports] == ["s:a", "s:b"]
