"""``hooks.generate``: generate and reward functions of slime's signatures in a real worker, and what they claim.

Redis is real; the engine is a fake, which draws the same tokens every time.
"""

from itertools import chain
from typing import Any

import pytest
import redis

from penstock.errors import ConfigError
from penstock.names import PART_REWARDS
from penstock.records.keys import Keys
from penstock.workers.main import Worker
from tests.integration import play
from tests.integration.fake_engine import EOS, FILLER, FIRST, LOGPROB, FakeEngine
from tests.integration.fake_fixtures import Make
from tests.integration.slime_parts import SAID
from tests.integration.worker_play import IDS, admit, all_in, job, letters, metas, read_samples, tended, until, working

PARTS = "tests.integration.slime_parts"
DRAWN = [*FIRST, FILLER, FILLER, EOS]
REWARD = {"function": f"{PARTS}:reward_func"}


def hooks(generate: str, **more: Any) -> dict[str, Any]:
    return {"generate": f"{PARTS}:{generate}", "args": {"bonus": 0.5}, **more}


async def test_T6_T8_a_generate_and_a_reward_of_slimes_signatures_run_unchanged(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0), job(1)])

    async with working(config(reward=REWARD, hooks=hooks("generate"))):
        await until(all_in(client, keys, jobs, "ready"))

    meta, payload = read_samples(client, keys, jobs[0])[0]
    at = payload.prompt_length
    assert payload.tokens[at:].tolist() == [*DRAWN, *SAID, *DRAWN]
    told = [1] * 6 + [0] * 2 + [1] * 6
    assert payload.generated[at:].tolist() == payload.loss_mask[at:].tolist() == told
    assert payload.logprobs[at:].tolist() == [LOGPROB * one for one in told]
    assert payload.versions[at:].tolist() == [1 if one else -1 for one in told]
    assert (meta.reward, meta.num_turns, meta.status) == (1.5, 2, "completed")
    assert meta.reward_info == {"calls": 1, "label": "x"}
    assert not fake.num_running
    ledger = play.drawn_to_train(client, keys)
    assert (ledger.heard, ledger.held) == (48, 48)
    play.assert_conserved(client, keys)


async def test_T8_a_text_that_goes_on_keeps_the_tokens_that_were_drawn(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0, n=1)])

    async with working(config(hooks=hooks("generate_by_text"))):
        await until(all_in(client, keys, jobs, "ready"))

    ((_, payload),) = read_samples(client, keys, jobs[0])
    said = [IDS[character] for character in "1+1"]
    assert payload.tokens[payload.prompt_length :].tolist() == [*DRAWN, *said, *DRAWN]
    assert int(payload.loss_mask.sum()) == 12
    assert fake.prompts[-1] == payload.tokens[:-6].tolist()


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("masks_nothing", "hook_unproven", "bears loss, but no request of this sample generated it"),
        ("writes_down_others", "hook_unproven", "claims log-probability -0.1, but was sampled with -0.5"),
        ("draws_greedily", "hook_unproven", "temperature = 0.0 samples from another distribution"),
        ("invents", "hook_unproven", "response token 0 bears loss"),
        ("gives_up", "hook_raised", "with status 'aborted'"),
        ("forgets", "hook_raised", "returned None: return the input sample"),
        ("trains_twice", "hook_unproven", "also bears loss in another returned sample"),
        ("returns_nothing", "hook_raised", "returned 0 samples for one"),
        ("asks_too_much", "hook_raised", "did you mean max_new_tokens?"),
    ],
)
async def test_T6_T11_what_a_generate_claims_and_did_not_draw_is_a_named_failure(
    client: redis.Redis, keys: Keys, config: Make, name: str, reason: str, says: str
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(hooks=hooks(name))), tended(client, keys):
        await until(all_in(client, keys, jobs, "dead"))

    letter = letters(client, keys)[jobs[0]]
    assert (letter["reason"], letter["attempts"]) == (reason, "2")
    assert says in letter["detail"]
    ledger = play.drawn_to_train(client, keys)
    assert (ledger.held, ledger.accounts.get("lost_turn", 0)) == (0, ledger.heard), "what was drawn is thrown away"
    play.assert_conserved(client, keys)


