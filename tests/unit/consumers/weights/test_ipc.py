"""What cuda_ipc sends to whom, without a GPU: handles and their posts are stood in for."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config import TrainerConfig
from penstock.consumers.weights import ipc
from penstock.consumers.weights.sources import Bucket
from penstock.protocol.transfers import Enrollment

#: What becomes of the engine that does not hold still.
LATE = ("end", "c", "it did not freeze its engine in time")


class Transfer:
    """Three engines, of which one does not hold still."""

    def __init__(self) -> None:
        self.publication = SimpleNamespace(version=7)
        self.timeout_s = 1.0
        self.workers = {name: Enrollment(name, f"http://127.0.0.1:{i}", i) for i, name in enumerate("abc", start=1)}
        self.did: list[tuple[str, ...]] = []

    def decide(self) -> None:
        self.did.append(("decide",))

    def await_held(self) -> dict[str, str]:
        self.did.append(("held",))
        return {name: f"http://127.0.0.1:9/{name}" for name in "ab"}

    def buckets(self) -> Iterator[Bucket]:
        for number in range(3):
            yield [(str(number), torch.zeros(1))]

    def end(self, worker: str, why: str = "") -> None:
        self.did.append(("end", worker, why))


def test_each_bucket_goes_to_engines_that_hold_still_and_the_version_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, list[str], str | None]] = []

    def send(bucket: Any, engines: dict[str, tuple[str, int]], version: str | None, timeout_s: float) -> dict[str, str]:
        sent.append((bucket[0][0], sorted(engines), version))
        return {"b": "out of memory"} if bucket[0][0] == "1" else {}

    monkeypatch.setattr(ipc, "send", send)
    transfer: Any = Transfer()

    ipc.CudaIpc(TrainerConfig()).send(transfer)

    assert sent == [("0", ["a", "b"], None), ("1", ["a", "b"], None), ("2", ["a"], "7")]
    assert transfer.did == [("decide",), ("held",), LATE, ("end", "b", "out of memory"), ("end", "a", "")]


def test_a_worker_that_is_late_is_let_go_before_the_others_are_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not said that it holds still, will do so later, and then waits to be told how it ended."""
    known: list[list[tuple[str, ...]]] = []
    transfer: Any = Transfer()

    def send(*_: object) -> dict[str, str]:
        known.append(list(transfer.did))
        return {}

    monkeypatch.setattr(ipc, "send", send)

    ipc.CudaIpc(TrainerConfig()).send(transfer)

    assert known[0] == [("decide",), ("held",), LATE]
    assert sorted(entry[1] for entry in transfer.did if entry[0] == "end") == ["a", "b", "c"], "each is told once"


def test_nobody_is_told_that_it_went_well_when_the_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: Any) -> dict[str, str]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ipc, "send", send)
    transfer: Any = Transfer()

    with pytest.raises(torch.OutOfMemoryError):
        ipc.CudaIpc(TrainerConfig()).send(transfer)

    assert transfer.did == [("decide",), ("held",), LATE]


def test_why_an_engine_was_not_reached_does_not_say_where_whoever_knows_it_may_write() -> None:
    why = ipc._post("http://127.0.0.1:1/nobody-guesses", {}, 1.0)
    assert why.startswith("http://127.0.0.1:1/update_weights")
    assert "nobody-guesses" not in why
