"""Run user environments, which respond to a sample between its turns (tools, code, search, a simulated user).

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

Observations enter the sequence with mask 0, and the next turn continues from exactly these tokens, so an observation
has to contain everything that the chat template puts between two turns.
"""

import logging
import operator
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from penstock.config import Config
from penstock.errors import ConfigError, EnvironmentRaised, EnvironmentTimeout
from penstock.names import AGENT
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.records.worker_causes import CodeCalled
from penstock.system.user_code import Raised, bounded, find, has_parameter
from penstock.text import format_exc, safe_repr, utf8_safe
from penstock.workers.hooks.open_calls import CODE, calling
from penstock.workers.hooks.read_back import read_back
from penstock.workers.rewards.judges import PARAMETER as JUDGES
from penstock.workers.rewards.judges import Judges

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Longest wait for ``close``: an exiting worker hands its jobs back only afterwards.
CLOSE_S = 5.0
#: Token ids are stored as int32.
MAX_TOKEN = 2**31
#: Name of the constructor parameter that receives conversations with the model.
CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Observation:
    """Hold the response of an environment to a turn: text or token ids, not both."""

    #: Encoded unchanged, without special tokens added by the tokenizer.
    text: str | None = None
    #: Token ids, if the environment has its own tokenizer.
    tokens: list[int] | None = None
    #: The sample ends with the last turn; text and tokens are omitted.
    done: bool = False
    #: The text or tokens are the context of a new part, instead of following the last turn: the history was rewritten
    #: or branched. They bear no loss.
    new_part: bool = False

    def __post_init__(self) -> None:
        if not self.done and (self.text is None) == (self.tokens is None):
            raise ValueError("an Observation needs exactly one of text and tokens, or done=True")


class Environment(Protocol):
    """Define the interface of an environment; one instance serves one sample.

    After a kill or a hand-back another instance can continue a sample of several turns:

    - ``replayable = True``: after ``reset`` the same turns get the same observations. The recorded turns are repeated.
    - ``async snapshot() -> state`` and ``async restore(job, state)``: the state, of numbers, text, bytes, lists and
      maps, is stored after each observation. A step whose observation was not stored is repeated only if the class has
      ``repeatable = True``; else the sample starts over.

    ``async close()``, if defined, is called once at the end, also after a failure, a timeout, a cancellation or a lost
    lease, but not after a kill.

    Two optional attributes: ``timeout_s`` overrides ``rollout.environment_timeout_s`` and is read before each call;
    ``turn_limits`` (``max_new_tokens`` and ``stop``, within the run's limits) is read before each turn.
    """

    async def reset(self, job: Job) -> Observation | None:
        """Prepare for the first turn; also called before a stored sample continues or starts over.

        A returned Observation replaces the job's prompt.
        """

    async def step(self, sample: Sample) -> Observation | None:
        """Respond to a turn; ``sample.turns`` holds the text of every turn. None ends the sample."""


async def within(timeout_s: float, work: Callable[[], Awaitable[T]], call: CodeCalled) -> T:
    """Return the response of an environment. Waits at most ``timeout_s``, even if it ignores cancellation.

    Args:
        call: the environment and the sample, named in waits and errors.

    Raises:
            EnvironmentTimeout: the environment did not respond; it is cancelled and no longer awaited.
            EnvironmentRaised: the environment raised an exception.
    """
    what = call.label
    try:
        with calling(CODE, call):
            return await bounded(work, timeout_s, what)
    except TimeoutError:
        raise EnvironmentTimeout(
            f"{what} did not answer within {call.limit} = {timeout_s:g} s: raise the limit, or find out what blocks "
            "the environment."
        ) from None
    except Raised as exc:
        raise EnvironmentRaised(f"{what} {exc}.") from exc


async def step(environment: Environment, sample: Sample, timeout_s: float, call: CodeCalled) -> Observation | None:
    """Call ``step`` with a copy of ``sample`` and copy back the fields it may set. Waits like ``within``.

    Raises:
        EnvironmentTimeout, EnvironmentRaised: see ``within`` and ``checked``; or a field was set to a wrong type.
    """
    given = sample.copy_for_user()
    answer = await within(timeout_s, lambda: environment.step(given), call)
    try:
        read_back(given, sample)
    except ValueError as exc:
        raise EnvironmentRaised(f"{call.label} {exc}") from exc
    return checked(answer, call.label)


