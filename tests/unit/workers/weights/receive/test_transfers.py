"""Which transports a worker takes, by its own configuration."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError, EngineError, ProtocolError, PublishError
from penstock.protocol.transfers import Decision
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.weights.index import INDEX_FILE, WeightsIndex, digest, layout_digest
from penstock.workers.weights.folders import FolderToCome
from penstock.workers.weights.receive.arrival import NotBegun, NotSent
from penstock.workers.weights.receive.receiver import Receiver
from penstock.workers.weights.receive.transfers import Transfers, take


class Takes(Receiver):
    async def receive(self, arrival: Any) -> str:
        return ""


class Sends:
    receiver = f"{__name__}:Takes"


class Forgets:
    pass


class SendsToNobody:
    receiver = "json:loads"


def transfers(named: str, num_ranks: int = 0) -> Transfers:
    any_: Any = None
    engine: Any = SimpleNamespace(info=SimpleNamespace(num_ranks=num_ranks))
    return Transfers(
        engine,
        Keys("run"),
        "w",
        named=named,
        control=any_,
        reader=any_,
        waiting=any_,
        timeout_s=1.0,
        birth=lambda: 0,
        instead=any_,
    )


def by(transport: str) -> Publication:
    return Publication(model="policy", version=1, transport=transport, path="/weights")


@pytest.mark.parametrize("named", ["disk", f"{__name__}:Sends"])
def test_penstocks_own_are_taken_whatever_is_configured(named: str) -> None:
    for transport in ("disk", "nccl", "gloo", "cuda_ipc"):
        transfers(named).check(by(transport))


def test_a_users_own_is_taken_where_the_worker_names_it() -> None:
    name = f"{__name__}:Sends"
    mine = transfers(name)
    mine.check(by(name))
    assert isinstance(mine.receiver(name), Takes)


@pytest.mark.parametrize("transport", ["chosen_in_redis:Code", "pigeon"])
def test_a_record_does_not_choose_what_is_imported(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chosen_in_redis.py").write_text("class Code: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PublishError, match=f"is by '{transport}', and this worker's trainer.transport is gloo"):
        transfers("gloo").check(by(transport))
    assert "chosen_in_redis" not in sys.modules


@pytest.mark.parametrize(
    ("attribute", "says"),
    [("Forgets", "names no receiver: write receiver ="), ("SendsToNobody", "derive its class from penstock.Receiver")],
)
def test_a_sender_without_its_other_side_is_refused_at_the_start(attribute: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        transfers(f"{__name__}:{attribute}")


WHOLE = Publication(model="policy", version=1, transport="mine:Own", path="/weights", index="i")
BARE = Publication(model="policy", version=1, transport="mine:Own", path="", layout="l")
LATER = Publication(model="policy", version=2, transport="mine:Own", path="/later", index="j")


async def taken(publication: Publication, receive: Callable[[Any], Awaitable[str]]) -> tuple[Any, list[str], bool]:
    """What has to be loaded, what the trainer learned, and whether the engine's weights may be partly new."""

    class Made(Receiver):
        async def receive(self, arrival: Any) -> str:
            assert engine.is_receiving
            return await receive(arrival)

    answers: list[str] = []

    async def answer(why: str) -> None:
        answers.append(why)

    async def instead(asked: Publication) -> Publication:
        return asked if asked.is_whole else LATER

    any_: Any = None
    engine: Any = SimpleNamespace(is_receiving=False)
    arrival: Any = SimpleNamespace(
        decision=Decision("1-0", {"w": 0}, "mine:Own"), publication=publication, answer=answer
    )
    try:
        found: Any = await take(Made(any_, lambda: 0), arrival, instead, engine)
    except FolderToCome as exc:
        found = exc
    return found, answers, engine.is_receiving


@pytest.mark.parametrize("kind", [ValueError, PublishError, EngineError, ProtocolError])
@pytest.mark.parametrize(("publication", "loaded"), [(WHOLE, WHOLE), (BARE, LATER)])
async def test_whatever_a_receiver_raises_the_trainer_learns_why_and_a_folder_is_loaded(
    kind: type[Exception], publication: Publication, loaded: Publication
) -> None:
    async def broken(_: Any) -> str:
        raise kind("the wire is broken")

    found, answers, is_mixed = await taken(publication, broken)
    assert found == loaded
    assert is_mixed
    assert len(answers) == 1
    assert "the wire is broken" in answers[0]


@pytest.mark.parametrize(("publication", "loaded"), [(WHOLE, WHOLE), (BARE, FolderToCome)])
async def test_an_engine_to_which_nothing_was_sent_has_what_it_had(publication: Publication, loaded: Any) -> None:
    async def silent(_: Any) -> str:
        raise NotBegun("the trainer did not send it in time")

    found, answers, is_mixed = await taken(publication, silent)
    assert found == loaded or type(found) is loaded
    assert is_mixed == (publication is WHOLE)
    assert answers == ["the trainer did not send it in time"]


@pytest.mark.parametrize("publication", [WHOLE, BARE])
async def test_an_engine_that_was_sent_half_loads_a_folder(publication: Publication) -> None:
    async def half(_: Any) -> str:
        raise NotSent("the trainer fell silent")

    found, *_ = await taken(publication, half)
    assert found == (WHOLE if publication is WHOLE else LATER)


async def test_only_what_is_known_is_taken_without_a_folder(tmp_path: Path) -> None:
    index = WeightsIndex([["a", "float32", [2, 3], 7, "model.safetensors"]], {}).to_bytes()
    (tmp_path / INDEX_FILE).write_bytes(index)
    mine = transfers("gloo", num_ranks=1)
    sent = replace(BARE, transport="gloo", layout=layout_digest([("a", "float32", (2, 3))]))
    assert not mine.may_take(sent)
    await mine.learn(replace(WHOLE, path=str(tmp_path), index=digest(index)))
    assert mine.may_take(sent)
    assert not mine.may_take(replace(sent, layout=layout_digest([("a", "float32", (3, 2))])))
    assert not mine.may_take(replace(sent, layout=""))
