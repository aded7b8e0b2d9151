"""The client of a real SGLang server, and the updates of its weights."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.config import ModelConfig, RolloutConfig
from penstock.errors import ConfigError, EngineDied, EngineError, PublishError
from penstock.records.job import Job
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.workers.engine import Segment
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.prefixes import partial_from_bytes, partial_to_bytes
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.sglang.server_info import release_of
from penstock.workers.weights.apply import Policy, Updater
from tests.integration import oracle
from tests.integration.aborts import assert_an_abort_ends_its_own_request_only
from tests.integration.engine_fixtures import cpu_engine
from tests.tiny_model import publication_of

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8]
SHORT = {"max_new_tokens": 12, "ignore_eos": True}
#: An idle engine is at it for seconds, so that what happens meanwhile does.
LONG = {"max_new_tokens": 2000, "ignore_eos": True}


async def test_generate_returns_ids_logprobs_and_versions(engine: SglangEngine) -> None:
    segment = await engine.generate(PROMPT, SHORT, rid="a/0/0/0")

    assert len(segment.output_ids) == len(segment.logprobs) == len(segment.versions) == 12
    assert segment.finish_reason == "length"
    assert set(segment.versions) == {1}
    assert engine.info.version.startswith("0.5.")
    assert engine.info.reports_spans == (release_of(engine.info.version) >= (0, 5, 19))
    assert await engine.healthy()


async def test_score_is_the_logprob_at_temperature_one(engine: SglangEngine, models: list[Path]) -> None:
    answer = [9, 20, 33, 27, 34, 40, 2, 2, 23, 18, 1]
    sample = Sample(Job(id="a/0/0", n=1), 0)
    sample.append(PROMPT)
    sample.append(answer, version=1, logprobs=(await engine.score(PROMPT + answer, len(PROMPT))).logprobs)

    expected = oracle.recompute({1: oracle.load_model(models[1])}, sample, sample.versions, 1.0)
    assert oracle.gap(sample, expected) < 1e-4
    with pytest.raises(EngineError, match="start must be"):
        await engine.score(PROMPT, 0)


async def test_the_last_id_of_the_vocabulary_is_scored_as_itself(engine: SglangEngine, models: list[Path]) -> None:
    """SGLang 0.5.20 names it 0 in its answer; the number is that of the id itself."""
    last = engine.vocab_size - 1
    assert last == json.loads((models[1] / "config.json").read_text())["vocab_size"] - 1
    answer = [last, 5, 0, last, last]
    sample = Sample(Job(id="a/0/0", n=1), 0)
    sample.append(PROMPT)
    scores = await engine.score(PROMPT + answer, len(PROMPT))
    sample.append(answer, version=1, logprobs=scores.logprobs)

    assert scores.version == 1
    expected = oracle.recompute({1: oracle.load_model(models[1])}, sample, sample.versions, 1.0)
    assert oracle.gap(sample, expected) < 1e-4
    # The two ids differ, so that one could not stand for the other.
    other = Sample(sample.job, 0, tokens=[*PROMPT, 0, *answer[1:]])
    swapped = oracle.recompute({1: oracle.load_model(models[1])}, other, sample.versions, 1.0)
    assert abs(swapped[len(PROMPT)] - expected[len(PROMPT)]) > 1e-2


async def test_an_abort_ends_its_own_request_only(engine: SglangEngine) -> None:
    await assert_an_abort_ends_its_own_request_only(engine)


async def test_what_the_engine_refuses_is_an_engine_error(engine: SglangEngine) -> None:
    with pytest.raises(EngineError, match="temperature"):
        await engine.generate(PROMPT, SHORT | {"temperature": -1}, rid="a/0/0/0")


@pytest.mark.parametrize("policy", ["in_place", "abort", "drain"])
async def test_a_version_that_does_not_come_after_the_loaded_one_is_refused(
    engine: SglangEngine, publications: list[Publication], models: list[Path], policy: Policy
) -> None:
    valves = Valves()
    await Updater(engine, valves).apply(publications[3], policy)

    for version in (2, 3):
        with pytest.raises(PublishError, match="never go back"):
            await Updater(engine, valves).apply(publications[version], policy)
    await Updater(engine, valves).apply(publication_of(models[3], 3, rev=1), policy)

    assert (engine.version, engine.rev) == (3, 1)
    assert valves.cause is None


async def test_a_publication_that_does_not_fit_leaves_the_engine_as_it_is(
    engine: SglangEngine, publications: list[Publication], models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    valves = Valves()
    tensors = load_file(models[2] / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()
    (tmp_path / "bad").mkdir()
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    gone = Publication(model="policy", version=2, transport="disk", path=str(tmp_path / "nowhere"))

    with pytest.raises(PublishError, match="shape"):
        await Updater(engine, valves).apply(publication_of(tmp_path / "bad", 2), "in_place")
    with pytest.raises(PublishError, match="no folder"):
        await Updater(engine, valves).apply(gone, "abort")

    assert engine.version == 1
    assert (await engine.generate(PROMPT, SHORT, rid="a/0/0/0")).versions == [1] * 12


@pytest.mark.parametrize("policy", ["in_place", "abort"])
async def test_what_the_engine_cannot_find_leaves_the_old_weights_and_running_requests(
    engine: SglangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    async def no_check(publication: Publication) -> None:
        """As if the folder went between the check and the load."""

    valves = Valves()
    monkeypatch.setattr(engine, "verify", no_check)
    gone = Publication(model="policy", version=2, transport="disk", path=str(tmp_path / "nowhere"))
    running = asyncio.create_task(engine.generate(PROMPT, LONG, rid="a/0/0/0"))
    await engine.generate(PROMPT, SHORT, rid="a/0/0/1")

    with pytest.raises(PublishError, match="keeps 1"):
        await Updater(engine, valves).apply(gone, policy)

    assert engine.version == 1
    assert not engine.paused
    assert valves.cause is None
    if policy == "in_place":
        assert (await running).versions == [1] * 2000
    assert (await engine.generate(PROMPT, SHORT, rid="a/0/0/2")).versions == [1] * 12
    await asyncio.wait({running})


async def test_a_cancelled_sample_goes_on_from_its_partial(engine: SglangEngine, models: list[Path]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(models[0])
    rollout, valves = RolloutConfig(sampling=LONG), Valves()
    job = Job(id="a/0/0", n=1, prompt="123=")
    for attempt in range(10):  # on a busy machine it may end before it is cancelled
        sample = Sample(job, 0)
        task = asyncio.create_task(generate_sample(Source(engine, valves, tokenizer, rollout), sample))
        await engine.generate(PROMPT, SHORT, rid=f"a/0/1/{attempt}")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if (drawn := sum(sample.generated)) < 2000:
            break
    assert sample.status == "aborted"
    assert 0 < drawn < 2000

    again = partial_from_bytes(partial_to_bytes(sample), job, 0)
    assert again.tokens == sample.tokens
    done = await generate_sample(Source(engine, valves, tokenizer, rollout), again)

    assert done.tokens[: len(sample.tokens)] == sample.tokens
    assert sum(done.generated) == 2000
    assert done.status == "truncated"
    expected = oracle.recompute({1: oracle.load_model(models[1])}, done, done.versions, 1.0)
    assert oracle.gap(done, expected) < 1e-4


async def test_T8_the_text_of_a_sample_is_what_the_server_itself_tells(
    engine_url: str, model_config: ModelConfig, models: list[Path], publications: list[Publication], tmp_path: Path
) -> None:
    """Stops are trimmed or kept and special tokens shown or skipped as asked; the tokens hold all that was drawn."""
    texts: dict[str, str] = {}

    class Telling(SglangEngine):
        def segment_of(self, answer: Any, sent: int, rid: str) -> Segment:
            texts[rid] = answer["text"]
            return super().segment_of(answer, sent, rid)

    config = cpu_engine().model_copy(update={"url": engine_url})
    engine = Telling(config, model_config, name="test", log_dir=tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(models[1])
    stops: list[dict[str, Any]] = [
        {"stop": ["k", "7"]},
        {"stop_token_ids": [5, 6, 7, 8, 9, 10, 11, 12]},
        {"stop_regex": "[k-p]"},
        {},
    ]
    jobs = [
        Job(
            f"text/{kept}{shown}/{i}",
            1,
            prompt="ab=",
            sampling=stop | {"no_stop_trim": kept, "skip_special_tokens": shown},
        )
        for i, stop in enumerate(stops * 3)
        for kept in (False, True)
        for shown in (False, True)
    ]
    rollout = RolloutConfig(sampling={"max_new_tokens": 120, "temperature": 1.0})
    await engine.start(publications[1])
    # The events of a stream hold parts of the text.
    engine.info = replace(engine.info, takes_batches=False)
    try:
        made = await asyncio.gather(
            *(generate_sample(Source(engine, Valves(), tokenizer, rollout), Sample(job, 0)) for job in jobs)
        )
    finally:
        await engine.stop()
    assert {sample.id: sample.text for sample in made} == texts
    trimmed = [one for one in made if one.text != tokenizer.decode(one.tokens[one.prompt_length :])]
    assert len(trimmed) >= len(stops)


async def test_an_engine_with_weights_of_someone_else_is_lost(
    engine: SglangEngine, engine_url: str, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> None:
    other = SglangEngine(engine.config, model_config, name="other", log_dir=tmp_path)
    await other.start(publications[6])
    try:
        with pytest.raises(EngineDied, match="load the current publication"):
            await engine.generate(PROMPT, SHORT, rid="a/0/0/0")
    finally:
        await other.stop()


async def test_a_url_without_a_server_is_a_mistake_in_the_configuration(
    model_config: ModelConfig, tmp_path: Path
) -> None:
    config = cpu_engine().model_copy(update={"url": "http://127.0.0.1:9"})
    engine = SglangEngine(config, model_config, name="none", log_dir=tmp_path)

    with pytest.raises(ConfigError, match="does not answer like an SGLang server"):
        await engine.start(None)


async def test_many_updates_under_load(engine: SglangEngine, publications: list[Publication]) -> None:
    """Policies in turn while 32 requests run: nothing is lost, and the server survives every one of them."""
    valves, rollout = Valves(), RolloutConfig(sampling={"max_new_tokens": 40, "ignore_eos": True})

    class Plain:
        eos_token_id = 1

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [2 + int(letter) for letter in text]

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
            return json.dumps(token_ids)

    async def keep_busy(index: int, stop: asyncio.Event) -> list[Sample]:
        made = []
        while not stop.is_set():
            job = Job(id=f"busy/{index}/{len(made)}", n=1, prompt=f"{index}{len(made)}")
            made.append(await generate_sample(Source(engine, valves, Plain(), rollout), Sample(job, 0)))
        return made

    stop = asyncio.Event()
    busy = [asyncio.create_task(keep_busy(index, stop)) for index in range(32)]
    policies: list[Policy] = ["in_place", "abort", "drain"] * 6
    for number, policy in enumerate(policies):
        target = publications[1 + number % 6]
        renumbered = Publication(**{**_fields(target), "version": 2 + number})
        await Updater(engine, valves).apply(renumbered, policy)
    stop.set()
    made = [sample for samples in await asyncio.gather(*busy) for sample in samples]

    assert engine.version == 1 + len(policies)
    assert all(sum(sample.generated) == 40 for sample in made)
    assert await engine.healthy()


def _fields(publication: Publication) -> dict[str, Any]:
    return {name: getattr(publication, name) for name in publication.__dataclass_fields__}