async def test_T6_T8_samples_that_a_generate_returns_for_one_are_parts_of_it(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(reward=REWARD, hooks=hooks("branches", sample=[f"{PARTS}:hides_the_second"]))):
        await until(all_in(client, keys, jobs, "ready"))

    for meta, payload in read_samples(client, keys, jobs[0]):
        at = payload.prompt_length
        prompt = payload.tokens[:at].tolist()
        sequences = [[*prompt, *DRAWN], [*prompt, *DRAWN], [*prompt, *DRAWN, *DRAWN]]
        assert payload.tokens.tolist() == [*chain(*sequences)]
        drawn = [[0] * at + [1] * 6, [0] * at + [1] * 6, [0] * (at + 6) + [1] * 6]
        assert payload.generated.tolist() == [*chain(*drawn)]
        drawn[1] = [0] * (at + 6)
        assert payload.loss_mask.tolist() == [*chain(*drawn)]
        assert [(part.length, part.prompt_length, part.num_loss) for part in meta.all_parts] == [
            (at + 6, at, 6), (at + 6, at, 0), (at + 12, at + 6, 6)
        ]  # fmt: skip
        assert (meta.reward, meta.num_turns, meta.status) == (0.5, 3, "completed")
        assert meta.reward_info["part_rewards"] == [0.5, 0.5, 0.5]
        assert [info["calls"] for info in meta.reward_info["part_info"]] == [1, 2, 3]
        assert [side[0] for side in meta.sides] == [PART_REWARDS]
    ledger = play.drawn_to_train(client, keys)
    assert (ledger.heard, ledger.held) == (36, 36), "each answer is counted once"
    play.assert_conserved(client, keys)


async def test_T11_rewards_that_a_generate_sets_on_each_of_several_samples_are_averaged(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(hooks=hooks("rewards_each"))):
        await until(all_in(client, keys, jobs, "ready"))

    for meta in metas(client, keys, jobs[0]):
        assert (meta.reward, meta.reward_info) == (3.0, {"part_rewards": [1.0, 2.0, 6.0]})
    play.assert_conserved(client, keys)


async def test_T11_a_reward_that_a_generate_sets_is_read_as_one_of_a_reward_function(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(hooks=hooks("rewards_itself"))):
        await until(all_in(client, keys, jobs, "ready"))

    assert [(meta.reward, meta.reward_info) for meta in metas(client, keys, jobs[0])] == [(2.0, {"why": "said so"})] * 2
    play.assert_conserved(client, keys)


async def test_I8_what_is_made_without_asking_the_engine_is_no_proof_that_it_lives(
    client: redis.Redis, keys: Keys, config: Make, fake: FakeEngine
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(hooks=hooks("gives_without_asking"))) as worker:
        await until(all_in(client, keys, jobs, "ready"))
        assert not worker.services.is_sure

    assert not fake.asked
    assert client.hgetall(keys.trials("policy")) == {}
    play.assert_conserved(client, keys)


async def test_T11_a_reward_of_words_that_a_generate_sets_is_a_named_failure(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(hooks=hooks("rewards_with_words"))), tended(client, keys):
        await until(all_in(client, keys, jobs, "dead"))

    letter = letters(client, keys)[jobs[0]]
    assert letter["reason"] == "reward_not_a_number"
    assert "reward that was set on it gave 'high', not a finite number" in letter["detail"]
    play.assert_conserved(client, keys)


async def test_a_generate_that_is_not_async_is_refused_at_the_start(config: Make) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.generate .*gives_a_word"):
        Worker(config(hooks={"generate": "tests.integration.hook_parts:gives_a_word"}), "w")
    with pytest.raises(ConfigError, match="is awaited but is not async"):
        Worker(config(hooks={"generate": "tests.integration.hook_parts:makes_nothing"}), "w")
