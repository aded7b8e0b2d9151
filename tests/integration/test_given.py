"""Answers that are given: scored under the present weights, rewarded and committed beside those that are drawn."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from penstock.config import Config, ModelConfig
from penstock.consumers.trainer import Trainer
from penstock.records.keys import Keys
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.redis.server import RedisServer
from tests.integration import oracle, play
from tests.integration.fake_engine import EOS, FIRST, FakeEngine
from tests.integration.parts import buffering
from tests.integration.worker_play import (
    IDS,
    admit,
    all_in,
    job,
    letters,
    make_config,
    presence,
    publish,
    read_group,
    tended,
    until,
    working,
)

Make = Callable[..., Config]


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine().up() as engine:
        yield engine


@pytest.fixture
def make(redis_server: RedisServer, keys: Keys, model_config: ModelConfig, tmp_path: Path) -> Make:
    def make(url: str, **sections: Any) -> Config:
        return make_config(redis_server.url, keys, model_config, tmp_path, engine={"url": url}, **sections)

    return make


async def test_given_answers_are_samples_of_their_group(
    client: redis.Redis, keys: Keys, publications: list[Publication], make: Make, fake: FakeEngine
) -> None:
    """The fake engine scores a token as minus its id over a hundred."""
    publish(client, keys, publications[1])
    one = job(0, n=3, answers=["12", [9, 8, 7, 6]], sampling={"temperature": 0.5, "max_new_tokens": 16})
    jobs = admit(client, keys, [one])
    async with working(make(fake.url)) as worker:
        await until(all_in(client, keys, jobs, "ready"))
        assert worker.services.tally.generated_tokens == fake.length, "what is given was not drawn"
    text, ids, drawn = read_group(client, keys, jobs[0])
    prompt = [IDS[letter] for letter in "a0="]
    for (meta, payload), answer in ((text, [IDS["1"], IDS["2"], EOS]), (ids, [9, 8, 7, 6])):
        assert payload.tokens.tolist() == [*prompt, *answer]
        assert payload.prompt_length == len(prompt)
        np.testing.assert_allclose(payload.logprobs[3:], [-token / 100 for token in answer], rtol=1e-6)
        assert (meta.status, meta.finish_reason, meta.temperature) == ("given", "given", 1.0)
        assert (meta.oldest, meta.newest, meta.reward) == (1, 1, len(answer))
    assert drawn[1].tokens[3:6].tolist() == FIRST
    assert (drawn[0].status, drawn[0].temperature) == ("completed", 0.5)
    play.assert_conserved(client, keys)


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"answers": ["1", "2", "3"]}, "gives 3 answers for a group of 2"),
        ({"answers": [{"text": "1"}]}, "must be text or lists of token ids"),
        ({"answers": [[3, -1]]}, "must be text or lists of token ids"),
        ({"answers": [[]]}, "answer 0 has 0"),
        (
            {"answers": [[5] * 600]},
            "has 600; both must have",
        ),
        ({"answers": [[100_000]]}, "token id 100000 is outside"),
        ({"answers": ["1"], "environment": "tests.integration.worker_parts:Echo"}, "answers and an environment"),
    ],
)
async def test_what_cannot_be_a_sample_is_buried_with_its_reason(
    client: redis.Redis,
    keys: Keys,
    publications: list[Publication],
    make: Make,
    fake: FakeEngine,
    over: dict[str, Any],
    says: str,
) -> None:
    publish(client, keys, publications[1])
    jobs = admit(client, keys, [job(0, **over)])
    async with working(make(fake.url)):
        await until(all_in(client, keys, jobs, "dead"))
    letter = letters(client, keys)[jobs[0]]
    assert letter["reason"] == "refused"
    assert says in letter["detail"]
    play.assert_conserved(client, keys)


async def test_a_reward_that_fails_is_tried_again_on_the_same_answer(
    client: redis.Redis, keys: Keys, publications: list[Publication], make: Make, fake: FakeEngine
) -> None:
    publish(client, keys, publications[1])
    one = job(0, answers=["12", "34"], reward="tests.integration.worker_parts:raises_for_the_second")
    async with tended(client, keys), working(make(fake.url)):
        jobs = admit(client, keys, [one])
        await until(all_in(client, keys, jobs, "ready"))
    answers = [payload.tokens[3:5].tolist() for _, payload in read_group(client, keys, jobs[0])]
    assert answers == [[IDS["1"], IDS["2"]], [IDS["3"], IDS["4"]]]
    play.assert_conserved(client, keys)


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_T6_a_trainer_is_handed_given_answers_with_the_logprobs_of_the_weights_that_scored_them(
    client: redis.Redis,
    keys: Keys,
    models: list[Path],
    publications: list[Publication],
    make: Make,
    engine_url: str,
) -> None:
    config = make(engine_url, trainer={"batch_groups": 4})
    publish(client, keys, publications[2])
    given = [[9, 20, 33, 27, 1], [40, 2, 2, 23, 18, 44, 1]]
    with buffering(config), Trainer(config) as trainer:
        jobs = [job(i, answers=given, not_before=2) for i in range(4)]
        admit(client, keys, jobs)
        async with working(config):
            await until(lambda: presence(client, keys)["state"] == "serving")
            await until(all_in(client, keys, [one.id for one in jobs], "ready"))
        batch = trainer.next(timeout=60)
        data = batch.padded()
        assert {row.status for row in batch.all_rows} == {"given"}
        model = {2: oracle.load_model(models[2])}
        for index, row in enumerate(batch.all_rows):
            length, start = row.length, row.prompt_length
            tokens = data["tokens"][index, :length].tolist()
            assert tokens[start:] == given[row.k]
            assert data["loss_mask"][index].nonzero().flatten().tolist() == list(range(start, length))
            assert set(data["versions"][index, start:length].tolist()) == {2}
            sample = Sample(jobs[0], 0, tokens=tokens)
            expected = oracle.recompute(model, sample, [-1] * start + [2] * (length - start), 1.0)
            np.testing.assert_allclose(data["logprobs"][index, start:length], expected[start:], atol=1e-4)
