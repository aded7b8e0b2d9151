"""Weights that reach workers as deltas: the same bytes at every version, through kills of worker and trainer."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from penstock.weights.delta_store import DeltaStore, catalog_of
from tests.integration.parts import until
from tests.integration.storage_parts import Parts, parts
from tests.integration.storage_rig import Rig, rig, server
from tests.unit.penstock.weights.deltas.version_folders import moved

__all__ = ["parts", "server"]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


class Versions:
    """Publishes a small step at a time, and holds what the engine was given against it."""

    def __init__(self, run: Rig, copies: Path) -> None:
        self.run, self.copies = run, copies
        self.written: dict[int, dict[str, bytes]] = {}
        self.given: list[tuple[Path, dict[str, bytes]]] = []
        run.fake.read = self._read

    def _read(self, path: str) -> str:
        self.given.append((Path(path), contents(Path(path))))
        return ""

    def publish(self, trainer: Trainer, step: int) -> int:
        """Publish, and wait until the engine has it."""
        weights: dict[str, Any] = moved(self.run._weights, step)
        self.run._weights = weights
        version = trainer.publish(weights, step=step)
        self.written[version] = contents(trainer.weights_dir / f"v{version:08d}")
        until(lambda: self.run.fake.version == str(version), f"the engine to have {version}", 120)
        return version

    def train(self, trainer: Trainer) -> int:
        batch = trainer.next(timeout=120)
        trainer.commit(batch)
        version = self.publish(trainer, batch.n)
        self.state = trainer.state_dict()
        trainer.checkpointed()
        return version

    def check(self) -> None:
        """Each version was loaded, from a copy, with the bytes that the trainer wrote."""
        for path, found in self.given:
            assert path.parent == self.copies
            assert found == self.written[int(path.name[1:9])]
        assert {int(path.name[1:9]) for path, _ in self.given} == set(self.written)


def test_I9_T16_engines_load_the_bytes_of_each_version_from_copies_through_kills_of_worker_and_trainer(
    server: RedisServer, parts: Parts, model_config: ModelConfig, publications: list[Publication], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("penstock.consumers.weights.publisher.ANCHOR_EVERY", 4)
    copies, store = tmp_path / "copies", tmp_path / "store"
    sections: dict[str, Any] = {
        "staleness": {"mode": "async", "bound": 10},
        "trainer": {"transport": "delta", "delta_store": str(store)},
        "worker": {"copies_dir": str(copies)},
    }
    with rig(server, parts, model_config, publications[1], tmp_path, **sections) as run_:
        seen = Versions(run_, copies)
        worker = [parts.start(name, run_.config) for name in ("buffer", "producer", "worker")][-1]
        with Trainer(run_.config) as trainer:
            seen.publish(trainer, 0)
            for _ in range(3):
                for _ in range(2):
                    seen.train(trainer)
                worker.restart()
                until(lambda: len(worker.text()) > 0, "the worker to begin", 60)
                seen.train(trainer)
            state = seen.state
        assert "bytes (whole)" not in worker.text(), "a worker that comes back is led on from its copy"
        with Trainer(run_.config) as trainer:
            trainer.load_state_dict(state)
            first = seen.publish(trainer, 100)
            assert f"v{first:08d}" in {one.group[:9] for one in catalog_of(DeltaStore(str(store)).names()).anchors}
            for _ in range(2):
                seen.train(trainer)
        parts.assert_alive()
        seen.check()
        assert len(seen.written) == 13
        text = worker.log.read_text()
        assert text.count("bytes (whole)") == 2, "the first version of each trainer"
        assert "is loaded from" not in text
        assert "trying another chain" not in text
