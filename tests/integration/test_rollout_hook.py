"""``hooks.rollout`` and ``hooks.eval``: a function that makes a whole group, and another one for evaluations.

Redis is real, workers that are killed are processes; the engine is a fake, which draws the same tokens every time.
"""

import re
import signal
from typing import Any

import pytest
import redis
from pydantic import ValidationError

from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_engine import EOS, FILLER, FIRST, LOGPROB, FakeEngine
from tests.integration.fake_fixtures import Make
from tests.integration.slime_parts import SAID
from tests.integration.worker_play import (
    admit,
    all_in,
    job,
    letters,
    metas,
    read_group,
    read_samples,
    tended,
    until,
    working,
)
from tests.integration.worker_process import Start, start

__all__ = ["start"]

PARTS = "tests.integration.slime_parts"
DRAWN = [*FIRST, FILLER, FILLER, EOS]


async def test_T6_T8_a_group_is_made_together_each_sample_of_its_own_draws(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    jobs = admit(client, keys, [job(0, n=3), job(1, n=3)])

    async with working(config(hooks={"rollout": f"{PARTS}:debates"})):
        await until(all_in(client, keys, jobs, "ready"))

    for name in jobs:
        for k, (meta, payload) in enumerate(read_group(client, keys, name)):
            at = payload.prompt_length
            assert payload.tokens[at:].tolist() == DRAWN
            assert payload.tokens[at - 6 * k : at].tolist() == DRAWN * k
            assert payload.logprobs[at:].tolist() == [LOGPROB] * 6
            assert (meta.reward, meta.status, meta.num_turns) == (6.0, "completed", 1)
    ledger = play.drawn_to_train(client, keys)
    assert (ledger.heard, ledger.held) == (36, 36)
    play.assert_conserved(client, keys)


async def test_a_group_may_be_made_by_a_function_for_single_samples_on_fewer_slots(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    """``args.each`` are such a function's args, each with an address of its own; given answers are left out."""
    jobs = admit(client, keys, [job(0), job(1, n=3, answers=["12"])])
    fake.open.clear()

    async with working(config(hooks={"rollout": f"{PARTS}:generates_each"}, worker={"slots": 1})) as worker:
        await until(lambda: fake.num_running == 1 and worker.services.slots.locked())
        fake.open.set()
        await until(all_in(client, keys, jobs, "ready"))
        assert worker.services.num_running == 0

    assert fake.peak == 1, "a request holds a slot, and a function none"
    whole = [*DRAWN, *SAID, *DRAWN]
    assert [one.tokens[one.prompt_length :].tolist() for _, one in read_samples(client, keys, jobs[0])] == [whole] * 2
    assert [meta.status for meta in metas(client, keys, jobs[1])] == ["given", "completed", "completed"]
    play.assert_conserved(client, keys)


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("copies_the_first", "hook_unproven", "sample d/0/0/1: .* no request of this sample generated it"),
        ("leaves_one_out", "hook_raised", "instead of a list of 2 samples: return one per input"),
        ("gives_one_twice", "hook_raised", "returned a sample twice"),
    ],
)
async def test_T6_T11_what_a_group_claims_and_did_not_draw_is_a_named_failure(
    client: redis.Redis, keys: Keys, config: Make, name: str, reason: str, says: str
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(hooks={"rollout": f"{PARTS}:{name}"})), tended(client, keys):
        await until(all_in(client, keys, jobs, "dead"))

    letter = letters(client, keys)[jobs[0]]
    assert (letter["reason"], letter["attempts"]) == (reason, "2")
    assert re.search(says, letter["detail"]), letter["detail"]
    ledger = play.drawn_to_train(client, keys)
    assert ledger.held == 0
    assert sum(ledger.accounts.values()) == ledger.heard
    play.assert_conserved(client, keys)


async def test_evaluations_are_made_by_a_function_of_their_own(client: redis.Redis, keys: Keys, config: Make) -> None:
    trained = admit(client, keys, [job(0)])
    asked = admit(client, keys, [job(1, lane="eval")], source="eval")

    data = {"eval": [{"name": "e", "path": "none.jsonl"}]}
    async with working(config(hooks={"eval": f"{PARTS}:only_for_evaluation"}, data=data)):
        await until(all_in(client, keys, [*trained, *asked], "ready"))

    assert [meta.num_turns for meta in metas(client, keys, trained[0])] == [1, 1]
    assert [meta.num_turns for meta in metas(client, keys, asked[0])] == [2, 2]
    play.assert_conserved(client, keys)


