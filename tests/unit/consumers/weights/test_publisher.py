"""What a publisher does before a version is published."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import Config, TrainerConfig
from penstock.consumers.weights import publisher
from penstock.consumers.weights.sender import Sender, Transfer
from penstock.protocol.presence import WorkerPresence, WorkerState
from penstock.records.keys import Keys
from penstock.records.publication import Publication


def test_a_sender_sets_its_process_up_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of one's own calls nothing else: NCCL would have other settings than the engines' otherwise."""
    did: list[str] = []

    class Own(Sender):
        @classmethod
        def set_up(cls) -> None:
            did.append("set up")

        def __init__(self, config: TrainerConfig) -> None:
            super().__init__(config)
            did.append("made")

        def send(self, transfer: Transfer) -> None: ...

    monkeypatch.setattr(publisher, "sender_of", lambda name: {"nccl": Own}[name])
    values = {"run": "x", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}}
    config = Config.model_validate(values | {"trainer": {"transport": "nccl", "device": "cuda"}})
    unused: Any = SimpleNamespace(
        keys=Keys("x"), control=None, waiting=None, model="policy", seat=SimpleNamespace(leads=False)
    )

    made = publisher.Publisher(config, unused, unused, unused)

    assert isinstance(made.sender, Own)
    assert did == ["set up", "made"]


def test_a_sender_that_cannot_end_keeps_nobody_from_it() -> None:
    class Stuck(Sender):
        def send(self, transfer: Transfer) -> None: ...

        def abandon(self) -> None:
            raise RuntimeError("the device is gone")

    made: Any = publisher.Publisher.__new__(publisher.Publisher)
    made.sender, made.writer, made._serving = Stuck(TrainerConfig()), SimpleNamespace(close=lambda: None), None
    made.close()


def test_a_worker_that_has_the_weights_already_is_not_waited_for_by_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine takes the number of the version without a transfer, so it never enrolls."""
    shown = [
        WorkerPresence(name=f"w.{version}", version=version, state=WorkerState.SERVING, ranks=1) for version in (2, 3)
    ]
    monkeypatch.setattr(publisher, "live_workers", lambda client, keys: shown)
    made: Any = publisher.Publisher.__new__(publisher.Publisher)
    made._control, made._keys = SimpleNamespace(do=lambda work: work(None)), Keys("x")
    assert made._ready(Publication("policy", 3, "nccl", "/v3"), 0) == {"w.2"}
