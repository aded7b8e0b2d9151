"""Rollouts for TRL's ``GRPOTrainer`` (1.16), through its ``rollout_func``.

    with TrlRollouts(run="math", label=answers.get) as rollouts:
        trainer = GRPOTrainer(model, reward_funcs=[rollouts.reward], rollout_func=rollouts, train_dataset=..., args=...)
        trainer.train()

TRL chooses the prompts and trains; penstock's workers answer and reward them. After each step of TRL its weights are
published before the next prompts are submitted, so every answer is from the current policy.

If TRL trains with several processes, the first holds the subscription, submits for all and scatters the answers; a
group may span two processes.
"""

import datetime
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist

from penstock.config import Config
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests
from penstock.consumers.adapters.rows import RowArrays, label, plain
from penstock.errors import ConfigError, PenstockError, ProtocolError, WaitTimeout
from penstock.names import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from penstock.records.cause import Cause
from penstock.records.causes import RanksAbsent, decode
from penstock.records.codec import pack, unpack

log = logging.getLogger(__name__)

#: Longest wait for another rank by default.
TIMEOUT_S = 30 * 24 * 3600.0
#: Seconds between two reports of a wait, and between two log lines.
TELL_S, LOG_S = 1.0, 60.0
#: Errors that a rank may raise on the others, by name.
ERRORS: dict[str, Callable[..., PenstockError]] = {
    kind.__name__: kind for kind in (ConfigError, ProtocolError, WaitTimeout)
}


