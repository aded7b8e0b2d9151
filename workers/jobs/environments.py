"""Environments: what a sample meets between its turns (tools, code, search, a simulated user).

An environment is a class named by import path, ``module:Class``, in the worker's configuration; one instance serves one
sample::

    class Search:
        async def reset(self, job: Job) -> None:
            self.index = open_index(job.metadata["index"])

        async def step(self, sample: Sample) -> Observation | None:
            query = parse(sample.turns[-1])
            if query is None:
                return None
            return Observation(text="<result>" + await self.index.find(query) + "</result>")

Its observations go into the sequence with mask 0, and the next turn is drawn after the tokens as they stand: an
observation holds all that the chat template puts between two turns.
"""

import operator
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from penstock.config import Config
from penstock.errors import ConfigError, EnvironmentRaised, EnvironmentTimeout
from penstock.protocol.records.causes import CodeCalled
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import Sample
from penstock.system.user_code import Raised, bounded, find
from penstock.words import said, shown, writable
from penstock.workers.hooks.open_calls import CODE, calling
from penstock.workers.hooks.read_back import read_back
from penstock.workers.rewards.judges import PARAMETER, Judges, takes_judges

T = TypeVar("T")

#: Ids are stored as int32.
MAX_TOKEN = 2**31


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers to a turn: text or token ids, not both."""

    #: Encoded as it stands, without special tokens of the tokenizer's own.
    text: str | None = None
    #: Token ids, where the environment has its own tokenizer.
    tokens: list[int] | None = None
    #: The sample ends with the turn just drawn; text and tokens are left out.
    done: bool = False

    def __post_init__(self) -> None:
        if not self.done and (self.text is None) == (self.tokens is None):
            raise ValueError("an Observation has text or tokens, one of them, or done=True")


class Environment(Protocol):
    """One sample's environment."""

    async def reset(self, job: Job) -> None:
        """Before the first turn. Also before a sample that was handed back in its first turn goes on."""

    async def step(self, sample: Sample) -> Observation | None:
        """After each turn; ``sample.turns`` holds the text of every turn. None ends the sample."""


async def within(timeout_s: float, call: Callable[[], Awaitable[T]], what: str) -> T:
    """The answer of an environment. Waits for at most ``timeout_s``, whatever it does with a cancellation.

    Args:
        what: names the call in the error.

    Raises:
        EnvironmentTimeout: it did not answer; it is cancelled and left to itself.
        EnvironmentRaised: it raised, whatever it was.
    """
    try:
        with calling(CODE, CodeCalled(what)):
            return await bounded(call, timeout_s, what)
    except TimeoutError:
        raise EnvironmentTimeout(
            f"{what} did not answer within rollout.environment_timeout_s = {timeout_s:g} s: raise it, or see what the "
            "environment waits for."
        ) from None
    except Raised as exc:
        raise EnvironmentRaised(f"{what} {exc}.") from exc


async def step(environment: Environment, sample: Sample, timeout_s: float, what: str) -> Observation | None:
    """Ask an environment with a copy of ``sample``, and read back what it may set. Waits as ``within``.

    Raises:
        EnvironmentTimeout, EnvironmentRaised: as ``within`` and ``checked``, and where it set a field to another type.
    """
    given = sample.copy_for_user()
    answer = await within(timeout_s, lambda: environment.step(given), what)
    try:
        read_back(given, sample)
    except ValueError as exc:
        raise EnvironmentRaised(f"{what} {exc}") from exc
    return checked(answer, what)


def checked(observation: object, what: str) -> Observation | None:
    """What ``step`` answered, token ids as plain integers and its text as it can be tokenized.

    Raises:
        EnvironmentRaised: it is neither an Observation nor None, or holds neither text nor token ids.
    """
    if observation is None or (isinstance(observation, Observation) and observation.done):
        return observation
    if not isinstance(observation, Observation):
        raise EnvironmentRaised(f"{what} answered {shown(observation)}, which is neither an Observation nor None.")
    text, tokens = observation.text, observation.tokens
    try:
        if tokens is None:
            return Observation(text=writable(text)) if isinstance(text, str) else _refuse(text, what)
        ids = [operator.index(token) for token in tokens]
    except Exception as exc:
        raise EnvironmentRaised(f"{what} answered tokens {shown(tokens)}, which are not ids: {said(exc)}.") from exc
    if not all(0 <= token < MAX_TOKEN for token in ids):
        raise EnvironmentRaised(f"{what} answered tokens that are below 0 or above {MAX_TOKEN}.")
    return Observation(tokens=ids)


def _refuse(text: object, what: str) -> NoReturn:
    raise EnvironmentRaised(f"{what} answered the text {shown(text)}, which is not text.")


class Environments:
    """The environments that this worker may make.

    Args:
        allowed: import paths, ``module:Class``, of the worker's own configuration. A job travels through Redis, and
            whoever writes there must not choose what is imported here.
        judges: given to those that have a parameter of this name when they are made.

    Raises:
        ConfigError: one of ``allowed`` cannot be imported, or is not an environment.
    """

    def __init__(self, allowed: Iterable[str] = (), judges: Judges | None = None) -> None:
        self._classes = {path: load_environment(path) for path in dict.fromkeys(allowed)}
        given = {PARAMETER: judges if judges is not None else Judges(())}
        #: What each is made with.
        self._given = {path: given if takes_judges(made) else {} for path, made in self._classes.items()}

    def check(self, job: Job) -> None:
        """Raise ConfigError where a job names an environment that this worker may not make. Imports nothing."""
        if job.environment and job.environment not in self._classes:
            raise ConfigError(
                f"job {job.id} names environment {shown(job.environment)}, and a worker imports only what its own "
                "configuration names: add it to worker.environments, if it is yours, and start the workers again."
            )

    def make(self, job: Job) -> Environment | None:
        """One for a sample of ``job``; None where the job names none.

        Raises:
            ConfigError: as :meth:`check`.
            EnvironmentRaised: it cannot be made.
        """
        self.check(job)
        if not job.environment:
            return None
        try:
            return self._classes[job.environment](**self._given[job.environment])
        except BaseException as exc:
            raise EnvironmentRaised(f"environment {job.environment} raised {said(exc)} when it was made.") from exc


def allowed_environments(config: Config) -> list[str]:
    """Import paths of the environments that workers of this configuration make."""
    datasets = [*config.data.train, *config.data.eval]
    return [*config.worker.environments, *(one.environment for one in datasets if one.environment is not None)]


def load_environment(path: str) -> Callable[..., Environment]:
    """The class at ``module:Class``; modules of the working directory are found too.

    Raises:
        ConfigError: it cannot be imported, or has no ``reset`` and ``step``.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    if ":" not in path:
        raise ConfigError(f"environment {path!r} is not an import path: write it as module:Class.")
    found = find(path, "environment")
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"environment {path!r} has no method {method!r}: it needs async reset and async step.")
    return found  # type: ignore[no-any-return]
