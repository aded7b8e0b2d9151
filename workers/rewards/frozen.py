"""Frozen models score the samples of the policy: log-probabilities of each sample's tokens, stored as side arrays.

    a rewarded training sample ─> rollout.teacher: one prefill ─> sides["teacher_logprobs"] ─> commit
                                  rollout.reference: another   ─> sides["reference_logprobs"]

They are called during the job's lease, before the commit: a sample without them is never committed (T17). A model that
is unreachable (refused, silent, 5xx) is waited for and reported, with the samples in memory and without a charge. If
one refuses a sample or answers garbage, the job is retried with the tokens generated so far.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config import Config
from penstock.config.reward import ScoringModelConfig
from penstock.errors import ConfigError, EngineError, FrozenModelError
from penstock.model.folder import read_vocab_size
from penstock.model.tokenizer import check_same_ids
from penstock.names import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, Lane
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.workers.rewards.service import Service, ServiceFailed
from penstock.workers.sglang.segment import read_scored

#: Request fields of a scoring.
_SCORING: Mapping[str, Any] = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}
#: Key of section ``rollout`` -> side array.
SIDES: Mapping[str, str] = {"teacher": TEACHER_LOGPROBS, "reference": REFERENCE_LOGPROBS}


class FrozenModels:
    """The models of one worker's configuration. Belongs to one event loop, in which it must be closed.

    Reads the models' tokenizers. Raises ConfigError if one has no address, or other token ids than the policy.
    """

    def __init__(self, config: Config) -> None:
        check_ids(config)
        self._models = {
            SIDES[key]: FrozenModel(key, model, read_vocab_size(config.folder_of(model)))
            for key, model in config.rollout.scoring_models().items()
        }

    def check(self, job: Job, temperature: float) -> None:
        """Raise ConfigError if the models cannot score a job: it has images, or another temperature than 1."""
        if self._models and job.lane == Lane.TRAIN and job.images:
            raise ConfigError(
                f"job {job.id} has images, and the models of section rollout that score its tokens see tokens alone: "
                "leave rollout.teacher and rollout.reference out, or the images."
            )
        if self._models and job.lane == Lane.TRAIN and temperature != 1:
            raise ConfigError(
                f"job {job.id} samples at temperature {temperature:g}, and the models of section rollout that score "
                "its tokens do so at 1 alone: sample at 1."
            )

    def scores(self, sample: Sample) -> bool:
        """Return whether this sample is scored: only training samples are."""
        return bool(self._models) and sample.job.lane == Lane.TRAIN

    async def score(self, sample: Sample) -> None:
        """Set the side arrays of a sample that ``scores`` accepts. Waits for all models, and for an unreachable one
        until it is back.

        Raises:
            FrozenModelError: a reachable model gave no log-probabilities.
        """
        for side, model in self._models.items():
            found = [await model.logprobs(sample.tokens[: end_of_first(sample)], sample.prompt_length, sample.id)]
            for begin, end in pairwise([*sample.parts, len(sample.tokens)]):
                # The first token of a part is context, without tokens before it.
                found += [np.zeros(1, np.float32), await model.logprobs(sample.tokens[begin:end], 1, sample.id)]
            sample.sides[side] = np.concatenate(found)

    async def close(self) -> None:
        """Close all connections."""
        for model in self._models.values():
            await model.close()


def end_of_first(sample: Sample) -> int:
    """Return the index after the first part of a sample."""
    return sample.parts[0] if sample.parts else len(sample.tokens)


class FrozenModel:
    """One frozen model.

    Args:
        key: of section ``rollout``.
        vocab_size: size of its vocabulary; 0: unknown.
    """

    def __init__(self, key: str, config: ScoringModelConfig, vocab_size: int) -> None:
        if config.url is None:
            raise ConfigError(
                f"rollout.{key} {config.name} has no address: workers that the fleet starts get the addresses of its "
                "models; set its url for others."
            )
        self._what = f"rollout.{key} {config.name}"
        self._url = f"{config.url}/generate"
        self._vocab_size = vocab_size
        self._service = Service(config, f"rollout.{key}", self._what)

    async def logprobs(self, tokens: list[int], start: int, what: str) -> NDArray[np.float32]:
        """[L - start] Return log-probabilities of tokens from ``start`` on given those before each, at temperature 1.

        Waits for attempts and pauses, within its limits; without limit while the model does not respond at all.

        Args:
            tokens: [L] ids, of the policy and of this model alike.
            start: 1 <= start <= L.
            what: id of the sample, for errors.

        Raises:
            FrozenModelError: it gave no log-probabilities.
        """
        # An id outside a server's vocabulary crashes it.
        if self._vocab_size and max(tokens) >= self._vocab_size:
            raise FrozenModelError(
                f"sample {what} has id {max(tokens)}, and {self._what} has ids below {self._vocab_size}: the policy "
                "sampled an id that stands for no text."
            )
        if start == len(tokens):
            return np.zeros(0, np.float32)
        question = {"input_ids": tokens, "logprob_start_len": start - 1, **_SCORING}
        # Two tokens, which any reachable model can score.
        probe = {"input_ids": tokens[:2], "logprob_start_len": 0, **_SCORING}
        try:
            answer = await self._service.ask(self._url, question, probe=probe, waits=True)
            found = read_scored(answer, tokens, start, self._vocab_size, f"sample {what}")
        except (ServiceFailed, EngineError) as exc:
            raise FrozenModelError(f"{self._what}: {exc}") from exc
        if found is None:
            raise FrozenModelError(f"{self._what}: it aborted the scoring of sample {what}.")
        return np.array(found, np.float32)

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()


def check_ids(config: Config) -> None:
    """Raise ConfigError if a model that scores samples has other token ids than the policy. Reads tokenizers."""
    for key, model in config.rollout.scoring_models().items():
        check_same_ids(config.model.path, config.folder_of(model), f"rollout.{key} {model.name}")
