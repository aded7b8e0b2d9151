"""One sample's making, against a scripted engine: T6 (versions), T7 (sampling), T8 (masks, stops, budgets)."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from penstock.config import RolloutConfig
from penstock.errors import ConfigError, EngineDied, EngineError, PayloadError
from penstock.records.job import Job
from penstock.records.sample import Drawn, Sample
from penstock.records.worker_causes import EngineRestarting, VersionDraining, VersionLoading
from penstock.workers.engine import Segment
from penstock.workers.jobs.environments import Environments, Observation, load_environment
from penstock.workers.jobs.generate import Source, generate_sample
from penstock.workers.jobs.prefixes import partial_from_bytes, partial_to_bytes
from penstock.workers.jobs.sampling import sampling_for
from penstock.workers.jobs.valves import Valves
from penstock.workers.services import Tally
from penstock.workers.sglang.server_info import ServerInfo

EOS = 0
ROLLOUT = RolloutConfig(sampling={"max_new_tokens": 10, "temperature": 1.0}, max_context_tokens=100)


class Letters:
    """Token i is the i-th letter; 0 is the special eos."""

    eos_token_id: int | None = EOS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) - 96 for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("" if token == EOS and skip_special_tokens else chr(token + 96) for token in token_ids)


def segment(text: str, reason: str, version: int = 1, *, eos: bool = False) -> Segment:
    ids = [ord(letter) - 96 for letter in text] + [EOS] * eos
    logprobs = [-0.5 - index for index in range(len(ids))]
    return Segment(ids, logprobs, [version] * len(ids), reason, cached_tokens=0, prompt_tokens=1)


class ScriptedEngine:
    """Answers from a list; keeps what it was asked."""

    eos_token_ids = frozenset({EOS})
    info = ServerInfo(max_context=1000)
    abandoned: tuple[tuple[int, int], ...] = ()
    returns_routing = False

    def __init__(self, *answers: Segment | Exception | Callable[[], Any]) -> None:
        self.answers = list(answers)
        self.version = 1
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.aborted = asyncio.Event()

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], *, rid: str) -> Segment:
        self.asked.append((list(input_ids), sampling))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Segment):
            return answer
        result = await answer()
        assert isinstance(result, Segment)
        return result

    async def abort(self, rid: str) -> None:
        self.aborted.set()


async def make(engine: ScriptedEngine, job: Job | None = None, **options: Any) -> Sample:
    given = {
        "valves": Valves(),
        "tokenizer": Letters(),
        "rollout": ROLLOUT,
        "answered": lambda *_: None,
        "partial": None,
    }
    valves, tokenizer, rollout, answered, partial = (options.pop(name, value) for name, value in given.items())
    source = Source(engine, valves, tokenizer, rollout, answered)  # type: ignore[arg-type]
    return await generate_sample(source, partial or Sample(job or JOB, 0), **options)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


JOB = Job(id="d/0/0", n=1, prompt="abc")


async def test_T8_a_finished_answer_keeps_its_eos_and_masks_its_prompt() -> None:
    sample = await make(ScriptedEngine(segment("xyz", "stop", eos=True)))

    assert sample.tokens == [1, 2, 3, 24, 25, 26, EOS]
    assert sample.generated == sample.loss_mask == [0, 0, 0, 1, 1, 1, 1]
    assert sample.versions == [-1, -1, -1, 1, 1, 1, 1]
    assert sample.logprobs == [0, 0, 0, -0.5, -1.5, -2.5, -3.5]
    assert (sample.status, sample.finish_reason, sample.text) == ("completed", "stop", "xyz")
    assert sample.prompt_length == 3


async def test_T8_truncation_adds_no_token() -> None:
    sample = await make(ScriptedEngine(segment("xyzxyzxyzx", "length")))

    assert sample.tokens[3:] == [24, 25, 26] * 3 + [24]
    assert sample.status == "truncated"


async def test_I10_what_is_drawn_for_an_answer_that_is_lost_or_thrown_away_is_told_of() -> None:
    nothing = Segment([], [], [], "abort", cached_tokens=0, prompt_tokens=1)
    account = Drawn()

    sample = await make(
        ScriptedEngine(
            replace(nothing, was_lost=True), replace(nothing, num_discarded=7), nothing, segment("xy", "stop")
        ),
        account=account,
    )

    assert sample.text == "xy"
    assert account == Drawn(behind_stop=7, unheard=1)


@pytest.mark.parametrize("thrown", [0, 7])
async def test_an_engine_that_only_gives_what_cannot_be_kept_is_at_fault_whatever_its_version(thrown: int) -> None:
    nothing = Segment([], [], [], "abort", cached_tokens=0, prompt_tokens=1, message="waited", num_discarded=thrown)
    engine = ScriptedEngine()

    async def newer() -> Segment:
        engine.version += bool(thrown)
        return nothing

    engine.answers = [newer] * 60
    with pytest.raises(EngineError, match=r"no usable token in 51 consecutive requests \(waited\)") as raised:
        await make(engine)
    assert ("memory" in str(raised.value)) == (not thrown)


async def test_the_prompt_of_a_group_is_tokenized_once() -> None:
    class Counting(Letters):
        texts: ClassVar[list[str]] = []

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            self.texts.append(text)
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = Counting()
    first = await make(ScriptedEngine(segment("x", "stop")), tokenizer=tokenizer)
    first.tokens[0] = 9
    second = await make(ScriptedEngine(segment("x", "stop")), tokenizer=tokenizer)
    assert tokenizer.texts == ["abc"]
    assert second.tokens[:3] == [1, 2, 3], "a sample owns its tokens"


async def test_prompt_ids_are_taken_as_they_are() -> None:
    engine = ScriptedEngine(segment("x", "stop"))
    await make(engine, Job(id="d/0/0", n=1, prompt_ids=[7, 7]))
    assert engine.asked[0][0] == [7, 7]


async def test_T6_T8_an_aborted_answer_resumes_from_its_prefix_with_what_is_left() -> None:
    engine = ScriptedEngine(
        segment("uvw", "abort", 1),
        segment("", "abort", 2),
        segment("xy", "abort", 2),
        segment("z", "stop", 3, eos=True),
    )
    tally = Tally()
    sample = await make(engine, answered=tally.answered)

    prefix = [1, 2, 3]
    assert tally.resent_requests == 3
    assert [ids for ids, _ in engine.asked] == [
        prefix,
        [*prefix, 21, 22, 23],
        [*prefix, 21, 22, 23],
        [*prefix, 21, 22, 23, 24, 25],
    ]
    assert [sampling["max_new_tokens"] for _, sampling in engine.asked] == [10, 7, 7, 5]
    assert sample.versions == [-1, -1, -1, 1, 1, 1, 2, 2, 3, 3]
    assert sample.logprobs[3:] == [-0.5, -1.5, -2.5, -0.5, -1.5, -0.5, -1.5]
    assert sample.num_aborts == 3
    assert sample.text == "uvwxyz"


async def test_a_sample_tells_when_nothing_was_drawn_for_it() -> None:
    valves, begun = Valves(), time.time()

    async def hold() -> Segment:
        with valves.requests.held(VersionLoading(2)):
            await asyncio.sleep(0.02)
        return segment("u", "abort", 1)

    with valves.requests.held(EngineRestarting()):
        await asyncio.sleep(0.02)
    sample = await make(ScriptedEngine(hold, segment("v", "stop", 2)), valves=valves)
    ((after_ms, length_ms),) = sample.pauses
    assert 0 <= after_ms <= 1000 * (time.time() - begun)
    assert 19 <= length_ms <= 1000 * (time.time() - begun)


async def test_T6_versions_within_one_answer_are_kept_token_by_token() -> None:
    mixed = replace(segment("uvwx", "stop"), versions=[1, 1, 2, 3])
    sample = await make(ScriptedEngine(mixed))
    assert sample.versions == [-1, -1, -1, 1, 1, 2, 3]
    assert sample.logprobs[3:] == [-0.5, -1.5, -2.5, -3.5]


async def test_T8_a_stop_that_races_an_abort_is_final() -> None:
    engine = ScriptedEngine(segment("xy", "abort", eos=True))
    sample = await make(engine)
    assert len(engine.asked) == 1
    assert (sample.status, sample.finish_reason) == ("completed", "stop")
    assert sample.tokens[-1] == EOS


async def test_T8_a_stop_token_or_string_that_races_an_abort_is_final() -> None:
    by_id = Job(id="d/0/0", n=1, prompt="a", sampling={"stop_token_ids": [25]})
    by_text = Job(id="d/0/0", n=1, prompt="a", sampling={"stop": ["xy"]})
    for job in (by_id, by_text):
        engine = ScriptedEngine(segment("wxy", "abort"))
        assert (await make(engine, job)).finish_reason == "stop"
        assert len(engine.asked) == 1


async def test_T8_ignore_eos_ignores_it_after_an_abort_too() -> None:
    engine = ScriptedEngine(segment("xy", "abort", eos=True), segment("z", "length"))
    sample = await make(engine, Job(id="d/0/0", n=1, prompt="a", sampling={"ignore_eos": True}))
    assert sample.text == "xyz"


async def test_T8_a_budget_that_an_abort_found_spent_is_a_truncation() -> None:
    engine = ScriptedEngine(segment("x" * 10, "abort"))
    sample = await make(engine)
    assert len(engine.asked) == 1
    assert (sample.status, sample.finish_reason) == ("truncated", "length")


async def test_T8_a_stop_string_across_an_abort_ends_the_answer_where_it_ends() -> None:
    job = Job(id="d/0/0", n=1, prompt="a", sampling={"stop": "xyz"})
    engine = ScriptedEngine(segment("wxy", "abort", 1), segment("zww", "length", 2))
    sample = await make(engine, job)
    assert Letters().decode(sample.tokens) == "awxyz"
    assert sample.text == "w"
    assert sample.versions[1:] == [1, 1, 1, 2]
    assert (sample.status, sample.finish_reason) == ("completed", "stop")


async def test_a_stop_string_in_the_prompt_or_before_the_seam_does_not_end_an_answer() -> None:
    job = Job(id="d/0/0", n=1, prompt="xy", sampling={"stop": "yw"})
    engine = ScriptedEngine(segment("wxv", "abort"), segment("uut", "stop"))
    assert (await make(engine, job)).text == "wxvuut"


async def test_the_context_bounds_the_answer() -> None:
    engine = ScriptedEngine(segment("xxx", "length"))
    await make(engine, rollout=replace_rollout(max_context_tokens=6))
    assert engine.asked[0][1]["max_new_tokens"] == 3
    with pytest.raises(ConfigError, match="max_context_tokens"):
        await make(ScriptedEngine(), rollout=replace_rollout(max_context_tokens=3))


def replace_rollout(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**(ROLLOUT.model_dump() | changes))


@pytest.mark.parametrize(
    "hiding",
    [
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 1},
        {"min_p": 0.1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"min_new_tokens": 5},
        {"logit_bias": {"5": 1.0}},
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"ebnf": "root ::= 'a'"},
        {"structural_tag": "x"},
        {"custom_params": {"a": 1}},
        {"temperature": 0.0},
        {"something_new": 1},
    ],
)
def test_T7_sampling_that_hides_the_distribution_is_refused_for_training_only(hiding: dict[str, Any]) -> None:
    for lane in ("eval", "score"):
        assert sampling_for(Job(id="d/0/0", n=1, lane=lane, sampling=hiding), ROLLOUT)
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(hiding))}"):
        sampling_for(Job(id="d/0/0", n=1, sampling=hiding), ROLLOUT)
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(hiding))}"):
        sampling_for(Job(id="d/0/0", n=1), ROLLOUT.model_copy(update={"sampling": hiding}))


def test_T7_neutral_values_pass_and_are_always_sent() -> None:
    given = {"top_p": 1.0, "top_k": 1 << 30, "min_p": 0, "repetition_penalty": 1, "stop": ["x"], "json_schema": None}
    sampling = sampling_for(Job(id="d/0/0", n=1, sampling=given), ROLLOUT)
    assert sampling["stop"] == ["x"]
    plain = sampling_for(Job(id="d/0/0", n=1), ROLLOUT)
    assert {name: plain[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")} == {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


@pytest.mark.parametrize("lane", ["train", "eval", "score"])
def test_T6_every_request_names_its_temperature(lane: str) -> None:
    """A server's own default, or what a null leaves open, would be drawn at and not be recorded."""
    for given in ({}, {"temperature": None}):
        rollout = replace_rollout(sampling={"max_new_tokens": 10}, eval_sampling=given)
        assert sampling_for(Job(id="d/0/0", n=1, lane=lane, sampling=given), rollout)["temperature"] == 1.0


