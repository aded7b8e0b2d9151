"""Which transports a worker takes, by its own configuration."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError, EngineError, ProtocolError, PublishError
from penstock.records.publication import Publication
from penstock.weights.index import INDEX_FILE, WeightsIndex, digest, layout_digest
from penstock.workers.engine import NotBegun, Partial
from penstock.workers.weights.receive.receive import NotSent, Receiver, Transfers, receive


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
    services: Any = SimpleNamespace(
        engine=SimpleNamespace(info=SimpleNamespace(num_ranks=num_ranks)),
        config=SimpleNamespace(trainer=SimpleNamespace(transport=named)),
        births=0,
    )
    return Transfers(services, any_, any_)


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


async def received(receive_weights: Callable[[Any], Awaitable[str]]) -> tuple[type[Exception] | None, list[str], bool]:
    """What the loop learns, what the trainer learns, and whether the engine's weights may be partly new."""

    class Made(Receiver):
        async def receive(self, arrival: Any) -> str:
            assert engine.is_receiving
            return await receive_weights(arrival)

    answers: list[str] = []

    async def answer(why: str) -> None:
        answers.append(why)

    any_: Any = None
    engine: Any = SimpleNamespace(is_receiving=False)
    arrival: Any = SimpleNamespace(publication=WHOLE, answer=answer)
    try:
        await receive(Made(any_, lambda: 0), arrival, engine)
    except (NotBegun, Partial) as exc:
        return type(exc), answers, engine.is_receiving
    return None, answers, engine.is_receiving


@pytest.mark.parametrize("kind", [ValueError, PublishError, EngineError, ProtocolError])
async def test_whatever_a_receiver_raises_the_trainer_learns_why_and_the_weights_count_as_mixed(
    kind: type[Exception],
) -> None:
    async def broken(_: Any) -> str:
        raise kind("the wire is broken")

    found, answers, is_mixed = await received(broken)
    assert (found, is_mixed, len(answers)) == (Partial, True, 1)
    assert "the wire is broken" in answers[0]


@pytest.mark.parametrize(("has_begun", "kind"), [(True, Partial), (False, NotBegun)])
async def test_an_engine_to_which_nothing_was_sent_has_what_it_had(has_begun: bool, kind: type[Exception]) -> None:
    async def silent(_: Any) -> str:
        raise NotSent("the trainer fell silent", has_begun=has_begun)

    assert await received(silent) == (kind, ["the trainer fell silent"], has_begun)


async def test_a_refused_bucket_leaves_mixed_weights_and_an_engine_that_has_all_is_done() -> None:
    async def refused(_: Any) -> str:
        return "bucket 2 of 3: out of memory"

    async def complete(_: Any) -> str:
        return ""

    assert await received(refused) == (Partial, ["bucket 2 of 3: out of memory"], True)
    found, answers, _ = await received(complete)
    assert (found, answers) == (None, [""])


async def test_only_what_is_known_is_taken_without_a_folder(tmp_path: Path) -> None:
    index = WeightsIndex([["a", "float32", [2, 3], "model.safetensors"]], {}).to_bytes()
    (tmp_path / INDEX_FILE).write_bytes(index)
    mine = transfers("gloo", num_ranks=1)
    sent = replace(BARE, transport="gloo", layout=layout_digest([("a", "float32", (2, 3))]))
    assert not mine.may_take(sent)
    await mine.learn(replace(WHOLE, path=str(tmp_path), index=digest(index)))
    assert mine.may_take(sent)
    assert not mine.may_take(replace(sent, layout=layout_digest([("a", "float32", (3, 2))])))
    assert not mine.may_take(replace(sent, layout=""))
