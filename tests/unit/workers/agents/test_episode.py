"""An episode of an agent: what it asks, in which order, whatever is killed between, is one sample of exact tokens."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import EnvironmentRaised, EnvironmentTimeout, EpisodeMoved, EpisodeSuperseded, LeaseLost
from penstock.records.sample import Drawn, Sample
from penstock.workers.agents.chat import ChatTemplate
from penstock.workers.agents.episode import AgentEpisode, End, Turn, read_end
from penstock.workers.agents.requests import Request, RequestInvalid, read_request
from penstock.workers.engine import Segment
from penstock.workers.jobs.prefixes import partial_from_bytes
from tests.unit.workers.jobs.test_episodes import Stored
from tests.unit.workers.jobs.test_generate import EOS, JOB, ROLLOUT, Letters, ScriptedEngine, make, segment

LETTERS = Letters()
AGENTS = replace(JOB, environment="agent")


class Chat:
    """Renders a message as the first letter of its role and its content; ``g`` begins an answer, ``z`` ends it."""

    _tokenizer, _special_ids = LETTERS, frozenset({EOS})
    text_continuation = ChatTemplate.text_continuation

    def encode(self, text: str) -> list[int]:
        return LETTERS.encode(text, add_special_tokens=False)

    def start(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        return self.encode("".join(one["role"][0] + one["content"] for one in messages) + "g")

    def continuation(
        self, messages: list[dict[str, Any]], answer: int, tools: Any, generated: Sequence[int]
    ) -> list[int] | None:
        return self.encode("z") + self.start(messages[answer + 1 :])


async def answering(sample: Sample, index: int, turn: Turn, request: Request) -> dict[str, Any]:
    ids = sample.tokens[turn.start : turn.end]
    return {"content": sample.turns[index], "tool_calls": [], "tokens": ids, "finish_reason": turn.reason}


def episode(sample: Sample, attempt: int = 0, **options: Any) -> AgentEpisode:
    values: dict[str, Any] = {"make_answer": answering, "idle_s": 30.0, "max_context": 100, "max_turns": 8}
    return AgentEpisode(sample, attempt, **(values | options))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def asks(*messages: dict[str, str], **more: Any) -> Request:
    return read_request({"messages": list(messages), **more}, Chat())  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; histories are encoded in a thread."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Play:
    """A sample that is being generated, with the episode that drives it."""

    def __init__(self, *answers: Any, partial: Sample | None = None, store: Stored | None = None, **options: Any):
        self.rollout = options.pop("rollout", ROLLOUT)
        self.store = store or Stored()
        self.store.sample.job = AGENTS
        if partial is not None:
            self.store.sample = partial
        self.engine = ScriptedEngine(*(segment(one, "stop") if isinstance(one, str) else one for one in answers))
        self.account = Drawn()
        self.episode = episode(self.store.sample, **options)
        self.episode.open("n")
        self.task = asyncio.create_task(self.run())

    async def run(self) -> Sample:
        try:
            return await make(
                self.engine,
                AGENTS,
                partial=self.store.sample,
                environment=self.episode,
                store=self.store,
                account=self.account,
                rollout=self.rollout,
            )
        finally:
            await self.episode.close()

    async def ask(self, *messages: dict[str, str], **more: Any) -> str:
        return str((await self.episode.ask(asks(*messages, **more)))["content"])

    async def finish(self, reward: float | None = 1.0) -> Sample:
        await self.episode.finish(End(reward, {"steps": 2}))
        return await self.task


def text_of(ids: list[int]) -> str:
    return LETTERS.decode(ids)


async def test_a_history_that_grows_is_one_sequence_of_the_tokens_as_generated() -> None:
    play = Play("xy", "vw")
    assert await play.ask(user("ab")) == "xy"
    assert await play.ask(user("ab"), said("xy"), user("cd")) == "vw"
    sample = await play.finish()
    assert text_of(sample.tokens) == "uabg" + "xy" + "zucdg" + "vw"
    assert sample.generated == [0] * 4 + [1] * 2 + [0] * 5 + [1] * 2
    assert (sample.prompt_length, sample.parts, sample.reward, sample.reward_info) == (4, [], 1.0, {"steps": 2})
    assert sample.status == "completed"


async def test_an_answer_that_the_client_returns_otherwise_spaced_is_still_found() -> None:
    play = Play("xy", "vw")
    await play.ask(user("ab"))
    await play.ask(user(" ab "), {"role": "assistant", "content": "xy\n", "refusal": None}, user("cd"))  # type: ignore[dict-item]
    assert (await play.finish()).parts == []


async def test_a_rewritten_history_is_a_new_part_whose_context_bears_no_loss() -> None:
    play = Play("xy", "vw")
    await play.ask(user("ab"))
    await play.ask(user("hh"), said("xy"), user("cd"))
    sample = await play.finish()
    assert sample.parts == [6]
    assert text_of(sample.tokens) == "uabgxy" + "uhhaxyucdg" + "vw"
    assert text_of([one for one, drawn in zip(sample.tokens, sample.generated, strict=True) if drawn]) == "xyvw"
    assert text_of(play.engine.asked[1][0]) == "uhhaxyucdg"


async def test_a_branch_begins_with_the_exact_tokens_of_its_past() -> None:
    play = Play("xy", "vw", "st")
    await play.ask(user("a"))
    await play.ask(user("a"), said("xy"), user("b"))
    await play.ask(user("a"), said("xy"), user("c"))
    sample = await play.finish()
    assert sample.parts == [len("uagxyzubgvw")]
    assert text_of(sample.tokens) == "uagxyzubgvw" + "uagxyzucg" + "st"
    assert sample.loss_mask == sample.generated
    assert sum(sample.generated) == 6


async def test_a_retry_gets_the_same_answer_and_another_request_for_it_gets_another_one() -> None:
    play = Play("xy", "vw")
    assert await play.ask(user("a")) == "xy"
    assert await play.ask(user("a"), is_retry=True) == "xy"
    assert await play.ask(user("a"), is_retry=False) == "vw"
    sample = await play.finish()
    assert (text_of(sample.tokens), sample.parts) == ("uagxy" + "uagvw", [5])


async def test_a_retry_of_a_turn_in_flight_waits_for_it() -> None:
    release = asyncio.Event()

    async def slow() -> Segment:
        await release.wait()
        return segment("xy", "stop")

    play = Play(slow)
    first = asyncio.create_task(play.ask(user("a")))
    await until(lambda: bool(play.engine.asked))
    again = asyncio.create_task(play.ask(user("a")))
    await asyncio.sleep(0)
    release.set()
    assert await first == await again == "xy"
    assert len(play.engine.asked) == 1
    await play.finish()


async def test_a_text_is_continued_as_it_is() -> None:
    play = Play("xy", "vw")
    one = await play.episode.ask(read_request({"prompt": "ab"}, Chat()))  # type: ignore[arg-type]
    assert one["content"] == "xy"
    await play.episode.ask(read_request({"prompt": "abxycd"}, Chat()))  # type: ignore[arg-type]
    sample = await play.finish()
    assert (text_of(sample.tokens), sample.parts) == ("abxycdvw", [])


async def test_the_limits_of_a_request_bound_its_turn_alone() -> None:
    play = Play(segment("xy", "length"), "vw")
    await play.ask(user("a"), max_tokens=2, stop=["q"])
    await play.ask(user("a"), said("xy"), user("b"))
    sample = await play.finish()
    first, second = (sampling for _, sampling in play.engine.asked)
    assert (first["max_new_tokens"], first["stop"]) == (2, ["q"])
    assert second["max_new_tokens"] == 10
    assert "stop" not in second
    assert text_of(sample.tokens) == "uagxy" + "zubg" + "vw"


async def test_a_request_that_cannot_be_answered_leaves_the_episode_as_it_was() -> None:
    play = Play("xy", "vw", max_context=20)
    with pytest.raises(RequestInvalid, match="context_length_exceeded: the context has 32 tokens"):
        await play.ask(user("a" * 30))
    await play.ask(user("a"))
    with pytest.raises(RequestInvalid, match="context_length_exceeded"):
        await play.ask(user("a"), said("xy"), user("b" * 20))
    with pytest.raises(RequestInvalid, match="the last message has role assistant"):
        await play.ask(user("a"), said("xy"))
    assert await play.ask(user("a"), said("xy"), user("b")) == "vw"
    await play.finish()


async def test_turns_and_parts_are_bounded() -> None:
    play = Play("xy", max_turns=1)
    await play.ask(user("a"))
    with pytest.raises(RequestInvalid, match=r"has reached rollout\.max_turns = 1"):
        await play.ask(user("b"))
    sample = await play.finish(reward=None)
    assert sample.reward is None


@pytest.mark.parametrize("has_answer", [False, True])
async def test_a_kill_at_any_stored_place_costs_no_finished_turn(has_answer: bool) -> None:
    """The agent repeats the request whose answer it did not get; or it got it, and continues."""
    requests = [(user("a"),), (user("a"), said("xy"), user("b")), (user("c"),)]
    answers = ["xy", "vw", "st"]
    first = Play(*answers)
    for request in requests:
        await first.ask(*request)
    expected = await first.finish()
    states = first.store.states
    assert len(states) == 6, "after each turn, and after each observation or the end"
    for at, state in enumerate(states):
        finished = (at + 2) // 2
        partial = partial_from_bytes(state, AGENTS, 0)
        partial.parts = [] if at < 3 else [len("uagxyzubgvw")]
        play = Play(*answers[finished:], partial=partial)
        if at < len(states) - 1:
            first_left = finished if has_answer else at // 2
            assert [await play.ask(*request) for request in requests[first_left:]] == answers[first_left:]
            await play.finish()
        sample = await play.task
        assert sample.tokens == expected.tokens
        assert (sample.parts, sample.reward, sample.turns) == (expected.parts, 1.0, answers)
        assert play.account == Drawn()


async def test_the_snapshot_of_another_attempt_is_not_continued() -> None:
    first = Play("xy", "vw")
    await first.ask(user("a"))
    await first.ask(user("a"), said("xy"), user("b"))
    play = Play("st", partial=partial_from_bytes(first.store.states[1], AGENTS, 0), attempt=1)
    assert await play.ask(user("a")) == "st"
    assert (await play.finish()).turns == ["st"]
    assert play.account.lost_turn == 2
    await first.finish()


async def test_T1_an_abandoned_version_starts_the_episode_over_and_its_agent_is_told() -> None:
    play = Play("xy", "st")
    await play.ask(user("a"))

    async def abandons() -> Segment:
        play.engine.abandoned, play.engine.version = ((1, 1),), 2
        return segment("v", "abort")

    play.engine.answers = [abandons, segment("st", "stop", version=2)]
    with pytest.raises(EpisodeSuperseded):
        await play.ask(user("a"), said("xy"), user("b"))
    play.episode.open("another")
    with pytest.raises(EpisodeSuperseded):
        play.episode.open("n")
    assert await play.ask(user("d")) == "st"
    sample = await play.finish()
    assert (text_of(sample.tokens), set(sample.versions)) == ("udgst", {-1, 2})
    assert play.account.rewound == 3


async def test_silence_and_a_reported_failure_fail_the_attempt() -> None:
    silent = Play("xy", idle_s=0.05)
    with pytest.raises(EnvironmentTimeout, match=r"agents.idle_s = 0.05 s"):
        await silent.task
    failing = Play("xy")
    await failing.ask(user("a"))
    await failing.episode.finish(End(error="the browser crashed"))
    with pytest.raises(EnvironmentRaised, match="the browser crashed"):
        await failing.task


async def test_an_episode_that_its_worker_hands_back_sends_its_agent_elsewhere() -> None:
    async def never() -> Segment:
        await asyncio.Event().wait()
        raise AssertionError

    play = Play(never)
    asked = asyncio.create_task(play.ask(user("a")))
    await until(lambda: bool(play.engine.asked))
    play.engine.answers = []
    play.task.cancel()
    await asyncio.wait({play.task})
    with pytest.raises(EpisodeMoved):
        await asked
    with pytest.raises(EpisodeMoved):
        await play.ask(user("a"))


class Unstored(Stored):
    """Stores turns, and never the end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self) -> None:
        if not self.sample.is_over:
            return await super().__call__()
        self.ends.set()
        if self.failure is not None:
            raise self.failure
        await asyncio.Event().wait()
        return None


