"""One sequence to be scored: under one version, or again; and what can never be scored."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.config import RolloutConfig
from penstock.consumers.scorer import Scorer
from penstock.errors import ConfigError, EngineError, ProtocolError
from penstock.protocol.score_jobs import Given, make_job
from penstock.records.job import Job
from penstock.workers.engine import Scores
from penstock.workers.jobs.generate import Source
from penstock.workers.jobs.scoring import MAX_TRIES, score_sample
from penstock.workers.jobs.valves import Valves


class Scripted:
    vocab_size = 10

    def __init__(self, *answers: Scores) -> None:
        self.answers = list(answers)

    async def score(self, tokens: list[int], start: int, *, rid: str, with_routing: bool) -> Scores:
        assert not with_routing, "nobody asked"
        return self.answers.pop(0)


async def score(engine: Scripted, job: Job, k: int = 0) -> Any:
    return await score_sample(Source(engine, Valves(), None, RolloutConfig()), job, k)  # type: ignore[arg-type]


JOB = make_job("s/0/0", [Given([1, 2, 3], 1), Given([4, 5], 1)])


async def test_T6_what_weights_changed_under_is_scored_again() -> None:
    engine = Scripted(Scores([-9.0, -9.0], None), Scores([], None), Scores([-1.0, -2.0], 4))
    sample = await score(engine, Job.from_bytes(JOB.to_bytes()))
    assert (sample.tokens, sample.logprobs, sample.prompt_length) == ([1, 2, 3], [0.0, -1.0, -2.0], 1)
    assert sample.reward_info == {"version": 4}
    assert sample.generated == sample.loss_mask == [0, 0, 0]
    assert sample.versions == [-1, -1, -1]


async def test_weights_that_always_change_are_an_error() -> None:
    with pytest.raises(EngineError, match=r"s/0/0/1: weights changed"):
        await score(Scripted(*[Scores([], None)] * MAX_TRIES), JOB, 1)


@pytest.mark.parametrize(
    "sequences", [None, [], [[0, [1, 2]]], [[2, [1, 2]]], [[1, [1, -2]]], [[1, [1, "2"]]], [[1]], [["1", [1, 2]]], 7]
)
async def test_a_job_that_penstock_did_not_write_is_refused(sequences: Any) -> None:
    job = Job("s/0/0", 1, lane="score", metadata={"sequences": sequences} if sequences is not None else {})
    with pytest.raises(ProtocolError, match="s/0/0"):
        await score(Scripted(), job)


async def test_an_id_that_would_end_the_engine_never_reaches_it() -> None:
    with pytest.raises(ConfigError, match="id 10, but the model's ids are below 10"):
        await score(Scripted(), make_job("s/0/0", [Given([1, 10], 1)]))


@pytest.mark.parametrize("temperature", [0.7, 0.0, 2, True, "1"])
async def test_T6_a_temperature_that_no_engine_scores_at_is_refused_and_not_recorded(temperature: Any) -> None:
    engine = Scripted(Scores([-1.0, -2.0], 4))
    job = replace(JOB, sampling={"temperature": temperature})
    with pytest.raises(ConfigError, match=r"scoring job s/0/0 asks for log-probabilities at temperature .* score at 1"):
        await score(engine, job)
    assert len(engine.answers) == 1, "nothing is asked"


def test_a_scorer_names_what_it_cannot_score_at() -> None:
    with pytest.raises(ConfigError, match=r"Scorer\.score asks for log-probabilities at temperature 0\.7"):
        Scorer.score(None, [[1, 2]], [1], temperature=0.7)  # type: ignore[arg-type]
