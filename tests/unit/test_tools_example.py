"""The tools example: its demonstrations are conversations with its environments, whose tools give what they show."""

import asyncio
import json
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from examples.tools import environments
from examples.tools.environments import Game, Index, calc
from examples.tools.programs import Programs, output_of
from penstock import Observation
from penstock.config.load import load_config
from penstock.workers.agents.chat import ChatTemplate
from penstock.workers.agents.tool_environment import schema_of
from tests.missing import need_jail
from tests.unit.example_parts import EXAMPLES, load

TOOLS = {"calculator": environments.calc, "programs": environments.run, "search": environments.find}


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return load("tools/prepare.py")


@pytest.fixture(scope="module")
def facts(prepare: ModuleType) -> list[str]:
    return list(prepare.make_facts(random.Random(0)))


def test_no_held_out_prompt_is_trained_on(prepare: ModuleType, facts: list[str]) -> None:
    for draw in prepare.tasks(facts).values():
        train, heldout = prepare.make_questions(draw, prepare.Settings())
        assert len(train) > 250
        assert len(heldout) > 30
        assert not {one.prompt for one in train} & {one.prompt for one in heldout}


@pytest.mark.parametrize("name", TOOLS)
def test_demonstrations_are_what_an_environment_renders(prepare: ModuleType, facts: list[str], name: str) -> None:
    question = prepare.tasks(facts)[name](random.Random(1))
    tokenizer = prepare.make_tokenizer()
    template, tools = ChatTemplate(tokenizer), [schema_of(TOOLS[name])]
    conversation = [{"role": "user", "content": question.prompt}, *question.good]
    text = prepare.rendered(question, question.good)
    call = tokenizer.encode(text.partition("<model>")[2].partition("<eos>")[0] + "<eos>")

    following = template.continuation(conversation[:3], 1, tools, call)

    assert following is not None
    answer = tokenizer.encode(f"{question.label}<eos>")
    assert [*template.start(conversation[:1], tools), *call, *following, *answer] == tokenizer.encode(text)
    sampling = load_config(EXAMPLES / "tools" / "run.yaml", [], {}).rollout.sampling
    assert len(call) <= sampling["max_new_tokens"]


@pytest.mark.parametrize("seed", range(20))
def test_the_game_answers_as_demonstrations_show_and_bisection_wins(prepare: ModuleType, seed: int) -> None:
    question = prepare.game(random.Random(seed))
    guesses, replies = question.good[::2], [one["content"] for one in question.good[1::2]]

    async def play() -> tuple[list[Any], float]:
        job: Any = SimpleNamespace(label=question.label)
        sample: Any = SimpleNamespace(turns=[], reward=None)
        game, answers = Game(), []
        await game.reset(job)
        for message in guesses:
            sample.turns.append(message["content"])
            answers.append(await game.step(sample))
            # As after the death of a worker.
            state, game = await game.snapshot(), Game()
            await game.restore(job, state)
        return answers, sample.reward

    answers, reward = asyncio.run(play())
    assert answers == [*(Observation(text=f"{reply}{prepare.MODEL}") for reply in replies), None]
    assert reward == 1.0


@pytest.mark.parametrize("guess", ["", "a", "\u00b2", "3"])
def test_a_game_ends_without_a_number_and_with_its_last_guess(guess: str) -> None:
    game, sample = Game(), SimpleNamespace(turns=[guess], reward=None)
    asyncio.run(game.reset(SimpleNamespace(label="2")))  # type: ignore[arg-type]
    game.left = 1 if guess == "3" else game.guesses
    assert asyncio.run(game.step(sample)) is None  # type: ignore[arg-type]
    assert sample.reward == 0.0


def test_the_index_finds_the_line_that_answers(facts: list[str]) -> None:
    index = Index(facts)
    assert [index.best(fact.partition(":")[0]) for fact in facts] == facts
    assert index.best("nothing of it") == ""


@pytest.mark.parametrize("text", ["9**9", "__import__('os')", "1+" * 60 + "1", "x"])
def test_only_short_calculations_are_calculated(text: str) -> None:
    assert calc("37*48") == "1776"
    with pytest.raises(ValueError, match=r"too long|not a calculation"):
        calc(text)


def test_programs_run_in_a_jail() -> None:
    need_jail()
    assert output_of("print(37**4)") == "1874161"
    assert output_of("print(1/0)") == "ZeroDivisionError: division by zero"
    assert output_of("open('/etc/passwd')").startswith(("FileNotFoundError", "PermissionError"))


def test_a_cancelled_program_leaves_no_answer_to_the_next() -> None:
    need_jail()

    async def cancel_one() -> str:
        programs = Programs()
        assert await programs.run("print(1)") == "1"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(programs.run("while True: pass"), 0.2)
        return await programs.run("print(3)")

    assert asyncio.run(cancel_one()) == "3"


def test_demonstrations_bear_loss_on_answers_alone(prepare: ModuleType, facts: list[str]) -> None:
    tokenizer = prepare.make_tokenizer()
    question = prepare.search(random.Random(2), facts)
    row = tokenizer.encode(prepare.rendered(question, question.good))
    _, targets = prepare.padded([row, row[:3]], tokenizer)
    shown = tokenizer.decode([token for token in targets[0].tolist() if token >= 0])
    assert shown == f"[find(words={json.dumps(question.prompt[:-1])})]<eos>{question.label}<eos>"
