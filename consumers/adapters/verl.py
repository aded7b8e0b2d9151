"""Rollouts for verl: answers, rewards and logprobs as the ``DataProto`` that its trainers take (verl 0.9).

    with VerlRollout(run="math", tokenizer=tokenizer, prompt_length=512, response_length=2048) as rollout:
        rollout.update_weights(model)
        output = rollout.generate_sequences(gen_batch)     # then verl's loop: old_log_probs, advantages, update

Tensors, padded as verl pads them (prompts on the left, responses on the right):

| key | shape | |
|---|---|---|
| ``prompts``, ``responses`` | [B, P], [B, R] int64 | |
| ``input_ids``, ``attention_mask``, ``position_ids`` | [B, P + R] int64 | |
| ``response_mask`` | [B, R] int64 | 1 on tokens that bear loss: not on observations, nor on tokens beyond the bound |
| ``rollout_log_probs`` | [B, R] float32 | log-probability with which each token was sampled (T6) |
| ``rollout_versions`` | [B, R] int64 | version that generated each token, -1 for tokens not generated |
| ``teacher_log_probs``, ``ref_log_prob`` | [B, R] float32 | of ``rollout.teacher``, ``reference``, if set |
| ``rm_scores`` | [B, R] float32 | the reward, on the last token of the response |

Beside them ``uid`` (the group), ``min_global_steps`` and ``max_global_steps`` (oldest and newest version of the row),
and in ``meta_info`` the sampling ``temperature``: verl's ``union`` fails with a batch that names another one.
A ``DataProto`` is made in memory only; nothing is unpickled.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from verl import DataProto

from penstock.config import Config
from penstock.consumers.adapters.inside_verl.images import add_images, check_text_alone, images_of
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests, eval_sampling
from penstock.consumers.adapters.rows import RowArrays, label, plain, rows_of
from penstock.consumers.batch import behaviour
from penstock.consumers.batch.batch import Batch
from penstock.consumers.scorer import Scorer
from penstock.errors import ConfigError, ProtocolError

#: Columns of verl's datasets that a reward gets as metadata.
HANDED_ON = ("data_source", "extra_info", "index")


class VerlRollout:
    """A replacement of verl's rollout worker group: ``generate_sequences``, ``compute_log_prob``, ``update_weights``.

    Args:
        config, run: as of ``Trainer``; the run needs a buffer and workers, and no producer or trainer.
        tokenizer: renders ``raw_prompt`` messages with its chat template and names the padding; None if prompts are
            token ids and ``pad_id`` is given.
        prompt_length, response_length: P and R; None: the longest of the call. ``response_length`` is also the most
            new tokens, unless ``sampling`` sets another limit.
        pad_id: token of the padding; None: the tokenizer's.
        sampling: SGLang names; overrides the run's ``rollout.sampling``. In validation ``rollout.eval_sampling``
            overrides it.
        temperature: temperature by which verl divides logits, ``actor_rollout_ref.rollout.temperature``; training
            answers are sampled at it. verl's loop does not pass it to ``generate_sequences``, so set it here; None:
            that of ``sampling`` or the run.
        name: subscription and dataset of the prompts; validation uses NAME-validation.
        timeout: longest wait of a call, in seconds; None: no limit.
    """

    def __init__(
        self,
        config: Config | str | Path | None = None,
        *,
        run: str | None = None,
        tokenizer: Any = None,
        prompt_length: int | None = None,
        response_length: int | None = None,
        pad_id: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        temperature: float | None = None,
        name: str = "verl",
        timeout: float | None = None,
    ) -> None:
        if pad_id is None:
            pad_id = getattr(tokenizer, "pad_token_id", None)
        if pad_id is None:
            raise ConfigError("Name the padding: give pad_id, or a tokenizer that has a pad_token_id.")
        self.pad_id = pad_id
        self.tokenizer = tokenizer
        self.prompt_length, self.response_length = prompt_length, response_length
        self.timeout = timeout
        limits = {} if response_length is None else {"max_new_tokens": response_length}
        self._sampling = limits | dict(sampling or {})
        self._train = Requests(config, run=run, name=name)
        named = self._sampling.get("temperature")
        if temperature is not None and named is not None and not behaviour.same(temperature, float(named)):
            raise ConfigError(
                f"temperature is {temperature:g} and sampling names {float(named):g}: verl divides logits by the "
                "first, engines sample at the second. Give one of them."
            )
        #: Temperature of training answers, by which verl divides logits.
        self.temperature = self._train.temperature(
            self._sampling if temperature is None else {"temperature": temperature}
        )
        self._validation = Requests(self._train.config, name=f"{name}-validation", lane="eval")
        self._scorer: Scorer | None = None

    def __enter__(self) -> Self:
        self._train.__enter__()
        self._validation.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release both subscriptions. Blocks shortly."""
        if self._scorer is not None:
            self._scorer.close()
        self._validation.close()
        self._train.close()

    def update_weights(self, weights: Any, *, step: int | None = None) -> int:
        """Publish a module, or named tensors; return the version. Blocks until the files are on disk.

        Later calls generate with this version or a later one (T12).
        """
        return self._train.publish(weights, step=step)

    def report(self, **figures: Any) -> None:
        """Add metrics to the row of the last answers, see ``Trainer.report``."""
        self._train.report(**figures)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return one answer per row, in order. Blocks until all are complete (`penstock why` shows causes).

        Prompts are taken from ``input_ids`` with ``attention_mask``, else from ``raw_prompt_ids``, else from
        ``raw_prompt`` (chat messages, or text). Rows of one ``uid`` with the same prompt are one group. The reward
        gets ``reward_model["ground_truth"]`` as its label, and ``data_source``, ``extra_info`` and ``index`` as
        metadata. ``meta_info["validate"]`` true: the prompts go to lane eval, which allows greedy sampling, and
        ``rollout.eval_sampling`` applies.

        Raises:
            ConfigError: the prompts are in none of these forms, hold images or the like, or are longer than
                ``prompt_length``; ``meta_info["temperature"]`` is not :attr:`temperature`; the workers sampled at
                another one.
            ProtocolError: a prompt is dead-lettered, with the reason.
            WaitTimeout: ``timeout`` is over.
        """
        began_s = time.monotonic()
        requests, members = self._requests(prompts)
        validating = bool(prompts.meta_info.get("validate"))
        lane = self._validation if validating else self._train
        rows: list[RowArrays | None] = [None] * len(prompts)
        for found, places in zip(lane.answer(requests, self.timeout), members, strict=True):
            for row, place in zip(found, places, strict=True):
                rows[place] = row
        output = data_proto(
            [row for row in rows if row is not None],
            pad_id=self.pad_id,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
        )
        if "uid" in prompts.non_tensor_batch:
            output.non_tensor_batch["uid"] = prompts.non_tensor_batch["uid"]
        if not validating:
            output.meta_info["temperature"] = self.temperature
        output.meta_info["timing"] = {"generate_sequences": time.monotonic() - began_s}
        return output

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Have the engines score given responses; return log-probabilities. Blocks until all are complete.

        Takes ``input_ids``, ``attention_mask`` and ``responses`` of any rows. Returns ``old_log_probs`` [B, R] float32
        (0 on padding) and the column ``scored_version`` (-1: the engine's initial weights). Observations are scored
        too; ``response_mask`` marks the tokens that bear loss.

        Raises:
            ConfigError: ``meta_info["temperature"]`` is not 1, the temperature of scores.
            ScoreError: an engine rejects a sequence.
            WaitTimeout: ``timeout`` is over.
        """
        if float(data.meta_info.get("temperature", 1.0)) != 1.0:
            raise ConfigError("compute_log_prob is at temperature 1: engines score the policy itself.")
        mask = data.batch["attention_mask"].bool()
        width = data.batch["responses"].shape[1]
        sequences = [row[seen].tolist() for row, seen in zip(data.batch["input_ids"], mask, strict=True)]
        starts = mask[:, :-width].sum(dim=1).tolist()
        if self._scorer is None:
            self._scorer = Scorer(self._train.config)
        scores = self._scorer.score(sequences, starts, timeout_s=self.timeout)
        return DataProto.from_dict(
            tensors={"old_log_probs": _right([score.logprobs for score in scores], width, 0.0, torch.float32)},
            non_tensors={"scored_version": _objects([score.version for score in scores])},
        )

    def _requests(self, prompts: DataProto) -> tuple[list[Request], list[list[int]]]:
        """Return the requests, and the rows that each answers."""
        ids = self._prompt_ids(prompts)
        columns = prompts.non_tensor_batch
        groups: dict[Any, list[int]] = {}
        for place, prompt in enumerate(ids):
            uid = str(columns["uid"][place]) if "uid" in columns else place
            groups.setdefault((uid, tuple(prompt)), []).append(place)
        if prompts.meta_info.get("validate"):
            sampling = eval_sampling(self._sampling, self._train.config.rollout, self.response_length)
        else:
            named = float(prompts.meta_info.get("temperature", self.temperature))
            if not behaviour.same(named, self.temperature):
                raise ConfigError(
                    f"meta_info names temperature {named:g}, but this VerlRollout samples at {self.temperature:g}: "
                    "set VerlRollout(temperature=...) to actor_rollout_ref.rollout.temperature."
                )
            sampling = self._sampling | {"temperature": self.temperature}
        requests = [
            Request(
                prompt_ids=ids[places[0]],
                n=len(places),
                metadata={key: plain(columns[key][places[0]], key) for key in HANDED_ON if key in columns},
                sampling=sampling,
                **label(label_of(columns, places[0])),
            )
            for places in groups.values()
        ]
        return requests, list(groups.values())

    def _prompt_ids(self, prompts: DataProto) -> list[list[int]]:
        columns = prompts.non_tensor_batch
        check_text_alone(columns)
        tensors = prompts.batch if prompts.batch is not None else {}
        if "input_ids" in tensors and "attention_mask" in tensors:
            masks = tensors["attention_mask"].bool()
            found = [row[mask].tolist() for row, mask in zip(tensors["input_ids"], masks, strict=True)]
        elif "raw_prompt_ids" in columns:
            found = [[int(token) for token in row] for row in columns["raw_prompt_ids"]]
        elif "raw_prompt" in columns:
            found = [self._render(messages) for messages in columns["raw_prompt"]]
        else:
            raise ConfigError(
                "The prompts have neither input_ids with attention_mask, nor raw_prompt_ids, nor raw_prompt."
            )
        for place, row in enumerate(found):
            if not row or (self.prompt_length is not None and len(row) > self.prompt_length):
                raise ConfigError(
                    f"Prompt {place} has {len(row)} tokens; it needs at least 1 and at most prompt_length, "
                    f"{self.prompt_length}: filter overlong prompts, or raise it."
                )
        return found

    def _render(self, messages: Any) -> list[int]:
        if self.tokenizer is None:
            raise ConfigError("raw_prompt has to be tokenized: give VerlRollout the tokenizer.")
        if isinstance(messages, str):
            return [int(token) for token in self.tokenizer.encode(messages)]
        ids = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in ids]