@pytest.mark.parametrize("failure", [None, LeaseLost("job d/0/0")])
async def test_an_end_that_could_not_be_stored_is_not_acknowledged(failure: Exception | None) -> None:
    play = Play("xy", store=(store := Unstored()))
    store.failure = failure
    await play.ask(user("a"))
    finishing = asyncio.create_task(play.episode.finish(End(1.0)))
    await store.ends.wait()
    play.task.cancel()
    await asyncio.wait({play.task})
    with pytest.raises(EpisodeMoved):
        await finishing


async def test_a_key_whose_conversation_was_forgotten_does_not_reach_the_next_one() -> None:
    play = Play("xy", "vw")
    await play.ask(user("a"))
    starting_over = asyncio.create_task(play.episode.reset(AGENTS))
    await until(lambda: play.episode.nonce is None)
    with pytest.raises(EpisodeSuperseded):
        play.episode.open("n")
    starting_over.cancel()
    await play.finish()


async def test_a_request_is_ended_with_its_episode_whatever_it_waits_for() -> None:
    repeats = asyncio.Event()

    async def never_twice(sample: Sample, index: int, turn: Turn, request: Request) -> dict[str, Any]:
        if turn.answer:
            repeats.set()
            await asyncio.Event().wait()
        return await answering(sample, index, turn, request)

    play = Play("xy", make_answer=never_twice)
    await play.ask(user("a"))
    again = asyncio.create_task(play.ask(user("a")))
    await repeats.wait()
    play.task.cancel()
    await asyncio.wait({play.task})
    with pytest.raises(EpisodeMoved):
        await again


