"""Environments: what a sample meets between its turns (tools, code, search, a simulated user).

An environment is a class named by import path, ``module:Class``; one instance serves one sample::

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

import asyncio
import importlib
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.errors import ConfigError, EnvironmentTimeout
from penstock.messages import Job, Sample

T = TypeVar("T")


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


async def within(timeout_s: float, call: Coroutine[Any, Any, T], what: str) -> T:
    """The answer of an environment. Waits for at most ``timeout_s``, whatever it does with a cancellation.

    Args:
        what: names the call in the error.

    Raises:
        EnvironmentTimeout: it did not answer; it is cancelled and left to itself.
        Exception: whatever it raises.
    """
    task = asyncio.create_task(call, name=what)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise EnvironmentTimeout(
            f"{what} did not answer within rollout.environment_timeout_s = {timeout_s:g} s: raise it, or see what the "
            "environment waits for."
        )
    return task.result()


def load_environment(path: str) -> Callable[[], Environment]:
    """The class at ``module:Class``; modules of the working directory are found too.

    Raises:
        ConfigError: it cannot be imported, or has no ``reset`` and ``step``.
    """
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"environment {path!r} is not an import path: write it as module:Class.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"environment {path!r} cannot be imported: {exc}.") from exc
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"environment {path!r} has no method {method!r}: it needs async reset and async step.")
    return found  # type: ignore[no-any-return]
