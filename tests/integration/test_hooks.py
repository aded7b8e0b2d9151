"""Functions of section ``hooks`` in a real worker: what they may change, and what becomes of a job where they fail.

Redis is real; the engine is a fake, which draws the same tokens every time.
"""

import pytest
import redis

from penstock.errors import ConfigError
from penstock.records.keys import Keys
from penstock.workers.main import Worker
from tests.integration import play
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, letters, metas, tended, until, working

PARTS = "tests.integration.hook_parts"
COUNTS = {"function": f"{PARTS}:counts_loss"}


def hooks(*names: str, **more: object) -> dict[str, object]:
    return {"sample": [f"{PARTS}:{name}" for name in names], **more}


async def test_hooks_see_each_sample_before_its_reward_and_take_loss_off(
    client: redis.Redis, keys: Keys, config: Make
) -> None:
    jobs = admit(client, keys, [job(0), job(1)])
    section = hooks("masks_the_end", "marks_even_jobs", args={"limit": 3})

    async with working(config(reward=COUNTS, hooks=section)):
        await until(all_in(client, keys, jobs, "ready"))

    removed, kept = metas(client, keys, jobs[0]), metas(client, keys, jobs[1])
    assert [(meta.num_generated, meta.num_loss, meta.reward) for meta in removed] == [(6, 0, 0.0)] * 2
    assert [(meta.num_generated, meta.num_loss, meta.reward) for meta in kept] == [(6, 5, 5.0)] * 2
    assert kept[0].reward_info == {"seen": [3, 6]}
    play.assert_conserved(client, keys)


async def test_a_reward_that_a_hook_sets_is_the_samples(client: redis.Redis, keys: Keys, config: Make) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(reward=COUNTS, hooks=hooks("sets_the_reward"))):
        await until(all_in(client, keys, jobs, "ready"))

    assert [meta.reward for meta in metas(client, keys, jobs[0])] == [7.5] * 2


@pytest.mark.parametrize(
    ("name", "reason", "says"),
    [
        ("draws_by_itself", "hook_unproven", "changed tokens of the generated sample"),
        ("adds_loss", "hook_unproven", "added loss to tokens without loss"),
        ("halves", "hook_unproven", "invalid loss_mask: it needs a 0 or 1 for each"),
        ("exits", "hook_raised", "raised SystemExit: 3"),
        ("gives_a_word", "hook_raised", "returned 'done': return a sample or None"),
        ("hangs", "hook_timeout", "timed out after 0.5 s"),
    ],
)
async def test_T8_T11_a_hook_that_fails_is_a_named_failure_of_that_job(
    client: redis.Redis, keys: Keys, config: Make, name: str, reason: str, says: str
) -> None:
    jobs = admit(client, keys, [job(0)])

    async with working(config(hooks=hooks(name, timeout_s=0.5))), tended(client, keys):
        await until(all_in(client, keys, jobs, "dead"))

    letter = letters(client, keys)[jobs[0]]
    assert (letter["reason"], letter["attempts"]) == (reason, "2")
    assert f"hooks.sample {PARTS}:{name}" in letter["detail"]
    *trace, sentence = letter["detail"].splitlines()
    assert says in sentence, "the last line says what became of it"
    assert ("Traceback" in "".join(trace)) == (name == "exits"), "of the user's code alone"
    assert "workers/" not in "".join(trace)
    play.assert_conserved(client, keys)


async def test_a_worker_refuses_a_hook_that_it_could_not_call(config: Make) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.sample .*:counts_nothing cannot be imported"):
        Worker(config(hooks=hooks("counts_nothing")), "w")