@pytest.mark.parametrize(
    ("answer", "text", "seen", "parts"),
    [
        (segment("xyobs", "stop"), "abxyobscd", "abxyobs" + "cd", []),
        (segment("xyobs", "stop"), "abxycd", "abxycd", [7]),
        (segment("xyobs", "stop"), "abxyobs", "abxyobs", [7]),
        (segment("xyo", "length"), "abxyocd", "abxyo" + "cd", []),
        (segment("xy", "stop", eos=True), "abxycd", "abxy" + chr(96) + "cd", []),
        (segment("xy", "stop", eos=True), "abxy" + chr(96) + "cd", "abxy" + chr(96) + "cd", []),
    ],
)
async def test_T8_the_stop_of_an_answer_is_not_repeated_behind_it(
    answer: Segment, text: str, seen: str, parts: list[int]
) -> None:
    play = Play(answer, "vw")
    for prompt in ("ab", text):
        request = read_request({"prompt": prompt, "stop": ["obs"], "is_retry": False}, Chat())  # type: ignore[arg-type]
        await play.episode.ask(request)
    assert text_of(play.engine.asked[1][0]) == seen
    assert (await play.finish()).parts == parts


async def test_an_agent_is_not_kept_waiting_by_the_tokens_of_a_lease() -> None:
    """Its job is handed back when the other samples have ended, and the same agent may have to begin those."""
    rollout = ROLLOUT.model_copy(update={"lease_tokens": 1})
    play = Play("xyz", rollout=rollout)
    assert await play.ask(user("a")) == "xyz"
    assert play.engine.asked[0][1]["max_new_tokens"] == 10
    assert (await play.finish()).status == "completed"


def test_an_end_is_refused_that_does_not_fit_into_a_record() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    for info, why in (({"log": "x" * 64 * 1024}, "info is larger than 65,536 bytes"), ({"a": deep}, "too deeply")):
        with pytest.raises(RequestInvalid, match=why):
            read_end({"info": info})


def test_calls_that_are_no_list_are_refused() -> None:
    with pytest.raises(RequestInvalid, match=r"messages\[0\].tool_calls is 7"):
        asks({"role": "assistant", "content": "x", "tool_calls": 7}, user("b"))  # type: ignore[dict-item]
