"""T6 and T8 on a real engine: every drawn token carries the logprob and the version it was really drawn with.

The engine computes in float32 and so does the oracle, so they agree to 1e-4; two tiny models differ by whole nats, so
a version boundary that is one token off cannot hide in that.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.config import ModelConfig, RolloutConfig
from penstock.messages import Job, Publication, Sample
from tests.integration import oracle
from tests.integration.engine_fixtures import cpu_engine
from workers.apply import ApplyReport, Policy, apply_publication
from workers.engine import Engine, Segment
from workers.environments import Observation
from workers.gate import Gate
from workers.generate import generate_sample

pytestmark = pytest.mark.engine

TEMPERATURE = 0.8
TOLERANCE = 1e-4
#: What a wrong boundary must be off by at least, somewhere in the workload.
VISIBLE = 1e-2
ROLLOUT = RolloutConfig(n=1, sampling={"temperature": TEMPERATURE}, max_context_tokens=1024, max_turns=2)
#: New tokens of each sample; the longest is 30 times the shortest.
LENGTHS = [6, 15, 50, 110, 180]
NUM_SAMPLES = 40


class RecordingEngine(Engine):
    """Keeps the spans that the server itself reports beside what the client makes of each answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.truth: dict[str, list[int]] = {}
        #: Per request: version at the sending, in whose namespace it looks for prefix KV, and tokens found there. A
        #: request that waited in the server's queue while weights changed finds KV of the old ones.
        self.found: dict[str, list[tuple[int, int]]] = {}

    def _segment(self, answer: Any, sent: int, rid: str) -> Segment:
        spans = answer["meta_info"]["weight_versions"]
        self.truth.setdefault(rid, []).extend(
            int(span["version"]) for span in spans for _ in range(span["start"], span["end"])
        )
        self.found.setdefault(rid, []).append((sent, answer["meta_info"].get("cached_tokens", 0)))
        return super()._segment(answer, sent, rid)


@pytest.fixture(scope="module")
def oracle_models(models: list[Path]) -> dict[int, Any]:
    return {version: oracle.load_model(folder) for version, folder in enumerate(models)}


@pytest.fixture(scope="module")
def tokenizer(models: list[Path]) -> Any:
    return AutoTokenizer.from_pretrained(models[0])


@pytest.fixture
async def make_engine(
    engine_url: str, model_config: ModelConfig, publications: list[Publication], tmp_path: Path
) -> Any:
    """Makes clients of the session's server with version 1 loaded; ``reports_spans`` as asked."""
    engines: list[Engine] = []

    async def make(reports_spans: bool) -> RecordingEngine:
        config = cpu_engine().model_copy(update={"url": engine_url, "reports_spans": reports_spans})
        engine = RecordingEngine(config, model_config, name="test", log_dir=tmp_path)
        await engine.start(publications[1])
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.stop()


MakeEngine = Callable[[bool], Awaitable[RecordingEngine]]


def jobs() -> list[Job]:
    return [
        Job(
            id=f"truth/0/{index}",
            n=1,
            prompt=f"{index * 7919:05}=",
            sampling={"max_new_tokens": LENGTHS[index % len(LENGTHS)], "ignore_eos": index % 4 != 0},
        )
        for index in range(NUM_SAMPLES)
    ]


