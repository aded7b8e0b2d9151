"""Frozen models that rewards and environments ask: they judge what the policy answered.

A function or a class that has a parameter ``judges`` is given them, by the names of the configuration::

    async def liked(sample: Sample, judges: Judges) -> float:
        [score] = await judges["taste"].classify(sample.job.prompt + sample.text)
        return score

Addresses come from the configuration of the worker alone: its own, or the plan of the fleet that started it.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.config.reward import JudgeConfig
from penstock.config.sampling import check_sampling
from penstock.errors import ConfigError, JudgeError
from penstock.protocol.records.job import JobFailure
from penstock.words import shown, writable
from workers.rewards.service import PathMissing, Service, ServiceFailed

PARAMETER = "judges"
#: Most numbers of one classification.
MAX_CLASSES = 65_536
#: What SGLang calls the model of a server where nobody names one.
MODEL = "default"
#: Of what a judge says, where nobody says otherwise: its likeliest answer, of this many tokens.
SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "max_new_tokens": 256}

#: A text, or token ids of the judge's own tokenizer.
Prompt = str | Sequence[int]


class Judge:
    """One frozen model. It was asked with the policy's own words: take what it answers with care."""

    def __init__(self, config: JudgeConfig) -> None:
        self.name = config.name
        self._url = config.url
        self._service = Service(config, f"reward.judges.{config.name}")
        #: It has no /classify, as a router, and answered at /v1/embeddings.
        self._is_routed = False

    async def classify(self, prompt: Prompt) -> list[float]:
        """[C] what a reward model or a classifier gives for a text; a reward model gives one, before any softmax.

        SGLang's /classify is asked, and where there is none, as at a router, /v1/embeddings, which gives the same.

        Waits for tries and pauses, within its limits.

        Raises:
            JudgeError: it gave none; ``outcome`` is reward_timeout, reward_raised, reward_too_large or
                reward_not_a_number.
        """
        answer = await self._classified(prompt)
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        found = answer.get("embedding") if isinstance(answer, dict) else None
        if not isinstance(found, list) or not 0 < len(found) <= MAX_CLASSES or not all(map(_is_number, found)):
            raise self._failed(JobFailure.REWARD_NOT_A_NUMBER, f"it gave {shown(answer)}, no list of finite numbers")
        return [float(value) for value in found]

    async def generate(self, prompt: Prompt, **sampling: Any) -> str:
        """What a language model says to a prompt, whose template is applied (SGLang's /generate).

        Waits for tries and pauses, within its limits.

        Args:
            sampling: SGLang's names, over temperature 0 and 256 tokens.

        Raises:
            JudgeError: it said nothing; ``outcome`` is reward_timeout, reward_raised or reward_too_large.
            ValueError: SGLang has no such parameter of sampling, or not with this value.
        """
        check_sampling(sampling)
        answer = await self._ask("/generate", _asked(prompt) | {"sampling_params": {**SAMPLING, **sampling}})
        said = answer.get("text") if isinstance(answer, dict) else None
        if not isinstance(said, str):
            raise self._failed(JobFailure.REWARD_RAISED, f"it gave {shown(answer)}, no text")
        return said

    async def close(self) -> None:
        """Let go of the connections."""
        await self._service.close()

    async def _classified(self, prompt: Prompt) -> Any:
        asked = _asked(prompt)
        if not self._is_routed:
            try:
                return await self._ask("/classify", asked, may_miss=True)
            except PathMissing:
                pass
        # Not /v1/classify, whose answer is a softmax: 1 for whatever a reward model of one number says.
        [given] = asked.values()
        answer = await self._ask("/v1/embeddings", {"model": MODEL, "input": given, "encoding_format": "float"})
        self._is_routed = True
        return answer.get("data") if isinstance(answer, dict) else answer

    async def _ask(self, path: str, question: dict[str, Any], *, may_miss: bool = False) -> Any:
        if self._url is None:
            raise ConfigError(
                f"Judge {self.name} has no address here: workers that the fleet starts know those of its models; set "
                "its url in reward.judges for others."
            )
        try:
            return await self._service.ask(self._url + path, question, may_miss=may_miss)
        except PathMissing:
            raise
        except ServiceFailed as exc:
            raise self._failed(exc.outcome, str(exc)) from exc

    def _failed(self, outcome: JobFailure, why: str) -> JudgeError:
        return JudgeError(outcome, f"judge {self.name}: {why}")


class Judges(Mapping[str, Judge]):
    """The judges of a configuration (``reward.judges``), by name.

    Of an event loop: whoever makes them closes them, in the loop that asked.
    """

    def __init__(self, configs: Iterable[JudgeConfig]) -> None:
        self._judges = {one.name: Judge(one) for one in configs}

    def __getitem__(self, name: str) -> Judge:
        """Raises ConfigError where there is none of that name."""
        if name not in self._judges:
            there = ", ".join(self._judges) or "none"
            raise ConfigError(f"There is no judge {name!r}: reward.judges has {there}.")
        return self._judges[name]

    def __contains__(self, name: object) -> bool:
        return name in self._judges

    def __iter__(self) -> Any:
        return iter(self._judges)

    def __len__(self) -> int:
        return len(self._judges)

    async def close(self) -> None:
        """Let go of all connections."""
        for judge in self._judges.values():
            await judge.close()


def takes_judges(code: Callable[..., Any]) -> bool:
    """Whether a function, or a class where one is made, has a parameter for judges."""
    try:
        return PARAMETER in inspect.signature(code).parameters
    # Some of C's have no signature.
    except (TypeError, ValueError):
        return False


def _asked(prompt: Prompt) -> dict[str, Any]:
    return {"text": writable(prompt)} if isinstance(prompt, str) else {"input_ids": [int(token) for token in prompt]}


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:
        return False
