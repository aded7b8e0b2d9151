"""Weights that somebody is loading, or has been told to load, are not deleted under it."""

from pathlib import Path

import torch

from penstock.config import ModelConfig
from penstock.consumers.clock import versions_in
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.write import write_weights
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration.parts import until
from tests.integration.storage_parts import Parts, parts
from tests.integration.storage_rig import rig, server

__all__ = ["parts", "server"]


def test_I9_weights_that_an_engine_is_loading_are_kept_while_newer_ones_come(
    server: RedisServer, parts: Parts, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> None:
    staleness = {"mode": "async", "bound": 10}
    with rig(server, parts, model_config, publications[1], tmp_path, staleness=staleness) as run_:
        for name in ("buffer", "producer", "worker"):
            parts.start(name, run_.config)
        with Trainer(run_.config) as trainer:
            run_.publish(trainer)
            run_.until("completed", 16)
            run_.fake.may_load.clear()
            run_.train(trainer, 1)
            (folder,) = until(lambda: list(run_.fake.loading), "the engine to load", 120)
            assert folder.endswith("v00000002")
            run_.train(trainer, 5)
            assert 2 in versions_in(trainer.weights_dir)
            assert (Path(folder) / "model.safetensors").is_file()
            until(lambda: 3 not in versions_in(trainer.weights_dir), "version 3, which nobody loads, to go", 120)
            run_.fake.let_load()
            until(lambda: run_.fake.version == "7", "the engine to have the newest", 120)
            run_.train(trainer, 1)
            # What a worker no longer needs goes at a publication after it has said so.
            until(lambda: run_.train(trainer, 1) or 2 not in versions_in(trainer.weights_dir), "version 2 to go", 120)
        parts.assert_alive()


def test_a_version_that_somebody_begins_to_load_while_it_is_deleted_is_there_again(tmp_path: Path) -> None:
    source, into = tmp_path / "source", tmp_path / "into"
    source.mkdir()
    (source / "config.json").write_text("{}")
    asked: list[int] = []

    def in_use() -> set[int]:
        asked.append(1)
        return {1} if len(asked) > 1 else set()

    for version in (1, 2):
        write_weights({"a": torch.ones(2)}, source, into, version, keep=2)
    write_weights({"a": torch.ones(2)}, source, into, 3, keep=2, in_use=in_use)
    assert versions_in(into) == [1, 2, 3]
    assert (into / "v00000001" / "model.safetensors").is_file()
