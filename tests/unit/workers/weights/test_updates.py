"""What a publication that this worker may not take does to its engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocol.keys import Keys
from penstock.protocol.records.publication import Publication
from workers.weights import updates
from workers.weights.updates import Updates


class Redis:
    """Has one publication."""

    def __init__(self, publication: Publication) -> None:
        self.entries = [(b"1-0", {b"p": publication.to_bytes()})]

    async def do(self, work: Any) -> Any:
        return await work(self)

    async def xrevrange(self, key: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self.entries


async def test_memory_that_is_wanted_back_waits_for_weights_that_may_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that is refused costs no engine: its weights are still to come, and the next version may be good."""
    monkeypatch.setattr(updates, "RETRY_S", 0.0)
    lost: list[int] = []
    waits: list[str] = []
    services: Any = SimpleNamespace(
        engine=SimpleNamespace(offloaded={"weights"}, version=1, rev=0),
        engine_lost=SimpleNamespace(is_set=lambda: False),
        lose_engine=lambda birth, why="": lost.append(birth),
        births=1,
        keys=Keys("run"),
        worker="w",
        valves=None,
        control=None,
        config=SimpleNamespace(
            model=SimpleNamespace(name="policy"),
            trainer=SimpleNamespace(transport="gloo", transfer_timeout_s=1.0),
            staleness=SimpleNamespace(rules=SimpleNamespace(drains=False)),
            worker=SimpleNamespace(apply="abort"),
            serving=SimpleNamespace(enabled=False),
        ),
    )
    reader: Any = Redis(Publication(model="policy", version=2, transport="pigeon", path="/weights"))
    waiting: Any = SimpleNamespace(for_=waits.append)
    followed = Updates(services, reader, waiting)

    await followed.settle_memory()

    assert lost == []
    assert services.engine.offloaded == {"weights"}
    assert "publication 2 of 'policy' is by 'pigeon'" in followed.cannot_load
    assert len(waits) == 1
