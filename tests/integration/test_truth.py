"""T6 and T8 on a real engine: every drawn token carries the logprob and the version it was really drawn with.

The engine computes in float32 and so does the oracle, so they agree to 1e-4; two tiny models differ by whole nats, so
a version boundary that is one token off cannot hide in that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from operator import le
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.config import ModelConfig
from penstock.records.job import Job
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.workers.jobs.environments import Observation
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.weights.apply import Policy, Updater
from tests.integration import oracle
from tests.integration.engine_fixtures import cpu_engine, up
from tests.integration.workload import (
    NUM_SAMPLES,
    ROLLOUT,
    TEMPERATURE,
    TOLERANCE,
    VISIBLE,
    RecordingEngine,
    assert_spans_enough,
    assert_true,
    assert_well_formed,
    in_place_oracle,
    jobs,
    load_oracle_models,
    produce,
    recompute_oracle,
    true_versions,
    versions_of,
)
from tests.tiny_model import ALPHABET

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def oracle_models(models: list[Path]) -> dict[int, Any]:
    return load_oracle_models(models)


@pytest.fixture(scope="module")
def tokenizer(models: list[Path]) -> Any:
    return AutoTokenizer.from_pretrained(models[0])


@pytest.fixture(scope="module")
def overlapped_url(model_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose steps overlap, as SGLang's do by default. Not parametrized itself, so that it starts once."""
    config = cpu_engine(**{"incremental-streaming-output": True, "disable-overlap-schedule": False})
    server = asyncio.run(up(config, model_config, tmp_path_factory.mktemp("overlapped")))
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture(params=["in turn", "overlapped"])
def truth_url(request: pytest.FixtureRequest) -> str:
    """The session's server, and one whose steps overlap."""
    return str(request.getfixturevalue("engine_url" if request.param == "in turn" else "overlapped_url"))


