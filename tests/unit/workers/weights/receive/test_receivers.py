"""What each receiver asks of its engine, and what it hears from the trainer; a GPU has the rest."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocol.transfers import Decision
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.workers.weights.receive.ipc import CudaIpc
from penstock.workers.weights.receive.receive import Arrival, NotSent, Receiver


class FromFolder(Receiver):
    """A transport of a user's own, whose sender names a folder."""

    async def receive(self, arrival: Arrival) -> str:
        return await arrival.post("/update_weights_from_disk", {"model_path": await arrival.told()})


class Redis:
    """A transfer's hash as the trainer has it, and what the worker reports."""

    def __init__(self, *, over: bool = False, **fields: str) -> None:
        self.fields = {"id": "4-0"} | fields
        self.over = over
        self.reports: list[tuple[str, str]] = []

    async def call(self, call: Any) -> bool:
        self.reports.append((call.args[2], call.args[3]))
        return not self.over

    async def do(self, work: Any) -> list[bytes | None]:
        return work(self)  # type: ignore[no-any-return]

    def hmget(self, key: str, names: list[str]) -> list[bytes | None]:
        said = [self.fields.get(name.partition(":")[0]) for name in names]
        return [None if text is None else text.encode() for text in said]


class Engine:
    def __init__(self) -> None:
        self.url = "http://127.0.0.1:1"
        self.posts: list[tuple[str, dict[str, Any]]] = []

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        self.posts.append((path, body))
        return {"success": True}


def receiving(kind: type[Receiver], redis: Redis, timeout_s: float = 1.0) -> tuple[Receiver, Arrival, Engine]:
    engine: Any = Engine()
    trainer = SimpleNamespace(transfer_timeout_s=timeout_s)
    services: Any = SimpleNamespace(
        worker="w", engine=engine, keys=Keys("run"), control=redis, config=SimpleNamespace(trainer=trainer)
    )
    publication = Publication(model="policy", version=4, transport="any", path="/weights")
    arrival = Arrival(services, publication, Decision("4-0", {"w": 0}, "any"))
    return kind(engine, lambda: 0), arrival, engine


@pytest.mark.parametrize(("fields", "failure"), [({"s": ""}, ""), ({"s": "out of memory"}, "out of memory")])
async def test_by_cuda_ipc_the_trainer_writes_and_says_how_it_went(fields: dict[str, str], failure: str) -> None:
    redis = Redis(**fields)
    receiver, arrival, engine = receiving(CudaIpc, redis)
    assert await receiver.receive(arrival) == failure
    ((field, url),) = redis.reports
    assert field == "f:w"
    assert url.startswith("http://127.0.0.1:"), "its inlet"
    assert url != engine.url
    assert engine.posts == []


async def test_by_cuda_ipc_an_engine_elsewhere_is_named_to_the_trainer_which_refuses_it() -> None:
    redis = Redis(s="http://h:1 is not on this machine")
    receiver, arrival, engine = receiving(CudaIpc, redis)
    engine.url = "http://me:hush@h:1"
    assert await receiver.receive(arrival) == "http://h:1 is not on this machine"
    assert redis.reports == [("f:w", "http://me:***@h:1")]


async def test_a_trainer_that_is_silent_has_not_sent() -> None:
    # Twice this and the margin is no time at all.
    receiver, arrival, _ = receiving(CudaIpc, Redis(), timeout_s=-2.5)
    with pytest.raises(NotSent, match="did not send it in time"):
        await receiver.receive(arrival)


@pytest.mark.parametrize("redis", [Redis(over=True), Redis(id="5-0", s="")])
async def test_an_engine_is_not_held_still_for_a_transfer_that_is_over(redis: Redis) -> None:
    """Its trainer was taken over, say: what it still writes is refused, and what is told is of another version."""
    receiver, arrival, _ = receiving(CudaIpc, redis, timeout_s=1000.0)
    with pytest.raises(NotSent, match="began another transfer"):
        await receiver.receive(arrival)


async def test_a_receiver_gets_the_text_that_its_sender_reported() -> None:
    redis = Redis(h="/dev/shm/weights")
    receiver, arrival, engine = receiving(FromFolder, redis)
    assert await receiver.receive(arrival) == ""
    assert engine.posts == [("/update_weights_from_disk", {"model_path": "/dev/shm/weights"})]
    await arrival.answer("")
    assert redis.reports == [("f:w", ""), ("r:w", "")]


async def test_a_trainer_that_gave_up_is_not_answered() -> None:
    redis = Redis(s="the disk is full")
    receiver, arrival, _ = receiving(FromFolder, redis)
    with pytest.raises(NotSent, match="the disk is full"):
        await receiver.receive(arrival)
    await arrival.answer("")
    assert redis.reports == [("f:w", "")]
