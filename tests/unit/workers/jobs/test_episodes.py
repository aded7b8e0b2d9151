"""A sample of several turns is continued in a new environment, from whatever was stored when its worker was killed."""

import asyncio
from typing import Any

import numpy as np
import pytest

from penstock.errors import EnvironmentRaised
from penstock.records.job import Job
from penstock.records.sample import Drawn, Sample
from penstock.workers.engine import Segment
from penstock.workers.jobs.environments import Observation, close
from penstock.workers.jobs.episodes import MAX_STATE_BYTES
from penstock.workers.jobs.prefixes import growth_to_bytes, partial_from_bytes, partial_to_bytes
from tests.unit.workers.jobs.test_generate import JOB, ScriptedEngine, make, segment

#: The turns of the engine; the environment answers each but the last with its first letter.
TURNS = ["xyz", "uv", "w", "rst"]


def answers(*texts: str) -> list[Segment]:
    return [segment(text, "stop", version=1 + at) for at, text in enumerate(texts)]


class Replayable:
    """Answers with the first letter of a turn, in capitals of its place; its state is the number of turns."""

    replayable = True

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.resets = 0

    async def reset(self, job: Job) -> None:
        self.seen, self.resets = [], self.resets + 1

    async def step(self, sample: Sample) -> Observation | None:
        self.seen.append(sample.turns[-1])
        sample.reward = (sample.reward or 0.0) + len(sample.turns[-1])
        sample.reward_info["turns"] = len(self.seen)
        return Observation(text=sample.turns[-1][0] + "q") if len(self.seen) < len(TURNS) else None


class Saved(Replayable):
    replayable = False
    repeatable = True

    async def snapshot(self) -> Any:
        return {"seen": self.seen}

    async def restore(self, job: Job, state: Any) -> None:
        self.seen = state["seen"]


class Stored:
    """What Redis would hold of a sample: every record that was written, by growth where nothing else changed."""

    #: Every record is complete, as after a mask was changed.
    anew = False

    def __init__(self) -> None:
        self.states: list[bytes] = []
        self.sample = Sample(JOB, 0)
        self._length = self._turns = 0

    async def __call__(self) -> None:
        if self.states and not self.anew:
            self.states.append(self.states[-1] + growth_to_bytes(self.sample, self._length, self._turns))
        else:
            self.states.append(partial_to_bytes(self.sample))
        self._length, self._turns = len(self.sample.tokens), len(self.sample.turns)


def facts(sample: Sample) -> dict[str, Any]:
    names = (
        "tokens",
        "logprobs",
        "generated",
        "loss_mask",
        "versions",
        "turns",
        "text",
        "num_turns",
        "status",
        "reward",
    )
    return {name: getattr(sample, name) for name in names} | {"info": sample.reward_info}


async def whole(environment: Replayable, stored: Stored) -> Sample:
    return await make(ScriptedEngine(*answers(*TURNS)), partial=stored.sample, environment=environment, store=stored)


