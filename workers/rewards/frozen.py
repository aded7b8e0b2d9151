"""Frozen models that score what the policy drew: log-probabilities of each sample's tokens, kept beside it as sides.

    a sample of training, its reward known ─> rollout.teacher: one prefill ─> sides["teacher_logprobs"] ─> commit
                                              rollout.reference: another   ─> sides["reference_logprobs"]

They are asked in the lease of the job, before the commit: a sample without them is never committed (T17). A model that
is away (refused, silent, 5xx) is waited for by name, with the samples in hand and at nobody's charge; one that refuses
a sample, or answers what is no answer, has its job tried again with what was drawn.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config import Config
from penstock.config.reward import ScoringModelConfig
from penstock.errors import ConfigError, EngineError, FrozenModelError
from penstock.names import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, Lane
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import Sample
from penstock.weights.model_folder import read_vocab_size
from penstock.weights.tokenizer import check_same_ids
from penstock.workers.rewards.service import Service, ServiceFailed
from penstock.workers.sglang.segment import read_scored

#: Of a scoring, what makes it one.
_SCORING: Mapping[str, Any] = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}
#: Key of section ``rollout`` -> side array.
SIDES: Mapping[str, str] = {"teacher": TEACHER_LOGPROBS, "reference": REFERENCE_LOGPROBS}


class FrozenModels:
    """Those of one worker's configuration. Of an event loop: whoever makes them closes them there.

    Reads the models' tokenizers. Raises ConfigError where one has no address here, or other ids than the policy.
    """

    def __init__(self, config: Config) -> None:
        check_ids(config)
        self._models = {
            SIDES[key]: FrozenModel(key, model, read_vocab_size(config.folder_of(model)))
            for key, model in config.rollout.scoring_models().items()
        }

    def check(self, job: Job, temperature: float) -> None:
        """Raise ConfigError where a job is drawn at a temperature that nobody can score at."""
        if self._models and job.lane == Lane.TRAIN and job.images:
            raise ConfigError(
                f"job {job.id} has images, and the models of section rollout that score its tokens see tokens alone: "
                "leave rollout.teacher and rollout.reference out, or the images."
            )
        if self._models and job.lane == Lane.TRAIN and temperature != 1:
            raise ConfigError(
                f"job {job.id} is drawn at temperature {temperature:g}, and the models of section rollout that score "
                "its tokens do so at 1 alone: draw it at 1."
            )

    def scores(self, sample: Sample) -> bool:
        """Is there anything to ask of this sample? Those of training alone are scored."""
        return bool(self._models) and sample.job.lane == Lane.TRAIN

    async def score(self, sample: Sample) -> None:
        """Set the side arrays of a sample that ``scores`` says yes of. Waits for all models, and for one that is away
        until it is back.

        Raises:
            FrozenModelError: one that is there gave no log-probabilities.
        """
        for side, model in self._models.items():
            sample.sides[side] = await model.logprobs(sample.tokens, sample.prompt_length, sample.id)

    async def close(self) -> None:
        """Let go of all connections."""
        for model in self._models.values():
            await model.close()


class FrozenModel:
    """One of them.

    Args:
        key: of section ``rollout``.
        vocab_size: ids that it has; 0: not known.
    """

    def __init__(self, key: str, config: ScoringModelConfig, vocab_size: int) -> None:
        if config.url is None:
            raise ConfigError(
                f"rollout.{key} {config.name} has no address here: workers that the fleet starts know those of its "
                "models; set its url for others."
            )
        self._what = f"rollout.{key} {config.name}"
        self._url = f"{config.url}/generate"
        self._vocab_size = vocab_size
        self._service = Service(config, f"rollout.{key}", self._what)

    async def logprobs(self, tokens: list[int], start: int, what: str) -> NDArray[np.float32]:
        """[L - start] log-probability of each token from ``start`` on given those before it, at temperature 1.

        Waits for tries and pauses, within its limits; while the model does not answer at all, without an end.

        Args:
            tokens: [L] ids, of the policy and of this model alike.
            start: 1 <= start <= L.
            what: id of the sample, for the sentence.

        Raises:
            FrozenModelError: it gave none.
        """
        # An id that a server does not have kills it.
        if self._vocab_size and max(tokens) >= self._vocab_size:
            raise FrozenModelError(
                f"sample {what} holds id {max(tokens)}, and {self._what} has ids below {self._vocab_size}: the policy "
                "drew what no text has."
            )
        if start == len(tokens):
            return np.zeros(0, np.float32)
        question = {"input_ids": tokens, "logprob_start_len": start - 1, **_SCORING}
        # Two tokens, which every model that is there scores.
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
        """Let go of the connections."""
        await self._service.close()


def check_ids(config: Config) -> None:
    """Raise ConfigError where a model that scores samples has other token ids than the policy. Reads tokenizers."""
    for key, model in config.rollout.scoring_models().items():
        check_same_ids(config.model.path, config.folder_of(model), f"rollout.{key} {model.name}")