def from_batch(
    batch: Batch,
    *,
    pad_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
    temperature: float | None = None,
    processor: Any = None,
) -> DataProto:
    """Convert this rank's share of a batch for a verl trainer fed by penstock: as above, plus ``advantages`` [B, R].

    Lost samples are left out, and tokens beyond the bound have response mask 0. ``uid`` is the job.

    Args:
        processor: ``verl.utils.hf_processor`` of a vision model: positions and images then have verl's format for
            such a model (inside_verl/images.py), also for prompts without images.
        temperature: ``actor_rollout_ref.rollout.temperature``; the batch must have been sampled at it. None: the
            batch's own, returned as ``meta_info["temperature"]``.

    Raises:
        ConfigError: the batch was sampled at another temperature, or at several, or its logprobs are from before it
            was applied (T6); or its prompts have images, and the processor is not that of a vision model.
        ProtocolError: a sample is too long.
        PayloadError: images are gone, or are not those that were committed.
    """
    images = images_of(batch, processor)
    drawn_at = batch.temperature
    if temperature is not None:
        what = f"batch {batch.n} of {batch.manifest.sub}"
        behaviour.check_temperature(batch.all_rows, temperature, what, "actor_rollout_ref.rollout.temperature")
        drawn_at = temperature
    rows = [row for row in rows_of(batch) if not row.lost]
    output = data_proto(rows, pad_id=pad_id, prompt_length=prompt_length, response_length=response_length)
    if hasattr(processor, "get_rope_index"):
        add_images(output, rows, images, processor, pad_id)
    given = dict(zip((row.sample for row in batch.rows), batch.arrays()["advantages"], strict=True))
    width = output.batch["responses"].shape[1]
    parts = [given[row.row.sample][row.row.prompt_length : row.row.length] for row in rows]
    output.batch["advantages"] = _right(parts, width, 0.0, torch.float32)
    output.meta_info["temperature"] = drawn_at
    output.meta_info["train_version"] = batch.train_version
    return output


