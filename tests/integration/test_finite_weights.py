"""Weights that hold NaN or Inf reach no engine: such a publication is skipped, and three in a row end the run."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch
from safetensors.torch import load_file

from penstock.config import Config
from penstock.consumers.metrics.trainer import TrainerCollector
from penstock.consumers.trainer import Trainer
from penstock.errors import WeightsNotFinite
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.redis.server import RedisServer
from tests.integration.parts import PATIENCE_S, Player, admit, buffering, make_config, publish, step

GOOD, BAD = torch.full((1,), 1.0), torch.full((1,), torch.nan)


@pytest.fixture(params=[False, True], ids=["send first", "folder first"])
def config(redis_server: RedisServer, keys: Keys, tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    trainer = {"batch_groups": 1, "folder_first": request.param}
    staleness = {"mode": "async", "bound": 20}
    return make_config(redis_server.url, keys.run, tmp_path, staleness=staleness, trainer=trainer)


@pytest.fixture
def trainer(config: Config, client: redis.Redis, keys: Keys) -> Iterator[Trainer]:
    """A trainer that has published version 1, and eight groups for it."""
    with buffering(config), Trainer(config) as trainer:
        publish(trainer)
        admit(client, keys, 8)
        Player(client, keys).work(8, 1)
        yield trainer


def train(trainer: Trainer, weights: torch.Tensor) -> int:
    trainer.commit(trainer.next(PATIENCE_S))
    return trainer.publish({"weight": weights})


def announced(client: redis.Redis, keys: Keys) -> list[Publication]:
    return [Publication.from_bytes(fields[b"p"]) for _, fields in client.xrange(keys.weights("policy"))]


def test_T16_nan_is_never_announced_and_the_run_goes_on_with_the_weights_before(
    trainer: Trainer, client: redis.Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(trainer, GOOD) == 2
    with caplog.at_level(logging.WARNING):
        assert train(trainer, BAD) == 3
        assert train(trainer, torch.full((1,), -torch.inf)) == 4

    second, third, fourth = announced(client, keys)[1:]
    for repeated in (third, fourth):
        assert float(load_file(Path(repeated.path) / "model.safetensors")["weight"]) == 1.0
    assert "v00000002" in third.path
    warnings = [text for text in caplog.messages if text.startswith("publication skipped")]
    assert len(warnings) == 2
    assert "weight of the weights to publish hold NaN or Inf. Engines keep the weights" in warnings[0]
    (skipped,) = (m for m in TrainerCollector(trainer.session.tally).collect() if "skipped_publications" in m.name)
    assert skipped.samples[0].value == 2

    assert train(trainer, GOOD) == 5
    assert trainer.session.publisher.skipped_in_a_row == 0
    assert second.version == 2


def test_T16_the_third_skipped_publication_in_a_row_ends_the_run(trainer: Trainer) -> None:
    for wanted in (2, 3):
        assert train(trainer, BAD) == wanted
    step(trainer)
    for wanted in (5, 6):
        assert train(trainer, BAD) == wanted
    with pytest.raises(WeightsNotFinite, match=r"weight of .* publication 3 in a row that was refused"):
        train(trainer, BAD)
    assert trainer.version == 6


def test_T16_weights_without_a_version_before_them_are_refused_at_once(config: Config) -> None:
    with Trainer(config) as trainer:
        with pytest.raises(WeightsNotFinite, match="There is no earlier version to continue with"):
            trainer.publish({"weight": BAD})
        assert trainer.version == 0
        assert publish(trainer) == 1
        trainer.load_state_dict({"run": config.run, "subscription": trainer.name, "batch": 0})
        with pytest.raises(WeightsNotFinite, match="There is no earlier version"):
            trainer.publish({"weight": BAD})