class Together:
    """Let rank 0 talk to the run for all ranks of one training: gather prompts, scatter answers.

        every rank: its items ─> rank 0: of all, in the order of the ranks ─> an answer each ─> every rank: its own

    Ranks are those of torch's launchers (RANK, WORLD_SIZE); a single rank needs no group. Bytes (msgpack) go over a
    separate gloo group, by default without a time limit: a rollout may take longer than a collective's timeout. A rank
    that dies ends the call of every other. Before a gather rank 0 receives from each other rank separately, so that it
    can name the one that hangs; the others name rank 0.

    Args:
        blocked_on: called on rank 0 with the cause of its wait, repeatedly, None at the end; in a thread.
        timeout_s: longest wait for another rank; None: 30 days.
    """

    def __init__(
        self, blocked_on: Callable[[Cause | None], None] = lambda _: None, timeout_s: float | None = None
    ) -> None:
        self._blocked_on = blocked_on
        self._timeout_s = timeout_s or TIMEOUT_S
        self._rank = int(os.environ.get("RANK", "0"))
        self._size = int(os.environ.get("WORLD_SIZE", "1"))
        self._group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        """Return True on the rank that talks to the run."""
        return self._rank == 0

    def share(
        self, items: Callable[[], Sequence[Any]], answer: Callable[[list[Any]], list[dict[str, Any]]]
    ) -> dict[str, list[Any]]:
        """Call ``answer`` on rank 0 with all ranks' items; return this rank's part as columns. Collective, blocks.

        Raises on every rank the errors of ``items`` on any rank, or of ``answer``; RuntimeError if another rank dies or
        times out.
        """
        if self._size == 1:
            return _group_columns(answer([_plain(item) for item in items()]))
        raised: BaseException | None = None
        try:
            asked = {"items": list(items())}
        except BaseException as exc:  # sent to the other ranks before it is raised
            raised, asked = exc, _error(exc, self._rank)
        every = [unpack(data, "What another rank asks") for data in self._gather(pack(asked))]
        parts: list[bytes] = []
        if failed := [one for one in every if "error" in one]:
            parts = [pack(failed[0])] * self._size
        elif self.leads:
            try:
                parts = _parts([one["items"] for one in every], answer)
            except BaseException as exc:
                raised = exc
                parts = [pack(_error(exc, 0))] * self._size
        found = unpack(self._scatter(parts), "What rank 0 hands out")
        if raised is not None:
            raise raised
        if "error" in found:
            raise ERRORS.get(found["error"], ProtocolError)(
                f"Of rank {found['rank']}: {found['text']}", **_about(found["about"])
            )
        columns: dict[str, list[Any]] = found["columns"]
        return columns

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            if not dist.is_initialized():
                raise ConfigError(f"WORLD_SIZE is {self._size}, but torch.distributed is not begun: train, then ask.")
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._timeout_s))
        return self._group

    def _call_roll(self, group: dist.ProcessGroup) -> None:
        """Wait until every rank is present; rank 0 receives from them one by one."""
        here = torch.zeros(1)
        if not self.leads:
            with self._naming(RanksAbsent(("rank 0",), "gather")):
                dist.send(here, dst=0, group=group)
            return
        for rank in range(1, self._size):
            with self._naming(RanksAbsent((f"rank {rank} of {self._size}",), "ask")):
                dist.recv(here, src=rank, group=group)

    @contextmanager
    def _naming(self, cause: Cause) -> Iterator[None]:
        """Report, and log each minute, what this rank waits for inside of the ``with`` block, if it takes a moment."""
        ended = threading.Event()
        teller = threading.Thread(target=self._name, args=(cause, ended), name="whom ranks wait for", daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def _name(self, cause: Cause, ended: threading.Event) -> None:
        waited_s = told_s = 0.0
        while not ended.wait(TELL_S):
            waited_s += TELL_S
            if self.leads:
                self._blocked_on(cause)
            if waited_s - told_s >= LOG_S:
                told_s = waited_s
                log.warning("rank %d has waited %.0f s for %s", self._rank, waited_s, cause)
        if self.leads and waited_s:
            self._blocked_on(None)

    def _gather(self, data: bytes) -> list[bytes]:
        """Gather the bytes of all ranks on rank 0; return [] elsewhere."""
        group = self._open()
        self._call_roll(group)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        longest = max(int(size) for size in sizes)
        mine = _tensor(data, longest)
        all_ = [torch.empty(longest, dtype=torch.uint8) for _ in range(self._size)] if self.leads else None
        dist.gather(mine, all_, dst=0, group=group)
        return [bytes(one[: int(size)].numpy()) for one, size in zip(all_ or [], sizes, strict=False)]

    def _scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each rank its entry of ``parts``, which rank 0 has; return this rank's."""
        group = self._open()
        sizes = torch.tensor([len(part) for part in parts] if self.leads else [0] * self._size)
        with self._naming(RanksAbsent(("rank 0",), "answer")):
            dist.broadcast(sizes, src=0, group=group)
        longest = int(sizes.max())
        mine = torch.empty(longest, dtype=torch.uint8)
        dist.scatter(mine, [_tensor(part, longest) for part in parts] if self.leads else None, src=0, group=group)
        return bytes(mine[: int(sizes[self._rank])].numpy())


def _tensor(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _about(about: dict[str, Any]) -> dict[str, Any]:
    if not about.get("cause"):
        return about
    name, fields = about["cause"]
    return {**about, "cause": decode(name, fields, "An error")}


def _error(exc: BaseException, rank: int) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if isinstance(exc, WaitTimeout):
        about = {"count": exc.count, "cause": exc.cause and [exc.cause.name, exc.cause.fields()]}
    return {"error": type(exc).__name__, "text": str(exc), "rank": rank, "about": about}


def _parts(every: Sequence[Sequence[Any]], answer: Callable[[list[Any]], list[dict[str, Any]]]) -> list[bytes]:
    """Encode for each rank the answers to its items."""
    answers = answer([_plain(item) for items in every for item in items])
    parts, begin = [], 0
    for items in every:
        parts.append(pack({"columns": _group_columns(answers[begin : begin + len(items)])}))
        begin += len(items)
    return parts


def _group_columns(answers: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [answer[name] for answer in answers] for name in (answers[0] if answers else ())}


def _plain(item: Any) -> Any:
    """Convert a tuple as msgpack would."""
    return tuple(item)


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
