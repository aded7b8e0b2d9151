"""One worker on a real SGLang server that is not its own: the session's, with its prefix cache on.

What it is given that cannot work ends in a named outcome, and the server goes on serving.
"""

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from penstock.config import Config, ModelConfig
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.records.worker_causes import VersionRefused
from penstock.redis.server import RedisServer
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.segment import STALE_PREFIX
from penstock.workers.weights.apply import Updater
from tests.integration import oracle, play
from tests.integration.worker_play import (
    admit,
    all_in,
    is_blocked,
    job,
    letters,
    make_config,
    presence,
    publish,
    read_group,
    until,
    working,
)
from tests.integration.workload import ROLLOUT, TEMPERATURE, TOLERANCE, VISIBLE, load_oracle_models
from tests.tiny_model import publication_of

pytestmark = pytest.mark.engine

SHORT = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle_models(models: list[Path]) -> dict[int, Any]:
    return load_oracle_models(models)


@pytest.fixture
def external(
    redis_server: RedisServer, keys: Keys, model_config: ModelConfig, engine_url: str, tmp_path: Path
) -> Callable[..., Config]:
    def make(**sections: Any) -> Config:
        return make_config(redis_server.url, keys, model_config, tmp_path, engine={"url": engine_url}, **sections)

    return make


def misshapen(publication: Publication, folder: Path, version: int) -> Publication:
    """A whole publication, checksums and all, of another shape: a server that loaded it would die."""
    shutil.copytree(publication.path, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()
    save_file(tensors, folder / "model.safetensors")
    return publication_of(folder, version)


async def test_an_external_engine_serves_on_whatever_it_is_given(
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    external: Callable[..., Config],
    oracle_models: dict[int, Any],
    tmp_path: Path,
) -> None:
    publish(client, keys, publications[1])
    bad = {
        "4090": job(0, prompt_ids=[5] * 5000, prompt=None),
        "token id 45 is outside the model's vocabulary of 45": job(1, prompt_ids=[5, 45], prompt=None),
    }
    refused = admit(client, keys, list(bad.values()))
    good = admit(client, keys, [job(2, sampling=SHORT)])
    async with working(external(rollout={"max_context_tokens": 32768})) as worker:
        # A prompt longer than the server's context, and ids of another tokenizer: buried at once, with the reason.
        await until(all_in(client, keys, refused, "dead"))
        for (says, _), name in zip(bad.items(), refused, strict=True):
            letter = letters(client, keys)[name]
            assert (letter["reason"], letter["attempts"]) == ("refused", "1")
            assert says in letter["detail"]
        await until(all_in(client, keys, good, "ready"))
        await until(lambda: presence(client, keys)["engine"] == "sglang 0.5.20 (external)")
        assert (presence(client, keys)["external"], presence(client, keys)["engine_pid"]) == (True, 0)

        # A broken checkpoint is refused by name, and the old version goes on.
        broken = misshapen(publications[2], tmp_path / "broken", 2)
        publish(client, keys, broken)
        client.hset(keys.clock, "version:policy", 1)
        await until(lambda: is_blocked(client, keys, "weights", VersionRefused, error="shape"))
        await until(lambda: presence(client, keys)["state"] == "cannot load")
        good += admit(client, keys, [job(3, sampling=SHORT)])
        await until(all_in(client, keys, good, "ready"))

        # Mended under the next revision.
        publish(client, keys, dataclasses.replace(publications[2], rev=1))
        await until(lambda: presence(client, keys)["version"] == 2)
        good += admit(client, keys, [job(4, sampling=SHORT)])
        await until(all_in(client, keys, good, "ready"))
        assert worker.services.births == 1, "the engine was never lost"
    versions = []
    for name in good:
        for meta, payload in read_group(client, keys, name):
            sample = Sample(job(0), meta.k)
            sample.append(payload.tokens[: payload.prompt_length].tolist())
            drawn = payload.tokens[payload.prompt_length :].tolist()
            sample.append(drawn, version=meta.newest, logprobs=payload.logprobs[payload.prompt_length :].tolist())
            assert oracle.gap(sample, oracle.recompute(oracle_models, sample, sample.versions, 1.0)) < TOLERANCE
            versions.append(meta.newest)
    assert versions == [1] * 4 + [2] * 2
    play.assert_conserved(client, keys)


def recorded(sample: Sample, oracle_models: dict[int, Any], version: int) -> float:
    """Gap between a sample's logprobs and a plain recompute under one version, KV included."""
    versions = [version if drawn else -1 for drawn in sample.generated]
    return oracle.gap(sample, oracle.recompute(oracle_models, sample, versions, TEMPERATURE))


async def test_T6_a_new_request_after_a_change_in_place_finds_no_KV_of_older_weights(
    engine: SglangEngine, publications: list[Publication], models: list[Path], oracle_models: dict[int, Any]
) -> None:
    """The prefix cache stays on and is not flushed: only the namespace of the load keeps the two apart."""
    valves, tokenizer = Valves(), AutoTokenizer.from_pretrained(models[0])
    prompt = "a long prefix that is worth caching".replace(" ", "-")

    async def draw(k: int) -> Sample:
        asked = job(0, n=9, prompt=prompt, sampling=SHORT | {"temperature": TEMPERATURE})
        return await generate_sample(Source(engine, valves, tokenizer, ROLLOUT), Sample(asked, k))

    before = [await draw(0), await draw(1)]
    await Updater(engine, valves).apply(publications[2], "in_place")
    after = [await draw(2), await draw(3)]

    assert [sample.cached_tokens > 0 for sample in before + after] == [False, True, False, True]
    assert all(recorded(sample, oracle_models, 1) < TOLERANCE for sample in before)
    assert all(recorded(sample, oracle_models, 2) < TOLERANCE for sample in after)


async def test_T6_a_request_that_waited_in_the_servers_queue_during_a_change_is_drawn_anew(
    engine: SglangEngine, publications: list[Publication], models: list[Path], oracle_models: dict[int, Any]
) -> None:
    valves, tokenizer = Valves(), AutoTokenizer.from_pretrained(models[0])
    asked = job(0, n=9, prompt="another-long-prefix-worth-caching", sampling=SHORT | {"temperature": TEMPERATURE})

    async def draw(k: int) -> Sample:
        return await generate_sample(Source(engine, valves, tokenizer, ROLLOUT), Sample(asked, k))

    await draw(0)  # its KV under version 1 is in the cache now
    # A frozen server keeps newcomers waiting, as a full one does.
    await engine.pause()
    waiting = asyncio.create_task(draw(1))
    while not engine.num_running:
        await engine.healthy()
    await Updater(engine, valves).apply(publications[2], "in_place")
    sample = await waiting

    assert engine.num_stale_prefixes == 1, STALE_PREFIX
    assert set(sample.versions) == {-1, 2}
    assert recorded(sample, oracle_models, 2) < TOLERANCE
    assert recorded(sample, oracle_models, 1) > VISIBLE
