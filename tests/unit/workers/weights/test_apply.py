"""Changing weights on an engine that stops answering: it is lost, by name, whichever call it was."""

from pathlib import Path

import pytest

from penstock.config import EngineConfig, ModelConfig
from penstock.errors import EngineDied, EngineError
from penstock.records.publication import Publication
from penstock.workers.engine import Receive
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.weights.apply import Updater


class _Deaf(SglangEngine):
    """An engine that answers every control call but one."""

    def __init__(self, deaf_to: str, folder: Path) -> None:
        super().__init__(EngineConfig(), ModelConfig(path=str(folder)), name="deaf", log_dir=folder)
        self.deaf_to = deaf_to

    async def verify(self, publication: Publication) -> None:
        pass

    def _hear(self, call: str) -> None:
        if call == self.deaf_to:
            raise EngineError(f"engine deaf did not answer {call} within 6 s.")

    async def pause(self) -> None:
        self._hear("pause")

    async def resume(self) -> None:
        self._hear("resume")

    async def load(self, publication: Publication, receive: Receive | None = None) -> float:
        self._set_version(publication.version)
        return 0.0


@pytest.mark.parametrize("deaf_to", ["pause", "resume"])
async def test_an_engine_that_does_not_go_through_a_change_is_lost(deaf_to: str, tmp_path: Path) -> None:
    engine = _Deaf(deaf_to, tmp_path)
    publication = Publication(model="policy", version=1, transport="disk", path=str(tmp_path))
    with pytest.raises(EngineDied, match=f"did not answer {deaf_to}"):
        await Updater(engine, Valves()).apply(publication, "in_place")
