"""The environments of the tools example: three tools, and a game.

The tools are called in the syntax of SGLang's parser ``pythonic``, the shortest to learn: ``[calc(x="37*48")]``.
"""

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from examples.tools.programs import Programs
from penstock import Job, Observation, Sample, ToolEnvironment

INDEX = Path(__file__).parent / "data" / "index.txt"
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
#: Longest calculation, in characters.
MAX_CALCULATION = 100


def calc(x: str) -> str:
    """Calculate.

    Args:
        x: Numbers with +, - and *.
    """
    if len(x) > MAX_CALCULATION:
        raise ValueError("too long")
    return str(value_of(ast.parse(x, mode="eval").body))


def value_of(node: ast.expr) -> int:
    """Return the value of a calculation. Raises ValueError if the text is not a calculation."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](value_of(node.left), value_of(node.right)))
    raise ValueError("not a calculation")


async def run(code: str) -> str:
    """Run a program.

    Args:
        code: A program in Python.
    """
    return await programs().run(code)


@cache
def programs() -> Programs:
    """Return the process of programs, one for each worker."""
    return Programs()


def find(words: str) -> str:
    """Search.

    Args:
        words: What the line should contain.
    """
    return index().best(words)


@cache
def index() -> "Index":
    """Return the index, which is read once."""
    return Index(INDEX.read_text().splitlines())


class Index:
    """Find lines by BM25, with its usual constants. All lines count as equally long."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._words = [Counter(words_of(line)) for line in lines]
        self._frequency = Counter(word for words in self._words for word in words)

    def best(self, text: str) -> str:
        """Return the line that fits best, the first of equals; '' if no line has any of the words."""
        words = words_of(text)
        scores = [sum(self._weight(word) * saturated(line[word]) for word in words) for line in self._words]
        best = max(range(len(scores)), key=scores.__getitem__)
        return self._lines[best] if scores[best] > 0 else ""

    def _weight(self, word: str) -> float:
        number = self._frequency[word]
        return math.log(1 + (len(self._lines) - number + 0.5) / (number + 0.5))


def words_of(text: str) -> list[str]:
    """Return the words of a text, without punctuation."""
    return [word.strip(":?.,").lower() for word in text.split()]


def saturated(count: int, k1: float = 1.5) -> float:
    """Return how much a word counts that a line contains ``count`` times."""
    return count * (k1 + 1) / (count + k1)


class Answers(ToolEnvironment):
    """Reward an answer, the last turn, that is the label. The tools answer the same call alike."""

    replayable = True

    async def reward(self, sample: Sample) -> float:
        """Return whether the last turn is the label."""
        return float(sample.turns[-1] == sample.job.label)


class Calculator(Answers):
    """Questions such as ``37*48``."""

    tools: ClassVar = [calc]


class Python(Answers):
    """Questions such as ``power 37 4``; programs run in a jail."""

    tools: ClassVar = [run]
    #: Without a jail the sample fails.
    fatal = (RuntimeError,)


class Search(Answers):
    """Questions such as ``kavo home?``, which one line of the index answers."""

    tools: ClassVar = [find]


class Game:
    """Find the number in a box, 1 to 15, in four guesses; a wrong one is answered ``lower`` or ``higher``.

    An observation contains what the chat template puts between two turns: here the beginning of the model's next one.
    """

    guesses = 4
    #: A step changes this object alone, so it may be repeated.
    repeatable = True

    async def reset(self, job: Job) -> None:
        """Begin a game."""
        self.number = int(str(job.label))
        self.left = self.guesses

    async def step(self, sample: Sample) -> Observation | None:
        """Answer a guess. The right one, the last, and one that is not a number end the sample."""
        guess = sample.turns[-1]
        self.left -= 1
        sample.reward = float(guess == str(self.number))
        if sample.reward or not self.left or not guess.isdecimal():
            return None
        return Observation(text=f"{'lower' if self.number < int(guess) else 'higher'}<model>")

    async def snapshot(self) -> dict[str, int]:
        """Return the state after a step."""
        return {"left": self.left}

    async def restore(self, job: Job, state: dict[str, int]) -> None:
        """Continue a game that another worker began."""
        await self.reset(job)
        self.left = state["left"]