@pytest.fixture
async def make_engine(
    truth_url: str, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> Any:
    """Makes clients of the session's server with version 1 loaded; ``reports_spans`` as asked."""
    engines: list[SglangEngine] = []

    async def make(reports_spans: bool) -> RecordingEngine:
        config = cpu_engine().model_copy(update={"url": truth_url})
        engine = RecordingEngine(config, model_config, name="test", log_dir=tmp_path)
        await engine.start(publications[1])
        engine.info = replace(engine.info, reports_spans=reports_spans)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.stop()


MakeEngine = Callable[[bool], Awaitable[RecordingEngine]]


@pytest.mark.parametrize("reports_spans", [True, False])
async def test_T6_drain(
    make_engine: MakeEngine,
    tokenizer: Any,
    publications: list[Publication],
    oracle_models: dict[int, Any],
    reports_spans: bool,
) -> None:
    engine = await make_engine(reports_spans)
    valves = Valves()

    async def round_of(version: int) -> list[Sample]:
        tasks = [
            asyncio.create_task(generate_sample(Source(engine, valves, tokenizer, ROLLOUT), Sample(job, 0)))
            for job in jobs()[: NUM_SAMPLES // 2]
        ]
        # The samples are inside before the publication asks for the drain.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await Updater(engine, valves).apply(publications[version], "drain")
        assert all(task.done() for task in tasks)
        return [task.result() for task in tasks]

    samples = await round_of(2) + await round_of(3)

    assert_well_formed(samples)
    assert [versions_of(sample) for sample in samples] == [{1}] * (NUM_SAMPLES // 2) + [{2}] * (NUM_SAMPLES // 2)
    for sample in samples:
        expected = oracle.recompute(oracle_models, sample, sample.versions, TEMPERATURE)
        assert oracle.gap(sample, expected) < TOLERANCE


@pytest.mark.parametrize("reports_spans", [True, False])
async def test_T6_abort(
    make_engine: MakeEngine,
    tokenizer: Any,
    publications: list[Publication],
    oracle_models: dict[int, Any],
    reports_spans: bool,
) -> None:
    engine = await make_engine(reports_spans)

    samples, reports = await produce(engine, tokenizer, publications, "abort")

    assert_spans_enough(samples)
    assert_well_formed(samples)
    assert all(report.num_aborted > 0 for report in reports[-2:])
    assert sum(sample.num_aborts for sample in samples) == sum(report.num_aborted for report in reports)
    assert_true(samples, recompute_oracle(oracle_models), engine)


async def test_T6_in_place(
    make_engine: MakeEngine, tokenizer: Any, publications: list[Publication], oracle_models: dict[int, Any]
) -> None:
    engine = await make_engine(True)

    samples, _ = await produce(engine, tokenizer, publications, "in_place")

    assert_spans_enough(samples)
    assert_well_formed(samples)
    assert all(sample.num_aborts == 0 for sample in samples)
    assert_true(samples, in_place_oracle(oracle_models, engine), engine)
    # The old KV matters: a plain recompute under the right versions is visibly another number.
    plain = [
        oracle.gap(sample, oracle.recompute(oracle_models, sample, sample.versions, TEMPERATURE))
        for sample in samples
        if len(versions_of(sample)) >= 2
    ]
    assert max(plain) > VISIBLE


async def test_T6_in_place_without_spans_never_claims_a_newer_version(
    make_engine: MakeEngine, tokenizer: Any, publications: list[Publication], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are complete, not streamed; every token carries the version at the sending of its request."""
    engine = await make_engine(False)
    monkeypatch.setattr(engine, "_stream", None)

    def versions_in_truth(sample: Sample) -> set[int]:
        return set(engine.truth[sample.id])

    samples, _ = await produce(engine, tokenizer, publications, "in_place", versions_in_truth)

    assert_spans_enough(samples, versions_in_truth)
    assert_well_formed(samples)
    truths = {sample.id: engine.truth[sample.id] for sample in samples}
    for sample in samples:
        recorded, truth = sample.versions[sample.prompt_length :], truths[sample.id]
        assert set(recorded) == {engine.found[sample.id][0][0]}
        assert all(claimed <= true for claimed, true in zip(recorded, truth, strict=True)), (sample.id, recorded, truth)
        # A token counts as proven only where no newer weights could have drawn it.
        newer = sum(true > claimed for claimed, true in zip(recorded, truth, strict=True))
        assert sample.num_unproven >= newer


@pytest.mark.parametrize("reports_spans", [True, False])
async def test_T6_answers_go_on_under_a_version_of_the_same_weights(
    make_engine: MakeEngine,
    tokenizer: Any,
    publications: list[Publication],
    oracle_models: dict[int, Any],
    reports_spans: bool,
) -> None:
    """Versions 1 and 2 are the same weights: no request is frozen or aborted, and prefixes of both are shared."""
    engine, valves = await make_engine(reports_spans), Valves()
    engine.changes_in_place = False  # the policy may be drain or abort
    models = {1: oracle_models[1], 2: oracle_models[1]}

    async def make(number: int) -> list[Sample]:
        tasks = [
            asyncio.create_task(generate_sample(Source(engine, valves, tokenizer, ROLLOUT), Sample(one, 0)))
            for one in jobs(number)
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not number:
            await engine.adopt(replace(publications[1], version=2))
            assert engine.num_running, "it waited for nobody"
        return await asyncio.gather(*tasks)

    first, again = await make(0), await make(1)

    assert (await engine.call("GET", "/model_info"))["weight_version"] == "2"
    assert_well_formed(first + again)
    assert all(sample.num_aborts == 0 for sample in first + again)
    assert {frozenset(versions_of(sample)) for sample in again} == {frozenset({2})}
    spanning = [sample for sample in first if versions_of(sample) == {1, 2}]
    assert bool(spanning) == reports_spans
    assert all(sent == 2 and cached for sample in again for sent, cached in engine.found[sample.id])
    for sample in first + again:
        assert oracle.gap(sample, oracle.recompute(models, sample, sample.versions, TEMPERATURE)) < TOLERANCE


class Quiz:
    """Asks a second question after the first answer; of every other job only once weights are published."""

    def __init__(self, second_turn: asyncio.Event, published: asyncio.Event) -> None:
        self.second_turn, self.published = second_turn, published

    async def reset(self, job: Job) -> None:
        assert job.prompt

    async def step(self, sample: Sample) -> Observation | None:
        if sample.num_turns > 1:
            return None
        if int(sample.job.id.rpartition("/")[2]) % 2:
            # Its second turn is of the new version, however slow the machine is in publishing it.
            self.second_turn.set()
            await self.published.wait()
        return Observation(text="?and-then<")


@pytest.mark.parametrize("policy", ["drain", "abort", "in_place"])
async def test_T6_T8_two_turns_with_an_observation(
    make_engine: MakeEngine,
    tokenizer: Any,
    publications: list[Publication],
    oracle_models: dict[int, Any],
    policy: Policy,
) -> None:
    engine, valves = await make_engine(True), Valves()
    second_turn, published = asyncio.Event(), asyncio.Event()
    if policy == "drain":
        published.set()  # it waits for all that is in an environment
    # Stops at a letter that soon comes up; the second turn ends at the bound where it does not.
    sampling = {"max_new_tokens": 90, "stop": ["a"], "ignore_eos": True, "temperature": TEMPERATURE}
    tasks = [
        asyncio.create_task(
            generate_sample(
                Source(engine, valves, tokenizer, ROLLOUT),
                Sample(Job(id=f"quiz/0/{index}", n=1, prompt=f"{ALPHABET[index]}12=", sampling=sampling), 0),
                environment=Quiz(second_turn, published),
            )
        )
        for index in range(16)
    ]
    await second_turn.wait()
    await Updater(engine, valves).apply(publications[2], policy)
    published.set()
    samples = await asyncio.gather(*tasks)

    two_turns = [sample for sample in samples if sample.num_turns == 2]
    assert two_turns
    observation = tokenizer.encode("?and-then<", add_special_tokens=False)

    def text_of(turn: list[int]) -> str:
        return str(tokenizer.decode(turn, skip_special_tokens=True)).partition("a")[0]

    for sample in two_turns:
        start = _index_of(sample.tokens, observation, sample.prompt_length)
        stop = start + len(observation)
        assert not any(sample.generated[start:stop] + sample.loss_mask[start:stop])
        assert set(sample.versions[start:stop]) == {-1}
        assert set(sample.logprobs[start:stop]) == {0.0}
        assert all(sample.generated[sample.prompt_length : start] + sample.generated[stop:])
        assert sample.turns == [
            text_of(sample.tokens[sample.prompt_length : start]),
            text_of(sample.tokens[stop:]),
        ]
    if policy != "drain":
        assert any(len(versions_of(sample)) == 2 for sample in two_turns)
    compute = in_place_oracle(oracle_models, engine) if policy == "in_place" else recompute_oracle(oracle_models)
    for sample in samples:
        true = true_versions(sample, compute, engine)
        # Where steps overlap the token before a boundary may be newer than recorded; it is never older.
        assert true == sample.versions or (engine.info.window and all(map(le, sample.versions, true)))


def _index_of(tokens: list[int], part: list[int], start: int) -> int:
    return next(i for i in range(start, len(tokens)) if tokens[i : i + len(part)] == part)