@pytest.mark.parametrize("kind", [Replayable, Saved])
async def test_a_kill_at_any_stored_place_costs_no_finished_turn(kind: type[Replayable]) -> None:
    stored = Stored()
    expected = facts(await whole(kind(), stored))
    assert len(stored.states) == 2 * len(TURNS), "before each step, and after it"
    for at, state in enumerate(stored.states):
        partial, account, environment = partial_from_bytes(state, JOB, 0), Drawn(), kind()
        left = answers(*TURNS)[(at + 2) // 2 :]
        engine = ScriptedEngine(*left)
        done = await make(engine, partial=partial, environment=environment, account=account, store=Stored())
        assert facts(done) == expected
        assert not engine.answers
        assert len(engine.asked) == len(left)
        assert account == Drawn()


async def test_a_step_that_may_have_acted_is_not_repeated_unless_the_environment_allows_it() -> None:
    class Acts(Saved):
        repeatable = False

    stored = Stored()
    await whole(Acts(), stored)
    observed = stored.states[3]
    for open_step, lost in ((stored.states[0], 3), (stored.states[2], 5)):
        account, environment, engine = Drawn(), Acts(), ScriptedEngine(*answers(*TURNS))
        await make(engine, partial=partial_from_bytes(open_step, JOB, 0), environment=environment, account=account)
        assert (len(engine.asked), account.lost_turn, environment.resets) == (len(TURNS), lost, 1)
    account, environment, engine = Drawn(), Acts(), ScriptedEngine(*answers(*TURNS)[2:])
    await make(engine, partial=partial_from_bytes(observed, JOB, 0), environment=environment, account=account)
    assert (account.lost_turn, environment.resets) == (0, 0)


class Otherwise(Replayable):
    async def step(self, sample: Sample) -> Observation | None:
        answer = await super().step(sample)
        return Observation(text="zz") if answer is not None and self.resets == 1 else answer


class Raises(Replayable):
    async def step(self, sample: Sample) -> Observation | None:
        if self.resets == 1:
            raise ValueError
        return await super().step(sample)


@pytest.mark.parametrize("kind", [Otherwise, Raises])
async def test_a_replay_that_differs_starts_over_and_is_counted(kind: type[Replayable]) -> None:
    stored = Stored()
    expected = await whole(Replayable(), stored)
    account, environment, engine = Drawn(), kind(), ScriptedEngine(*answers(*TURNS))
    done = await make(
        engine, partial=partial_from_bytes(stored.states[3], JOB, 0), environment=environment, account=account
    )
    assert facts(done) == facts(expected)
    assert (environment.resets, account.lost_turn) == (2, 5)


async def test_arrays_that_an_environment_made_come_back_by_replay_and_not_by_a_snapshot() -> None:
    class WithSides(Saved):
        replayable = True

        async def step(self, sample: Sample) -> Observation | None:
            sample.sides["seen"] = len(self.seen)
            return await super().step(sample)

    stored = Stored()
    await whole(WithSides(), stored)
    partial = partial_from_bytes(stored.states[3], JOB, 0)
    assert partial.state is None
    done = await make(
        ScriptedEngine(*answers(*TURNS)[2:3], segment("r", "length")), partial=partial, environment=WithSides()
    )
    assert done.sides == {"seen": 2}


async def test_T1_an_abandoned_version_in_any_turn_restarts_the_episode() -> None:
    engine, environment, account = ScriptedEngine(), Replayable(), Drawn()

    async def abandons() -> Segment:
        engine.abandoned, engine.version = ((2, 2),), 3
        return segment("w", "abort", version=2)

    again = [segment(text, "stop", version=3) for text in TURNS]
    engine.answers = [*answers(*TURNS)[:2], abandons, *again]
    done = await make(engine, environment=environment, account=account)
    assert set(done.versions) == {-1, 3}
    assert (done.turns, environment.resets, account.rewound) == (TURNS, 2, 6)


@pytest.mark.parametrize(("state", "why"), [(object(), "cannot be stored"), (b"x" * MAX_STATE_BYTES, "at most")])
async def test_a_snapshot_that_cannot_be_stored_is_the_environments_failure(state: Any, why: str) -> None:
    class Keeps(Saved):
        async def snapshot(self) -> Any:
            return state

    with pytest.raises(EnvironmentRaised, match=why):
        await whole(Keeps(), Stored())


async def test_close_is_called_and_its_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Closes(Replayable):
        async def close(self) -> None:
            raise OSError("its server is gone")

    await close(Closes(), Sample(JOB, 0))
    assert "close of environment given raised OSError: its server is gone" in caplog.text
    await close(Replayable(), Sample(JOB, 0))


def kept(sample: Sample) -> Sample:
    """The sample as another lease gets it."""
    return partial_from_bytes(partial_to_bytes(sample), JOB, 0)


@pytest.mark.parametrize("kind", [Replayable, Saved])
async def test_a_sample_that_is_over_is_not_stepped_again_and_keeps_what_its_environment_set(
    kind: type[Replayable],
) -> None:
    """After a reward failed, for instance: a step that adds to the reward would add twice."""
    made = await whole(kind(), Stored())
    made.status, made.reward = "aborted", 100.0  # of a reward function, later
    environment = kind()
    again = await make(ScriptedEngine(), partial=kept(made), environment=environment, store=Stored())
    assert (again.reward, again.reward_info, again.turns) == (9.0, {"turns": 4}, TURNS)
    assert (environment.seen, again.status) == ([], "completed")


async def test_an_observation_whose_snapshot_failed_is_left_out_and_its_step_is_repeated() -> None:
    class Fails(Saved):
        async def snapshot(self) -> Any:
            if len(self.seen) == 2:
                raise OSError("once")
            return await super().snapshot()

    sample = Sample(JOB, 0)
    with pytest.raises(EnvironmentRaised):
        await make(ScriptedEngine(*answers(*TURNS)), partial=sample, environment=Fails(), store=Stored())
    assert (sample.num_turns, len(sample.turns)) == (2, 2)
    engine, account = ScriptedEngine(*answers(*TURNS)[2:]), Drawn()
    done = await make(engine, partial=kept(sample), environment=Saved(), account=account)
    assert (done.turns, account) == (TURNS, Drawn())


async def test_a_sample_that_is_handed_back_during_a_snapshot_continues_with_its_turns() -> None:
    class Slow(Saved):
        async def snapshot(self) -> Any:
            if len(self.seen) == 2:
                reached.set()
                await asyncio.Event().wait()
            return await super().snapshot()

    reached, stored = asyncio.Event(), Stored()
    task = asyncio.create_task(whole(Slow(), stored))
    await reached.wait()
    task.cancel()
    await asyncio.wait({task})
    account, engine = Drawn(), ScriptedEngine(*answers(*TURNS)[2:])
    done = await make(engine, partial=kept(stored.sample), environment=Saved(), account=account)
    assert (done.turns, account, engine.answers) == (TURNS, Drawn(), [])


async def test_a_state_that_changes_later_is_stored_as_it_was() -> None:
    class Fails(Saved):
        async def step(self, sample: Sample) -> Observation | None:
            answer = await super().step(sample)  # changes what snapshot returned
            if len(self.seen) == 3:
                raise OSError("tool away")
            return answer

    sample = Sample(JOB, 0)
    with pytest.raises(EnvironmentRaised):
        await make(ScriptedEngine(*answers(*TURNS)), partial=sample, environment=Fails(), store=Stored())
    environment, left = Saved(), answers(*TURNS)[3:]
    await make(ScriptedEngine(*left), partial=kept(sample), environment=environment, store=Stored())
    assert environment.seen == TURNS


@pytest.mark.parametrize("reward", [True, np.float32(1.0), {"score": 1.0}])
async def test_rewards_of_any_kind_are_stored(reward: Any) -> None:
    class Rewards(Saved):
        async def step(self, sample: Sample) -> Observation | None:
            self.seen.append(sample.turns[-1])
            sample.reward = reward
            return Observation(text="q") if len(self.seen) < len(TURNS) else None

    made = kept(await whole(Rewards(), Stored()))
    assert made.is_over
    assert (await make(ScriptedEngine(), partial=made, environment=Rewards())).reward == reward


async def test_a_turn_that_its_limit_ended_is_not_generated_again() -> None:
    class Acts(Saved):
        repeatable = False

    sample, account = Sample(JOB, 0), Drawn()
    engine = ScriptedEngine(*answers("x", "y"), segment("z" * 10, "length"))
    await make(engine, partial=sample, environment=Acts(), store=Stored())
    done = await make(ScriptedEngine(), partial=kept(sample), environment=Acts(), account=account)
    assert (done.turns, done.status, account.lost_turn) == (["x", "y", "z" * 10], "truncated", 0)


async def test_T11_a_first_turn_is_kept_when_its_step_fails_so_that_tools_select_no_answers() -> None:
    class Plain:
        fails = True

        async def reset(self, job: Job) -> None:
            pass

        async def step(self, sample: Sample) -> Observation | None:
            if Plain.fails:
                Plain.fails = False
                raise OSError("once")
            return None

    sample = Sample(JOB, 0)
    with pytest.raises(EnvironmentRaised):
        await make(ScriptedEngine(segment("xyz", "stop")), partial=sample, environment=Plain())
    assert (await make(ScriptedEngine(), partial=kept(sample), environment=Plain())).text == "xyz"


async def test_a_replay_masks_as_the_steps_did() -> None:
    class NewestOnly(Replayable):
        async def step(self, sample: Sample) -> Observation | None:
            last = max(at for at, drawn in enumerate(sample.generated) if not drawn)
            sample.loss_mask = [int(drawn and at > last) for at, drawn in enumerate(sample.generated)]
            return await super().step(sample)

    stored = Stored()
    stored.anew = True
    expected = facts(await whole(NewestOnly(), stored))
    account = Drawn()
    partial = partial_from_bytes(stored.states[5], JOB, 0)
    done = await make(ScriptedEngine(*answers(*TURNS)[3:]), partial=partial, environment=NewestOnly(), account=account)
    assert (facts(done), account) == (expected, Drawn())


async def test_T1_finished_turns_of_an_abandoned_version_are_not_continued() -> None:
    stored = Stored()
    await whole(Replayable(), stored)
    engine, account = ScriptedEngine(*[segment(text, "stop", version=9) for text in TURNS]), Drawn()
    engine.abandoned, engine.version = ((1, 4),), 9
    partial = partial_from_bytes(stored.states[-1], JOB, 0)
    done = await make(engine, partial=partial, environment=Replayable(), account=account)
    assert (set(done.versions), account.rewound) == ({-1, 9}, 9)
