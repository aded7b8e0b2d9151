"""Judges: frozen models that rewards and environments call to rate the answers of the policy.

A function or class with a parameter ``judges`` gets them, by their names in the configuration::

    async def liked(sample: Sample, judges: Judges) -> float:
        [score] = await judges["taste"].classify(sample.job.prompt + sample.text)
        return score

Addresses come only from the worker's own configuration, or from the plan of the fleet that started it.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.config.reward import JudgeConfig
from penstock.config.sampling import check_sampling
from penstock.errors import ConfigError, JudgeError
from penstock.records.job import JobFailure
from penstock.system.user_code import has_parameter
from penstock.text import safe_repr, utf8_safe
from penstock.workers.rewards.service import PathMissing, Service, ServiceAway, ServiceFailed

PARAMETER = "judges"
#: Most numbers of one classification.
MAX_CLASSES = 65_536
#: SGLang's default model name.
MODEL = "default"
#: Default sampling: greedy, this many tokens.
SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "max_new_tokens": 256}

#: Path -> a request that any reachable model can answer.
_PROBES: Mapping[str, dict[str, Any]] = {
    "/generate": {"text": ".", "sampling_params": {**SAMPLING, "max_new_tokens": 1}},
    "/classify": {"text": "."},
    "/v1/embeddings": {"model": MODEL, "input": ".", "encoding_format": "float"},
}

#: A text, or token ids of the judge's own tokenizer.
Prompt = str | Sequence[int]


class Judge:
    """One frozen model. Its input is text of the policy, so do not trust its output."""

    def __init__(self, config: JudgeConfig) -> None:
        self.name = config.name
        self._url = config.url
        self._service = Service(config, f"reward.judges.{config.name}")
        #: True if it has no /classify, as a router, and answered at /v1/embeddings.
        self._is_routed = False
        #: Number of open requests.
        self.num_open = 0
        #: Path of the latest request.
        self._path = "/generate"

    async def classify(self, prompt: Prompt) -> list[float]:
        """[C] Return the output of a reward model or classifier; a reward model gives one number, before any softmax.

        Uses SGLang's /classify, or /v1/embeddings, which gives the same, if that does not exist (as at a router).

        Waits for attempts and pauses, within its limits.

        Raises:
            JudgeError: it gave none; ``outcome`` is reward_timeout, reward_raised, reward_too_large or
                reward_not_a_number.
        """
        answer = await self._classified(prompt)
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        found = answer.get("embedding") if isinstance(answer, dict) else None
        if not isinstance(found, list) or not 0 < len(found) <= MAX_CLASSES or not all(map(_is_number, found)):
            raise self._failed(
                JobFailure.REWARD_NOT_A_NUMBER, f"it gave {safe_repr(answer)}, no list of finite numbers"
            )
        return [float(value) for value in found]

    async def generate(self, prompt: Prompt, **sampling: Any) -> str:
        """Return the answer of a language model to a prompt with its template applied (SGLang's /generate).

        Waits for attempts and pauses, within its limits.

        Args:
            sampling: SGLang's names; default temperature 0 and 256 tokens.

        Raises:
            JudgeError: it gave no text; ``outcome`` is reward_timeout, reward_raised or reward_too_large.
            ValueError: SGLang has no such sampling parameter, or not with this value.
        """
        check_sampling(sampling)
        answer = await self._ask("/generate", _request(prompt) | {"sampling_params": {**SAMPLING, **sampling}})
        text = answer.get("text") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise self._failed(JobFailure.REWARD_RAISED, f"it gave {safe_repr(answer)}, no text")
        return text

    async def wait_if_away(self) -> bool:
        """Wait until it responds; return whether it did not at first."""
        url, probe = f"{self._url}{self._path}", _PROBES[self._path]
        if await self._service.answers(url, probe):
            return False
        await self._service.ask(url, probe, probe=probe, waits=True)
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def _classified(self, prompt: Prompt) -> Any:
        request = _request(prompt)
        if not self._is_routed:
            try:
                return await self._ask("/classify", request, may_miss=True)
            except PathMissing:
                pass
        # Not /v1/classify, whose answer is a softmax: always 1 for a reward model with one output.
        [given] = request.values()
        answer = await self._ask("/v1/embeddings", {"model": MODEL, "input": given, "encoding_format": "float"})
        self._is_routed = True
        return answer.get("data") if isinstance(answer, dict) else answer

    async def _ask(self, path: str, question: dict[str, Any], *, may_miss: bool = False) -> Any:
        if self._url is None:
            raise ConfigError(
                f"Judge {self.name} has no address: workers that the fleet starts get the addresses of its models; set "
                "its url in reward.judges for others."
            )
        self._path = path
        self.num_open += 1
        try:
            return await self._service.ask(self._url + path, question, may_miss=may_miss, probe=_PROBES[path])
        except PathMissing:
            raise
        except ServiceAway as exc:
            error = self._failed(exc.outcome, str(exc))
            error.away = self.name
            raise error from exc
        except ServiceFailed as exc:
            raise self._failed(exc.outcome, str(exc)) from exc
        finally:
            self.num_open -= 1

    def _failed(self, outcome: JobFailure, why: str) -> JudgeError:
        return JudgeError(outcome, f"judge {self.name}: {why}")


class Judges(dict[str, Judge]):
    """The judges of a configuration (``reward.judges``), by name.

    Belongs to one event loop, in which it must be closed.

    Args:
        waits: repeat a reward whose judge was unreachable once that is back, instead of failing.
    """

    def __init__(self, configs: Iterable[JudgeConfig], *, waits: bool = False) -> None:
        super().__init__({one.name: Judge(one) for one in configs})
        self.waits = waits

    def __missing__(self, name: str) -> Judge:
        """Raise ConfigError: there is no judge of this name."""
        known = ", ".join(self) or "none"
        raise ConfigError(f"no judge {name!r}: choose one of reward.judges ({known}), or add it there.")

    async def wait_if_away(self) -> bool:
        """Wait until all judges with open requests respond; return whether one did not at first."""
        request = [judge for judge in self.values() if judge.num_open]
        return any([await judge.wait_if_away() for judge in request])

    async def close(self) -> None:
        """Close all connections."""
        for judge in self.values():
            await judge.close()


def takes_judges(code: Callable[..., Any]) -> bool:
    """Return whether a function, or the constructor of a class, has a parameter for judges."""
    return has_parameter(code, PARAMETER)


def _request(prompt: Prompt) -> dict[str, Any]:
    return {"text": utf8_safe(prompt)} if isinstance(prompt, str) else {"input_ids": [int(token) for token in prompt]}


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))
    except OverflowError:
        return False