async def close(environment: Environment, sample: Sample) -> None:
    """Call ``close`` of an environment if defined, and log a failure. Waits at most ``CLOSE_S``."""
    if not callable(end := getattr(environment, "close", None)):
        return
    try:
        await within(CLOSE_S, end, CodeCalled("close", sample.job.environment or "given", "sample", sample.id))
    except EnvironmentTimeout:
        log.warning("sample %s: closing its environment took longer than %g s; cancelled", sample.id, CLOSE_S)
    except EnvironmentRaised as exc:
        log.warning("%s", exc)


def checked(observation: object, what: str) -> Observation | None:
    """Validate the response of ``step``; convert token ids to plain integers and text to valid UTF-8.

    Raises:
        EnvironmentRaised: the response is neither an Observation nor None, or its text or token ids are invalid.
    """
    if observation is None or (isinstance(observation, Observation) and observation.done):
        return observation
    if not isinstance(observation, Observation):
        raise EnvironmentRaised(f"{what} returned {safe_repr(observation)}: return an Observation or None.")
    text, tokens = observation.text, observation.tokens
    try:
        if tokens is None:
            return replace(observation, text=utf8_safe(text)) if isinstance(text, str) else _refuse(text, what)
        ids = [operator.index(token) for token in tokens]
    except Exception as exc:
        raise EnvironmentRaised(f"{what} returned invalid token ids {safe_repr(tokens)}: {format_exc(exc)}.") from exc
    if not all(0 <= token < MAX_TOKEN for token in ids):
        raise EnvironmentRaised(f"{what} returned token ids below 0 or above {MAX_TOKEN}.")
    return replace(observation, tokens=ids)


def _refuse(text: object, what: str) -> NoReturn:
    raise EnvironmentRaised(f"{what} returned the text {safe_repr(text)}: text must be a string.")


class Environments:
    """Create environments from the classes that this worker may use.

    Args:
        allowed: import paths, ``module:Class``, or ``agent``, from the worker's configuration: a client of Redis, from
        which jobs come, must not choose the imports of a worker.
        judges: passed to constructors with a parameter ``judges``.
        chat: makes the argument of constructors with a parameter ``chat`` (``agents/model_chat.py``).

    Raises:
        ConfigError: an import path of ``allowed`` cannot be imported, or is not an environment.
    """

    def __init__(
        self, allowed: Iterable[str] = (), judges: Judges | None = None, chat: Callable[[], object] | None = None
    ) -> None:
        names = dict.fromkeys(allowed)
        self._has_agents = AGENT in names
        self._classes = {path: load_environment(path) for path in names if path != AGENT}
        given: dict[str, object] = {JUDGES: judges if judges is not None else Judges(())}
        if chat is not None and any(has_parameter(made, CHAT) for made in self._classes.values()):
            given[CHAT] = chat()
        #: Constructor arguments by import path.
        self._given = {
            path: {name: value for name, value in given.items() if has_parameter(made, name)}
            for path, made in self._classes.items()
        }

    def check(self, job: Job) -> None:
        """Raise ConfigError if a job names an environment that is not allowed here. Imports nothing."""
        if job.environment == AGENT and self._has_agents:
            return
        if job.environment and job.environment not in self._classes:
            raise ConfigError(
                f"job {job.id} names environment {safe_repr(job.environment)}, which this worker may not import: if "
                "you trust it, add it to worker.environments and restart the workers."
            )

    def make(self, job: Job) -> Environment | None:
        """Create the environment of a sample of ``job``; return None without one, or if an agent runs its samples.

        Raises:
            ConfigError: see :meth:`check`.
            EnvironmentRaised: the constructor raised.
        """
        self.check(job)
        if job.environment in (None, "", AGENT):
            return None
        try:
            return self._classes[job.environment](**self._given[job.environment])
        except BaseException as exc:
            raise EnvironmentRaised(
                f"the constructor of environment {job.environment} raised {format_exc(exc)}."
            ) from exc


def allowed_environments(config: Config) -> list[str]:
    """Return the import paths of the environments that this configuration allows."""
    datasets = [*config.data.train, *config.data.eval]
    return [*config.worker.environments, *(one.environment for one in datasets if one.environment is not None)]


def load_environment(path: str) -> Callable[..., Environment]:
    """Import the class at ``module:Class``, with the working directory on ``sys.path``.

    Raises:
        ConfigError: the class cannot be imported, or lacks ``reset`` or ``step``.
    """
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.append(cwd)
    if ":" not in path:
        raise ConfigError(f"environment {path!r} is not an import path: write it as module:Class.")
    found = find(path, "environment")
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"environment {path!r} has no method {method!r}: define async reset and async step.")
    return found  # type: ignore[no-any-return]