def test_a_null_is_as_if_it_were_left_out() -> None:
    rollout = replace_rollout(sampling={"temperature": 0.7, "stop": ["x"]})
    sampling = sampling_for(Job(id="d/0/0", n=1, sampling={"stop": None, "top_p": None, "n": None}), rollout)
    assert "stop" not in sampling
    assert "n" not in sampling
    assert (sampling["temperature"], sampling["top_p"]) == (0.7, 1.0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9, 9.9e-7])
def test_T7_what_an_engine_draws_greedily_is_not_trained_on(temperature: float) -> None:
    job = Job(id="d/0/0", n=1, sampling={"temperature": temperature})
    with pytest.raises(ConfigError, match=r"samples greedily below 1e-06.*evaluation"):
        sampling_for(job, ROLLOUT)
    for lane in ("eval", "score"):
        assert sampling_for(replace(job, lane=lane), ROLLOUT)["temperature"] == temperature
    assert sampling_for(replace(job, sampling={"temperature": 1e-6}), ROLLOUT)["temperature"] == 1e-6


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf"), "warm", True, [1.0]])
@pytest.mark.parametrize("lane", ["train", "eval"])
def test_what_is_no_temperature_is_refused_in_every_lane(temperature: Any, lane: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid sampling\.temperature = "):
        sampling_for(Job(id="d/0/0", n=1, lane=lane, sampling={"temperature": temperature}), ROLLOUT)


def test_lanes_take_their_own_sampling() -> None:
    rollout = RolloutConfig(sampling={"temperature": 1.0, "max_new_tokens": 9}, eval_sampling={"temperature": 0.0})
    assert sampling_for(Job(id="d/0/0", n=1, lane="eval"), rollout)["temperature"] == 0.0
    assert sampling_for(Job(id="d/0/0", n=1, sampling={"max_new_tokens": 3}), rollout)["max_new_tokens"] == 3
    with pytest.raises(ConfigError, match=r"rollout\.n"):
        sampling_for(Job(id="d/0/0", n=1, sampling={"n": 4}), rollout)


class Echo:
    """Says "q" after every turn; done after ``num_turns``."""

    def __init__(self, num_turns: int = 2, observation: Observation | None = None) -> None:
        self.num_turns = num_turns
        self.observation = observation or Observation(text="q")
        self.resets: list[str] = []
        self.seen: list[list[str]] = []
        self.stepped_s = 0.0

    async def reset(self, job: Job) -> None:
        self.resets.append(job.id)

    async def step(self, sample: Sample) -> Observation | None:
        self.seen.append(list(sample.turns))
        self.stepped_s = time.time()
        return None if sample.num_turns >= self.num_turns else self.observation


async def test_T8_the_next_turn_is_the_stored_tokens_and_the_observation() -> None:
    engine = ScriptedEngine(segment("xy", "stop", 1, eos=True), segment("z", "stop", 2, eos=True))
    environment = Echo()
    sample = await make(engine, environment=environment)

    assert engine.asked[1][0] == [1, 2, 3, 24, 25, EOS, 17]
    assert sample.generated == sample.loss_mask == [0, 0, 0, 1, 1, 1, 0, 1, 1]
    assert sample.versions == [-1, -1, -1, 1, 1, 1, -1, 2, 2]
    assert sample.logprobs[6] == 0
    assert sample.turns == ["xy", "z"]
    assert (sample.text, sample.num_turns, sample.status) == ("xyz", 2, "completed")
    assert environment.resets == ["d/0/0"]
    assert environment.seen == [["xy"], ["xy", "z"]]
    assert sample.started_s < environment.stepped_s <= sample.drawn_s, "what an environment takes is in between"


async def test_each_turn_has_the_budget_and_the_whole_has_the_context() -> None:
    engine = ScriptedEngine(segment("xy", "abort"), segment("x", "stop"), segment("z", "stop"))
    await make(engine, environment=Echo())
    assert [sampling["max_new_tokens"] for _, sampling in engine.asked] == [10, 8, 10]

    tight = ScriptedEngine(segment("xy", "stop"))
    sample = await make(tight, environment=Echo(), rollout=replace_rollout(max_context_tokens=6))
    assert (sample.status, len(sample.tokens)) == ("truncated", 5)


async def test_turns_beyond_the_most_truncate_and_done_drops_its_text() -> None:
    engine = ScriptedEngine(segment("x", "stop"), segment("y", "stop"))
    sample = await make(engine, environment=Echo(9), rollout=replace_rollout(max_turns=2))
    assert (sample.status, sample.num_turns) == ("truncated", 2)

    done = await make(ScriptedEngine(segment("x", "stop")), environment=Echo(9, Observation(text="q", done=True)))
    assert (done.status, done.tokens) == ("completed", [1, 2, 3, 24])


async def test_a_truncated_turn_is_the_last() -> None:
    environment = Echo()
    sample = await make(ScriptedEngine(segment("x" * 10, "length")), environment=environment)
    assert (sample.status, environment.seen) == ("truncated", [])


async def test_an_observation_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty observation"):
        await make(ScriptedEngine(segment("x", "stop")), environment=Echo(2, Observation(tokens=[])))
    with pytest.raises(ValueError, match="text and tokens"):
        Observation()


def test_environments_are_found_by_import_path() -> None:
    assert load_environment("tests.unit.workers.jobs.test_generate:Echo") is not None
    for path, text in (
        ("nocolon", "module:Class"),
        ("no.such.module:X", "cannot be imported"),
        ("tests.unit.workers.jobs.test_generate:Missing", "cannot be imported"),
        ("tests.unit.workers.jobs.test_generate:Letters", "'reset'"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_environment(path)


async def test_a_job_names_its_environment() -> None:
    name = "tests.unit.workers.jobs.test_generate:Echo"
    job = Job(id="d/0/0", n=1, prompt="a", environment=name)
    made = Environments([name]).make(job)
    sample = await make(ScriptedEngine(segment("x", "stop"), segment("y", "stop")), job, environment=made)
    assert sample.num_turns == 2


async def test_an_environment_that_the_configuration_does_not_name_is_refused() -> None:
    environments = Environments(["tests.unit.workers.jobs.test_generate:Echo"])
    assert environments.make(JOB) is None
    for name in ("os:system", "tests.unit.workers.jobs.test_generate:Letters", "no.such.module:X", ":"):
        job = replace(JOB, environment=name)
        with pytest.raises(ConfigError, match=r"add it to worker\.environments"):
            environments.make(job)
        with pytest.raises(ConfigError, match="pass it as environment"):
            await make(ScriptedEngine(), job)


async def test_cancellation_keeps_what_was_drawn() -> None:
    engine = ScriptedEngine(segment("uv", "abort"))

    async def until_aborted() -> Segment:
        await engine.aborted.wait()
        return segment("wx", "abort", 2)

    engine.answers.append(until_aborted)
    sample, valves = Sample(JOB, 0), Valves()
    task = asyncio.create_task(make(engine, partial=sample, valves=valves))
    await until(lambda: len(engine.asked) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sample.status == "aborted"
    assert sample.versions == [-1, -1, -1, 1, 1, 2, 2]
    assert valves.samples.running == valves.requests.running == 0


async def test_a_second_cancellation_does_not_wait() -> None:
    async def never() -> Segment:
        await asyncio.Event().wait()
        raise AssertionError

    engine = ScriptedEngine(never)
    task = asyncio.create_task(make(engine, partial=Sample(JOB, 0)))
    await until(lambda: bool(engine.asked))
    task.cancel()
    await engine.aborted.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)


async def test_a_lost_engine_leaves_earlier_segments_in_the_partial() -> None:
    sample = Sample(JOB, 0)
    with pytest.raises(EngineDied):
        await make(ScriptedEngine(segment("uv", "abort"), EngineDied("gone")), partial=sample)
    assert sample.tokens == [1, 2, 3, 21, 22]


async def test_a_partial_travels_as_bytes_and_goes_on() -> None:
    sample = Sample(JOB, 0)
    with pytest.raises(EngineDied):
        await make(
            ScriptedEngine(segment("uv", "abort", 1), segment("w", "abort", 2), EngineDied("gone")), partial=sample
        )
    again = partial_from_bytes(partial_to_bytes(sample), JOB, 0)
    assert (again.tokens, again.versions, again.num_aborts) == (sample.tokens, sample.versions, 2)

    engine = ScriptedEngine(segment("x", "stop", 4))
    done = await make(engine, partial=again)

    assert done is again
    assert engine.asked[0][0] == [1, 2, 3, 21, 22, 23]
    assert engine.asked[0][1]["max_new_tokens"] == 7
    assert done.versions == [-1, -1, -1, 1, 1, 2, 4]
    assert done.logprobs == [0, 0, 0, -0.5, -1.5, -0.5, -0.5]
    assert (done.text, done.status) == ("uvwx", "completed")


async def test_a_partial_that_was_finished_draws_nothing_more() -> None:
    sample = Sample(JOB, 0)
    await make(ScriptedEngine(segment("uv", "stop", eos=True)), partial=sample)
    again = partial_from_bytes(partial_to_bytes(sample), JOB, 0)
    done = await make(ScriptedEngine(), partial=again)
    assert (done.tokens, done.status, done.text) == (sample.tokens, "completed", "uv")


async def test_a_partial_behind_its_first_turn_starts_anew_because_its_environment_is_lost() -> None:
    sample = Sample(JOB, 0)
    with pytest.raises(EngineDied):
        await make(
            ScriptedEngine(segment("x", "stop"), segment("y", "abort"), EngineDied("gone")),
            partial=sample,
            environment=Echo(),
        )
    assert sample.num_turns == 2
    again = partial_from_bytes(partial_to_bytes(sample), JOB, 0)
    done = await make(ScriptedEngine(segment("u", "stop"), segment("v", "stop")), partial=again, environment=Echo())
    assert (done.tokens, done.turns) == ([1, 2, 3, 21, 17, 22], ["u", "v"])


async def test_broken_partials_name_their_sample() -> None:
    sample = Sample(JOB, 0)
    await make(ScriptedEngine(segment("uv", "stop")), partial=sample)
    good = partial_to_bytes(sample)
    sample.generated.append(1)
    uneven = partial_to_bytes(sample)
    for bad in (b"", good[:-3], good + b"x", b"\x93\x01\x02\x03", uneven):
        with pytest.raises(PayloadError, match="d/0/0/0"):
            partial_from_bytes(bad, JOB, 0)
    with pytest.raises(PayloadError, match="d/0/0/1"):
        partial_from_bytes(good, JOB, 1)


async def test_requests_wait_for_the_gate_and_samples_for_a_drain() -> None:
    valves = Valves()
    engine = ScriptedEngine(segment("x", "stop"), segment("y", "stop"))
    with valves.requests.held(VersionLoading(2)):
        task = asyncio.create_task(make(engine, valves=valves))
        await until(lambda: valves.samples.running == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not engine.asked
        assert valves.cause == VersionLoading(2)
        with valves.samples.held(VersionDraining(3)):
            late = asyncio.create_task(make(engine, valves=valves))
            await asyncio.sleep(0)
            assert valves.cause == VersionDraining(3, running=1)
            assert valves.samples.running == 1
    await asyncio.gather(task, late)
    assert valves.cause is None


async def test_members_of_a_group_pass_a_drain_that_waits_for_the_group() -> None:
    valves = Valves()
    async with valves.sample():
        with valves.samples.held(VersionDraining(2)):
            sample = await asyncio.wait_for(
                asyncio.create_task(make(ScriptedEngine(segment("x", "stop")), valves=valves)), 30
            )
    assert sample.status == "completed"
    await asyncio.wait_for(valves.samples.empty(), 30)