@pytest.mark.parametrize(
    ("hooks", "held"),
    [
        ({"generate": f"{PARTS}:generate"}, ("d/0/0/0/1", "d/0/0/1/1")),
        ({"rollout": f"{PARTS}:debates"}, ("d/0/0/1/0",)),
        ({"rollout": f"{PARTS}:generates_each"}, ("d/0/0/0/1", "d/0/0/1/1")),
    ],
)
async def test_I2_I10_a_worker_killed_inside_of_a_function_loses_and_doubles_nothing(
    client: redis.Redis,
    keys: Keys,
    config: Make,
    fake: FakeEngine,
    start: Start,
    hooks: dict[str, Any],
    held: tuple[str, ...],
) -> None:
    """Killed when something was drawn and more is asked for: the next worker begins the samples anew."""
    fake.held = held
    jobs = admit(client, keys, [job(0)])
    worker = start(config(hooks=hooks), "killed")
    await until(lambda: fake.num_running == len(held))
    worker.signal(signal.SIGKILL)
    async with tended(client, keys):
        await until(all_in(client, keys, jobs, "queued"), "for the lease to run out")
        fake.rest.set()
        async with working(config(hooks=hooks), "next"):
            await until(all_in(client, keys, jobs, "ready"))

    assert play.counter(client, keys, "crashes") == 1
    assert {meta.worker.split(".")[0] for meta in metas(client, keys, jobs[0])} == {"next"}
    ledger = play.drawn_to_train(client, keys)
    drawn = sum(meta.num_generated for meta in metas(client, keys, jobs[0]))
    assert (ledger.heard, ledger.held) == (drawn, drawn), "what the killed one drew was told to nobody"
    play.assert_conserved(client, keys)


async def test_I2_an_engine_that_dies_under_a_group_is_charged_once_and_the_group_begun_anew(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    fake.held = ("d/0/0/1/0",)
    jobs = admit(client, keys, [job(0)])
    async with working(config(hooks={"rollout": f"{PARTS}:debates"})), tended(client, keys):
        await until(lambda: fake.num_running == 1 and fake.prompts[-1][-6:] == DRAWN)
        fake.rest.set()
        fake.die()
        await until(all_in(client, keys, jobs, "ready"))

    assert play.counter(client, keys, "crashes") == 1
    ledger = play.drawn_to_train(client, keys)
    assert (ledger.held, ledger.accounts["lost_turn"]) == (12, 6), "the first one's answer is thrown away"
    play.assert_conserved(client, keys)


async def test_a_drain_hands_a_group_back_at_no_charge(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    fake.held = ("d/0/0/1/0",)
    jobs = admit(client, keys, [job(0)])
    async with working(config(hooks={"rollout": f"{PARTS}:debates"})):
        await until(lambda: fake.num_running == 1 and fake.prompts[-1][-6:] == DRAWN)

    assert (play.counter(client, keys, "released"), play.counter(client, keys, "crashes")) == (1, 0)
    assert not fake.num_running
    fake.rest.set()
    async with working(config(hooks={"rollout": f"{PARTS}:debates"}), "next"):
        await until(all_in(client, keys, jobs, "ready"))
    ledger = play.drawn_to_train(client, keys)
    assert (ledger.held, sum(ledger.accounts.values())) == (12, ledger.heard - 12)
    play.assert_conserved(client, keys)


def test_samples_have_one_maker(config: Make) -> None:
    with pytest.raises(ValidationError, match=r"hooks\.generate and hooks\.rollout both generate samples"):
        config(hooks={"generate": f"{PARTS}:generate", "rollout": f"{PARTS}:debates"})
    own = {"name": "held", "path": "none.jsonl", "environment": f"{PARTS}:Echo"}
    data = {"train": [{"name": "d", "path": "none.jsonl"}], "eval": [own]}
    with pytest.raises(ValidationError, match=r"hooks\.eval generates samples, but dataset 'held' has an environment"):
        config(hooks={"eval": f"{PARTS}:generate"}, data=data)
    with pytest.raises(
        ValidationError, match=r"hooks\.rollout generates samples, but dataset 'held' has an environment"
    ):
        config(hooks={"rollout": f"{PARTS}:debates"}, data=data)