def data_proto(
    rows: Sequence[RowArrays], *, pad_id: int, prompt_length: int | None = None, response_length: int | None = None
) -> DataProto:
    """Convert samples to verl's format, see the module docstring. Raises ProtocolError for one that is too long."""
    if not rows:
        raise ProtocolError("There is no sample to make a DataProto of.")
    prompts = [row.prompt for row in rows]
    responses = [row.response("tokens") for row in rows]
    width_p = _width([len(prompt) for prompt in prompts], prompt_length, "prompt", rows)
    width_r = _width([len(response) for response in responses], response_length, "response", rows)
    lengths = torch.tensor([len(response) for response in responses])
    before = torch.tensor([len(prompt) for prompt in prompts])
    mask_p = (torch.arange(width_p) >= width_p - before[:, None]).long()
    mask_r = (torch.arange(width_r) < lengths[:, None]).long()
    attention = torch.cat([mask_p, mask_r], dim=1)
    tensors = {
        "prompts": _right([prompt[::-1].copy() for prompt in prompts], width_p, pad_id, torch.int64).flip(1),
        "responses": _right(responses, width_r, pad_id, torch.int64),
        "response_mask": _right([row.response("loss_mask") for row in rows], width_r, 0, torch.int64),
        "rollout_log_probs": _right([row.response("logprobs") for row in rows], width_r, 0.0, torch.float32),
        "rollout_versions": _right([row.response("versions") for row in rows], width_r, -1, torch.int64),
        "attention_mask": attention,
        # verl's convention: from 0 at the first token; padding repeats the last position.
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        "rm_scores": torch.zeros(len(rows), width_r),
    }
    for key, name in (("teacher_log_probs", "teacher_logprobs"), ("ref_log_prob", "reference_logprobs")):
        if all(getattr(row, name) is not None for row in rows):
            tensors[key] = _right([row.response(name) for row in rows], width_r, 0.0, torch.float32)
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    last = (lengths - 1).clamp(min=0)
    tensors["rm_scores"][torch.arange(len(rows)), last] = torch.tensor([row.row.reward for row in rows])
    columns: dict[str, list[Any]] = {
        "uid": [row.row.job for row in rows],
        "min_global_steps": [row.row.oldest for row in rows],
        "max_global_steps": [row.row.newest for row in rows],
        # verl's trainer reads this column of every batch.
        "multi_modal_inputs": [{} for _ in rows],
    }
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={name: _objects(values) for name, values in columns.items()},
        meta_info={"reward_extra_keys": [], "timing": {}},
    )


def _width(lengths: Sequence[int], most: int | None, what: str, rows: Sequence[RowArrays]) -> int:
    longest = max(lengths)
    if most is not None and longest > most:
        sample = rows[list(lengths).index(longest)].row.sample
        raise ProtocolError(
            f"The {what} of sample {sample} has {longest} tokens, more than {what}_length, {most}: raise it, or limit "
            "what the run generates."
        )
    return max(1, longest) if most is None else most


def _right(parts: Sequence[NDArray[Any]], width: int, blank: float, dtype: torch.dtype) -> Tensor:
    """Pad on the right; return [B, width]."""
    out = torch.full((len(parts), width), blank, dtype=dtype)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = torch.from_numpy(np.ascontiguousarray(part)).to(dtype)
    return out


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    column: NDArray[np.object_] = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def label_of(columns: Mapping[str, Any], place: int) -> Any:
    """Return ``reward_model["ground_truth"]`` of a row, of whatever type; None if it is missing."""
    reward_model = columns["reward_model"][place] if "reward_model" in columns else {}
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
