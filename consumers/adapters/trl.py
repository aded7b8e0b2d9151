"""Rollouts for TRL's ``GRPOTrainer`` (1.16), through its ``rollout_func``.

    with TrlRollouts(run="math", label=answers.get) as rollouts:
        trainer = GRPOTrainer(model, reward_funcs=[rollouts.reward], rollout_func=rollouts, train_dataset=..., args=...)
        trainer.train()

TRL chooses the prompts and trains; penstock's workers answer and reward them. After each step of TRL its weights are
published before the next prompts are submitted, so every answer is from the current policy.

If TRL trains with several processes, the first holds the subscription, submits for all and scatters the answers; a
group may span two processes.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from penstock.config import Config
from penstock.consumers.adapters.handed_on import label, plain
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.adapters.rows import RowArrays
from penstock.consumers.adapters.together import Together
from penstock.errors import ConfigError
from penstock.names import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from penstock.protocol.records.causes import Cause

#: Names of TRL's sampling settings -> SGLang's name, and the value that changes nothing.
SAMPLING: dict[str, tuple[str, Any]] = {
    "top_p": ("top_p", 1.0),
    "top_k": ("top_k", 0),
    "min_p": ("min_p", None),
    "repetition_penalty": ("repetition_penalty", 1.0),
}
#: TRL's settings of its own engines.
ENGINES = ("generation_kwargs", "vllm_structured_outputs_regex")
#: Settings of TRL's own engines.
SHARDED = {"FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"}
#: One prompt: its tokens, and the label for the reward.
Asked: TypeAlias = tuple[list[int], Any]


class TrlRollouts:
    """A ``rollout_func`` for ``GRPOTrainer``.

    Args:
        config, run: as of ``Trainer``; the run needs a buffer and workers, and no producer or trainer.
        label: prompt (as in the dataset) -> label for the run's reward: text, a number, a list or a map; None: no
            label.
        name: subscription and dataset of the prompts; evaluation uses NAME-validation.
        timeout: longest wait for the workers' answers, in seconds; the wait for another process is twice as long.
            None: no limit.
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        run: str | None = None,
        label: Callable[[Any], Any] | None = None,
        name: str = "trl",
        timeout: float | None = None,
    ) -> None:
        self.label = label
        self.timeout = timeout
        self._together = Together(self._name_wait, None if timeout is None else 2 * timeout)
        self._train = Requests(config, run=run, name=name)
        self._validation = Requests(self._train.config, name=f"{name}-validation", lane="eval")
        #: Step of TRL whose weights were published last.
        self._step: int | None = None

    def __enter__(self) -> Self:
        if self._together.leads:
            self._train.__enter__()
            self._validation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release both subscriptions. Blocks shortly."""
        if self._together.leads:
            self._validation.close()
            self._train.close()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return one completion per entry of ``prompts``; blocks until all are complete (`penstock why` shows causes).

        Equal neighbours form a group, also across processes, in rank order; every process must call this. Prompts are
        text or chat messages; TRL's ``temperature`` and ``max_completion_length`` override the run's.

        Returns:
            ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask`` (0 on tokens that bear no loss), and, for
            the reward function, ``penstock_reward`` and ``penstock_version`` (oldest version of the completion); if
            the run has them, ``penstock_teacher_logprobs`` and ``penstock_reference_logprobs`` of each token.

        Raises:
            ConfigError: the processes hold parts of the model (FSDP, DeepSpeed), or a prompt holds images; workers
                sampled at another temperature than TRL's, by which it divides, or with logprobs from before it (T6).
            ProtocolError: a prompt is dead-lettered, with the reason.
            WaitTimeout: ``timeout`` is over.
            RuntimeError: another process died or timed out.

        All processes raise the error of any of them.
        """
        named = trainer.chat_template_kwargs

        def asked() -> list[Asked]:
            return [(_tokenize(prompt, trainer.processing_class, named), self._label(prompt)) for prompt in prompts]

        return self._together.share(asked, lambda everyone: self._answer(everyone, trainer))

    def _answer(self, asked: Sequence[Asked], trainer: Any) -> list[dict[str, Any]]:
        """Answer all prompts, on the first process: return a column dict for each of ``asked``."""
        if str(trainer.accelerator.distributed_type).rpartition(".")[2] in SHARDED:
            raise ConfigError("TrlRollouts publishes whole models, and these processes hold parts: train with DDP.")
        if self._step != trainer.state.global_step:
            self._train.publish(trainer.accelerator.unwrap_model(trainer.model), step=trainer.state.global_step)
            self._step = trainer.state.global_step
        lane = self._train if trainer.model.training else self._validation
        sampling = sampling_of(trainer)
        requests = []
        for (ids, found), same in groupby(asked):
            requests.append(Request(prompt_ids=ids, n=len(list(same)), sampling=sampling, **label(found)))
        return [_columns(row) for group in lane.answer(requests, self.timeout) for row in group]

    def _name_wait(self, cause: Cause | None) -> None:
        """Report what the first process waits for (`penstock why`)."""
        self._train.tell_wait(cause)

    def _label(self, prompt: Any) -> Any:
        return plain(self.label(prompt), "the label") if self.label is not None else None

    def reward(self, completions: Sequence[Any], penstock_reward: Sequence[float], **_: Any) -> list[float]:
        """Return the rewards of the run's workers: a reward function for ``GRPOTrainer``."""
        return [float(value) for value in penstock_reward]


def sampling_of(trainer: Any) -> dict[str, Any]:
    """Translate TRL's sampling settings to SGLang's names; omit those without effect.

    Raises ConfigError for settings of TRL's own engine.
    """
    for name in ENGINES:
        if getattr(trainer.args, name, None):
            raise ConfigError(f"{name} has no effect where penstock generates: say it in the run's rollout.sampling.")
    sampling: dict[str, Any] = {"temperature": float(trainer.args.temperature)}
    if trainer.max_completion_length is not None:
        sampling["max_new_tokens"] = int(trainer.max_completion_length)
    for name, (theirs, neutral) in SAMPLING.items():
        value = getattr(trainer.args, name, neutral)
        if value is not None and value != neutral:
            sampling[theirs] = value
    return sampling


def _tokenize(prompt: Any, tokenizer: Any, named: Mapping[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        return [int(token) for token in tokenizer(text=prompt)["input_ids"]]
    if any(not isinstance(message.get("content"), str) for message in prompt):
        raise ConfigError("A prompt holds something else than text; TrlRollouts carries text alone.")
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **named)
    return [int(token) for token in ids]


def _columns(row: RowArrays) -> dict[str, Any]:
    taught = {
        f"penstock_{name}": row.response(name).tolist()
        for name in (TEACHER_LOGPROBS, REFERENCE_LOGPROBS)
        if getattr(row, name) is not None
    }
    return taught | {
        "prompt_ids": row.prompt.tolist(),
        "completion_ids": row.response("tokens").tolist(),
        "logprobs": row.response("logprobs").tolist(),
        "env_mask": row.response("loss_mask").astype(int).tolist(),
        "penstock_reward": row.row.reward,
        "penstock_version": row.row.oldest,
    }