async def produce(
    engine: Engine, tokenizer: Any, publications: list[Publication], policy: Policy
) -> tuple[list[Sample], list[ApplyReport]]:
    """The workload: version 2 comes when the first answer is done, version 3 when two in five are."""
    gate = Gate()
    tasks = {
        asyncio.create_task(generate_sample(engine, gate, job, 0, tokenizer=tokenizer, rollout=ROLLOUT))
        for job in jobs()
    }
    reports = []
    for version, num_done in ((2, 1), (3, NUM_SAMPLES * 2 // 5)):
        while sum(task.done() for task in tasks) < num_done:
            await asyncio.wait({task for task in tasks if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
        reports.append(await apply_publication(engine, gate, publications[version], policy))
    return await asyncio.gather(*tasks), reports


def versions_of(sample: Sample) -> set[int]:
    return {version for version in sample.versions if version >= 0}


def assert_spans_enough(samples: list[Sample]) -> None:
    """The workload is worth its name: many samples span two versions, lengths span a factor of 20."""
    drawn = [sum(sample.generated) for sample in samples]
    assert max(drawn) >= 20 * min(drawn)
    assert sum(len(versions_of(sample)) >= 2 for sample in samples) >= 0.2 * len(samples)


def assert_well_formed(samples: list[Sample]) -> None:
    for sample in samples:
        length = len(sample.tokens)
        assert len(sample.logprobs) == len(sample.generated) == len(sample.versions) == length
        drawn_versions = [version for version in sample.versions if version >= 0]
        assert drawn_versions == sorted(drawn_versions)
        assert [version >= 0 for version in sample.versions] == [bool(drawn) for drawn in sample.generated]
        asked = sample.job.sampling["max_new_tokens"]
        assert sum(sample.generated) <= asked
        if sample.job.sampling["ignore_eos"]:
            assert sum(sample.generated) == asked
            assert sample.status == "truncated"


Compute = Callable[[Sample, list[int]], list[float]]


def assert_true(samples: list[Sample], compute: Compute) -> None:
    """Recorded logprobs are the oracle's, and would not be with any boundary one token off."""
    for sample in samples:
        assert oracle.gap(sample, compute(sample, sample.versions)) < TOLERANCE, sample.id
    straddling = [sample for sample in samples if len(versions_of(sample)) >= 2]
    for by in (1, -1):
        gaps = [oracle.gap(sample, compute(sample, oracle.shifted(sample.versions, by))) for sample in straddling]
        assert all(gap > TOLERANCE for gap in gaps)
        assert max(gaps) > VISIBLE


@pytest.mark.parametrize("reports_spans", [True, False])
async def test_T6_drain(
    make_engine: MakeEngine,
    tokenizer: Any,
    publications: list[Publication],
    oracle_models: dict[int, Any],
    reports_spans: bool,
) -> None:
    engine = await make_engine(reports_spans)
    gate = Gate()

    async def round_of(version: int) -> list[Sample]:
        tasks = [
            asyncio.create_task(generate_sample(engine, gate, job, 0, tokenizer=tokenizer, rollout=ROLLOUT))
            for job in jobs()[: NUM_SAMPLES // 2]
        ]
        # The samples are inside the gate before the publication asks for the drain.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await apply_publication(engine, gate, publications[version], "drain")
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
    assert all(report.num_aborted > 0 for report in reports)
    assert sum(sample.num_aborts for sample in samples) == sum(report.num_aborted for report in reports)
    assert_true(samples, lambda sample, versions: oracle.recompute(oracle_models, sample, versions, TEMPERATURE))


async def test_T6_in_place(
    make_engine: MakeEngine, tokenizer: Any, publications: list[Publication], oracle_models: dict[int, Any]
) -> None:
    engine = await make_engine(True)

    samples, _ = await produce(engine, tokenizer, publications, "in_place")

    assert_spans_enough(samples)
    assert_well_formed(samples)
    assert all(sample.num_aborts == 0 for sample in samples)
    assert_true(
        samples,
        lambda sample, versions: oracle.continued(
            oracle_models, sample, versions, TEMPERATURE, engine.found[sample.id]
        ),
    )
    # The old KV matters: a plain recompute under the right versions is visibly another number.
    plain = [
        oracle.gap(sample, oracle.recompute(oracle_models, sample, sample.versions, TEMPERATURE))
        for sample in samples
        if len(versions_of(sample)) >= 2
    ]
    assert max(plain) > VISIBLE


async def test_T6_in_place_without_spans_never_claims_a_newer_version(
    make_engine: MakeEngine, tokenizer: Any, publications: list[Publication]
) -> None:
    engine = await make_engine(False)

    samples, _ = await produce(engine, tokenizer, publications, "in_place")

    assert_well_formed(samples)
    truths = {sample.id: engine.truth[sample.id] for sample in samples}
    assert sum(len(set(truth)) >= 2 for truth in truths.values()) >= 0.2 * len(samples)
    for sample in samples:
        truth, recorded = truths[sample.id], sample.versions[sample.prompt_length :]
        assert all(claimed <= true for claimed, true in zip(recorded, truth, strict=True))
        assert recorded[0] == truth[0]


class Quiz:
    """Asks a second question after the first answer; tells the test when it does."""

    def __init__(self, second_turn: asyncio.Event) -> None:
        self.second_turn = second_turn

    async def reset(self, job: Job) -> None:
        assert job.prompt

    async def step(self, sample: Sample) -> Observation | None:
        if sample.num_turns > 1:
            return None
        self.second_turn.set()
        return Observation(text="?and-then<")


@pytest.mark.parametrize("policy", ["drain", "abort", "in_place"])
async def test_T6_T8_two_turns_with_an_observation(
    make_engine: MakeEngine,
    tokenizer: Any,
    publications: list[Publication],
    oracle_models: dict[int, Any],
    policy: Policy,
) -> None:
    engine, gate, second_turn = await make_engine(True), Gate(), asyncio.Event()
    # Stops at a letter that soon comes up; the second turn ends at the bound where it does not.
    sampling = {"max_new_tokens": 90, "stop": ["a"], "ignore_eos": True, "temperature": TEMPERATURE}
    tasks = [
        asyncio.create_task(
            generate_sample(
                engine,
                gate,
                Job(id=f"quiz/0/{index}", n=1, prompt=f"{index:03}=", sampling=sampling),
                0,
                tokenizer=tokenizer,
                rollout=ROLLOUT,
                environment=Quiz(second_turn),
            )
        )
        for index in range(16)
    ]
    await second_turn.wait()
    await apply_publication(engine, gate, publications[2], policy)
    samples = await asyncio.gather(*tasks)

    two_turns = [sample for sample in samples if sample.num_turns == 2]
    assert two_turns
    observation = tokenizer.encode("?and-then<", add_special_tokens=False)
    for sample in two_turns:
        start = _index_of(sample.tokens, observation, sample.prompt_length)
        stop = start + len(observation)
        assert not any(sample.generated[start:stop] + sample.loss_mask[start:stop])
        assert set(sample.versions[start:stop]) == {-1}
        assert set(sample.logprobs[start:stop]) == {0.0}
        assert all(sample.generated[sample.prompt_length : start] + sample.generated[stop:])
        assert sample.turns == [
            tokenizer.decode(sample.tokens[sample.prompt_length : start], skip_special_tokens=True),
            tokenizer.decode(sample.tokens[stop:], skip_special_tokens=True),
        ]
    if policy != "drain":
        assert any(len(versions_of(sample)) == 2 for sample in two_turns)
    for sample in samples:
        if policy == "in_place":
            found = engine.found[sample.id]
            expected = oracle.continued(oracle_models, sample, sample.versions, TEMPERATURE, found)
        else:
            expected = oracle.recompute(oracle_models, sample, sample.versions, TEMPERATURE)
        assert oracle.gap(sample, expected) < TOLERANCE


def _index_of(tokens: list[int], part: list[int], start: int) -> int:
    return next(i for i in range(start, len(tokens)) if tokens[i : i + len(part)] == part)
