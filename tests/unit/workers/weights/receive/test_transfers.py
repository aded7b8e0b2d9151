"""Which transports a worker takes, by its own configuration."""

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, EngineError, ProtocolError, PublishError
from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from penstock.protocol.transfers import Decision
from workers.weights.receive.receiver import Receiver
from workers.weights.receive.transfers import Transfers, take


class Takes(Receiver):
    async def receive(self, arrival: Any) -> str:
        return ""


class Sends:
    receiver = f"{__name__}:Takes"


class Forgets:
    pass


class SendsToNobody:
    receiver = "json:loads"


def transfers(named: str) -> Transfers:
    any_: Any = None
    return Transfers(
        any_, Keys("run"), "w", named=named, control=any_, reader=any_, waiting=any_, timeout_s=1.0, birth=lambda: 0
    )


def by(transport: str) -> Publication:
    return Publication(model="policy", version=1, transport=transport, path="/weights")


@pytest.mark.parametrize("named", ["disk", f"{__name__}:Sends"])
def test_penstocks_own_are_taken_whatever_is_configured(named: str) -> None:
    for transport in ("disk", "nccl", "gloo", "cuda_ipc", "checkpoint_engine"):
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


@pytest.mark.parametrize("kind", [ValueError, PublishError, EngineError, ProtocolError])
async def test_whatever_a_receiver_raises_the_trainer_learns_why_and_the_folder_is_loaded(
    kind: type[Exception],
) -> None:
    class Broken(Receiver):
        async def receive(self, arrival: Any) -> str:
            raise kind("the wire is broken")

    answers: list[str] = []

    class Asked:
        decision = Decision("1-0", {"w": 0}, "mine:Own")

        async def answer(self, why: str) -> None:
            answers.append(why)

    any_: Any = None
    asked: Any = Asked()
    assert not await take(Broken(any_, lambda: 0), asked)
    assert len(answers) == 1
    assert "the wire is broken" in answers[0]
