"""Routing of experts on a real engine (T17): each row is where the model that drew the next token sent the position."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from transformers import AutoTokenizer

import penstock
from penstock.config import EngineConfig, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError
from penstock.names import ROUTED_EXPERTS
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.redis.server import RedisServer
from penstock.workers.router.members import make_engine
from penstock.workers.sglang.routed_experts import FLAG, read_routing
from tests.integration import oracle
from tests.integration.engine_fixtures import cpu_engine, opened, up
from tests.integration.parts import buffering
from tests.integration.routing_oracle import are_wrong
from tests.integration.worker_play import admit, job, make_config, tended, working
from tests.integration.workload import RecordingEngine, assert_spans_enough, produce
from tests.tiny_model import make_tiny_mixture, publication_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("mixtures")
    return [make_tiny_mixture(root / f"w{seed}", seed) for seed in range(4)]


@pytest.fixture(scope="module")
def mixture(mixtures: list[Path]) -> ModelConfig:
    return ModelConfig(path=str(mixtures[0]), dtype="float32")


@pytest.fixture(scope="module")
def mixture_publications(mixtures: list[Path]) -> list[Publication]:
    return [publication_of(folder, version) for version, folder in enumerate(mixtures)]


@pytest.fixture(scope="module")
def routed_server(mixture: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineConfig]:
    """A server that tells its routing."""
    config = opened(cpu_engine(**{FLAG: True}))
    server = asyncio.run(up(config, mixture, tmp_path_factory.mktemp("routed-engine")))
    yield config.model_copy(update={"url": server.url})
    asyncio.run(server.stop())


def drawn_under(sample: Sample) -> list[int]:
    """[L - 1] version under which the token behind each position was drawn; the prompt's is that of the first one."""
    first = next(version for version in sample.versions if version >= 0)
    return [version if version >= 0 else first for version in sample.versions[1:]]


async def test_T17_rows_are_those_of_the_pass_that_drew_the_next_token(
    routed_server: EngineConfig,
    mixture: ModelConfig,
    mixtures: list[Path],
    mixture_publications: list[Publication],
    tmp_path: Path,
) -> None:
    engine = RecordingEngine(routed_server, mixture, name="routed", log_dir=tmp_path)
    engine.routing = read_routing(mixture.path)
    await engine.start(mixture_publications[1])
    try:
        tokenizer = AutoTokenizer.from_pretrained(mixtures[0])
        samples, _ = await produce(engine, tokenizer, mixture_publications, "abort")
    finally:
        await engine.stop()

    assert_spans_enough(samples)
    models = {version: oracle.load_model(folder) for version, folder in enumerate(mixtures)}
    missed, others, told, compared = [], 0, 0, 0
    for sample in samples:
        rows = sample.sides[ROUTED_EXPERTS]
        assert rows.shape == (len(sample.tokens) - 1, 3, 2)
        drawn = np.array(drawn_under(sample))
        for version in np.unique(drawn):
            known = drawn == version
            wrong = are_wrong(models[version], sample.tokens, rows, known)
            told += wrong is not None
            if wrong is not None and wrong[known].any():
                missed.append(f"{sample.id}: {np.flatnonzero(wrong & known)} of versions {drawn.tolist()}")
            for other in set(drawn.tolist()) - {version}:
                seen = are_wrong(models[other], sample.tokens, rows, known)
                others += 0 if seen is None else int(seen[known].sum())
                compared += 0 if seen is None else int(known.sum())
    assert not missed, "\n".join(missed)
    assert told > len(samples) / 2
    assert compared
    assert others > 0.9 * compared, "two models route differently: a boundary one row off would be seen"


async def test_T17_a_trainer_reads_the_routing_that_its_configuration_asks_for(
    redis_server: RedisServer,
    client: redis.Redis,
    keys: Keys,
    routed_server: EngineConfig,
    mixture: ModelConfig,
    mixtures: list[Path],
    tmp_path: Path,
) -> None:
    config = make_config(
        redis_server.url,
        keys,
        mixture,
        tmp_path,
        engine={"url": routed_server.url},
        rollout={"n": 2, "sides": [ROUTED_EXPERTS]},
        trainer={"batch_groups": 1},
    )
    with buffering(config), Trainer(config) as trainer:
        await asyncio.to_thread(trainer.publish, oracle.load_model(mixtures[3]))
        admit(client, keys, [job(0, n=3, answers=["1234567"])])
        async with tended(client, keys, lease_ms=60_000), working(config):
            batch = await asyncio.to_thread(trainer.next, 60)
            scores = await asyncio.to_thread(penstock.score, config, [[5, 6, 7, 8]], [1])
        assert scores[0].version == 1, "what is scored needs none"
        assert "given" in {row.status for row in batch.rows}
        sides, tokens = batch.side(ROUTED_EXPERTS), batch.arrays()["tokens"].tolist()
    model = oracle.load_model(mixtures[3])
    for row, routing, ids in zip(batch.rows, sides, tokens, strict=True):
        assert routing is not None
        assert routing.dtype == np.uint8
        assert routing.shape == (row.length - 1, 3, 2)
        wrong = are_wrong(model, ids[: row.length], routing, np.ones(row.length - 1, bool))
        assert wrong is not None
        assert not wrong.any(), np.flatnonzero(wrong)


async def test_an_engine_that_does_not_tell_its_routing_is_refused(
    redis_server: RedisServer,
    keys: Keys,
    engine_url: str,
    mixture: ModelConfig,
    model_config: ModelConfig,
    tmp_path: Path,
) -> None:
    def engine_of(model: ModelConfig) -> Any:
        config = make_config(
            redis_server.url, keys, model, tmp_path, engine={"url": engine_url}, rollout={"sides": [ROUTED_EXPERTS]}
        )
        return make_engine(config, "w", tmp_path)

    with pytest.raises(ConfigError, match="is not a mixture of experts"):
        engine_of(model_config)
    engine = engine_of(model_config.model_copy(update={"path": mixture.path}))
    engine.model = model_config
    with pytest.raises(ConfigError, match="does not return them: start it with enable-return-routed-experts"):
        await engine.start()
