"""Whatever rewards and environments of a user do, it has a named outcome for their job, and their neighbours go on.

The worker is a process of its own, Redis is real.
"""

import signal

import redis

from penstock.records.keys import Keys
from tests.integration import play
from tests.integration.fake_fixtures import Make
from tests.integration.worker_play import admit, all_in, job, letters, metas, tended, until
from tests.integration.worker_process import Start, start

__all__ = ["start"]

PARTS = "tests.integration.user_code_parts"

REWARDS = {
    "unwritable": ("reward_raised", "ValueError: a\\ud800b"),
    "unprintable": ("reward_raised", "Unprintable: <its text cannot be shown>"),
    "own_base_exception": ("reward_raised", "Own: of its own"),
    "interrupts": ("reward_raised", "KeyboardInterrupt"),
    "exits_at_once": ("reward_raised", "SystemExit: os._exit(0)"),
    "exits_at_once_in_the_loop": ("reward_raised", "SystemExit: os._exit(0)"),
    "exits": ("reward_raised", "SystemExit: 3"),
    "exits_in_the_loop": ("reward_raised", "SystemExit: 3"),
    "cancels_itself": ("reward_raised", "was cancelled by its own code"),
    "swallows": ("reward_timeout", "took longer than 10 s"),
    "spoils": ("reward_raised", "and spoils its sample"),
    "too_much": ("reward_not_a_number", "not a finite number"),
    "beyond_float32": ("reward_not_a_number", "not a finite number"),
    "nothing": ("reward_not_a_number", "gave None"),
    "nasty": ("reward_not_a_number", "Own: when it is read"),
    "doubled": ("reward_not_a_number", "gave [[["),
    "wide": ("reward_too_large", "keep what is long elsewhere"),
    "addresses": ("reward_raised", "ValueError: ://:"),
    "says_much": ("reward_raised", "ValueError: xxx"),
}

#: They give a number, and leave behind what would end the worker, or what nobody can walk through.
ODD = ("odd_info", "exits_behind", "interrupts_behind", "exits_by_a_callback", "stops_the_loop", "forks",
       "forks_in_a_thread", "entangled")  # fmt: skip

ENVIRONMENTS = {
    "NotMade": ("environment_raised", "SystemExit: 4"),
    "Exits": ("environment_raised", "SystemExit: 5"),
    "ExitsAtOnce": ("environment_raised", "SystemExit: os._exit(0)"),
    "Unwritable": ("environment_raised", "ValueError: a\\ud800b"),
    "Answers": ("environment_raised", "return an Observation or None"),
    "OddTokens": ("environment_raised", "above 2147483648"),
    "Loses": ("environment_raised", "LeaseLost: not yours to say"),
    "Spoils": ("environment_raised", "and spoils its sample"),
}


async def test_T11_nothing_that_a_users_code_does_ends_the_worker_or_holds_up_its_neighbours(
    client: redis.Redis, keys: Keys, config: Make, start: Start
) -> None:
    names = [f"{PARTS}:{name}" for name in (*REWARDS, *ENVIRONMENTS)]
    bad = [job(i, reward=name) for i, name in enumerate(names[: len(REWARDS)])]
    bad += [job(i, environment=name) for i, name in enumerate(names[len(REWARDS) :], len(bad))]
    odd = [job(i, reward=f"{PARTS}:{name}") for i, name in enumerate(ODD, len(bad))]
    good = job(len(bad) + len(odd))
    buried = [one.id for one in bad]
    admit(client, keys, [*bad, *odd, good])
    own = {"rewards": [*names[: len(REWARDS)], *(f"{PARTS}:{name}" for name in ODD)]}
    own["environments"] = names[len(REWARDS) :]
    made = config(
        reward={"function": f"{PARTS}:length", "timeout_s": 10.0}, worker={"slots": 64, "max_attempts": 2} | own
    )
    worker = start(made)

    async with tended(client, keys, lease_ms=60_000):

        def settled() -> bool:
            finished = all_in(client, keys, [one.id for one in (*odd, good)], "ready")()
            return worker.process.poll() is not None or (finished and all_in(client, keys, buried, "dead")())

        await until(settled, f"for {worker.log}")
    assert worker.process.poll() is None, worker.text()
    found = letters(client, keys)
    for name, one in zip(names, bad, strict=True):
        reason, says = (REWARDS | ENVIRONMENTS)[name.partition(":")[2]]
        letter = found[one.id]
        assert (name, letter["reason"], letter["attempts"], letter["crashes"]) == (name, reason, "2", "0"), letter
        assert says in letter["detail"], letter["detail"]
    assert worker.log.stat().st_size < 4 * 2**20, "what user code says is cut before it is logged"
    assert "tried to end this process, which continues: " in worker.text()
    assert worker.text().count("a process that a user's code forked came back from it by Raised") == good.n
    entangled = metas(client, keys, odd[-1].id)[0].reward_info
    assert entangled == {"node": ["..."] * 8}
    info = metas(client, keys, odd[0].id)[0].reward_info
    assert (info["text"], info["array"], info["bytes"]) == ("a\\ud800b", [0, 1, 2], "b'x'")
    assert info["nasty"].startswith("<Unprintable")
    play.assert_conserved(client, keys)

    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0, worker.text()
    assert client.hlen(keys.workers) == 0
