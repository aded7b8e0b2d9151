"""Rollouts for verl: answers, rewards and logprobs as the ``DataProto`` that its trainers take (verl 0.9).

    with VerlRollout(run="math", tokenizer=tokenizer, prompt_length=512, response_length=2048) as rollout:
        rollout.update_weights(model)
        output = rollout.generate_sequences(gen_batch)     # verl's loop goes on: old_log_probs, advantages, update

Tensors, padded as verl pads them (prompts on the left, responses on the right):

| key | shape | |
|---|---|---|
| ``prompts``, ``responses`` | [B, P], [B, R] int64 | |
| ``input_ids``, ``attention_mask``, ``position_ids`` | [B, P + R] int64 | |
| ``response_mask`` | [B, R] int64 | 1 on tokens that bear loss: not on observations, nor on tokens that are too old |
| ``rollout_log_probs`` | [B, R] float32 | log-probability each token was drawn with (T6) |
| ``rollout_versions`` | [B, R] int64 | version each token was drawn with, -1 where nothing was |
| ``teacher_log_probs``, ``ref_log_prob`` | [B, R] float32 | of ``rollout.teacher``, ``reference``, if there are such |
| ``rm_scores`` | [B, R] float32 | the reward, on the last token of the response |

Beside them ``uid`` (the group), ``min_global_steps`` and ``max_global_steps`` (oldest and newest version of the row),
and in ``meta_info`` the ``temperature`` they were drawn at: verl's ``union`` with a batch that names another one fails.
A ``DataProto`` is only ever made in memory here; nothing is unpickled.
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
from penstock.consumers.adapters.handed_on import label, plain
from penstock.consumers.adapters.inside_verl.images import add_images, check_text_alone, images_of
from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests, eval_sampling
from penstock.consumers.adapters.rows import RowArrays, rows_of
from penstock.consumers.batch import behaviour
from penstock.consumers.batch.batch import Batch
from penstock.consumers.scorer import Scorer
from penstock.errors import ConfigError, ProtocolError

#: Columns of verl's data sets that a reward is given as metadata.
HANDED_ON = ("data_source", "extra_info", "index")


class VerlRollout:
    """Where verl has a rollout worker group: ``generate_sequences``, ``compute_log_prob``, ``update_weights``.

    Args:
        config, run: as of ``Trainer``; the run needs a buffer and workers, and no producer or trainer.
        tokenizer: renders ``raw_prompt`` messages with its chat template and names the padding; None where prompts
            come as token ids and ``pad_id`` is given.
        prompt_length, response_length: P and R; None: the longest of the call. ``response_length`` is also the most
            new tokens, unless ``sampling`` says otherwise.
        pad_id: token of the padding; None takes the tokenizer's.
        sampling: SGLang names, over the run's ``rollout.sampling``; in validation ``rollout.eval_sampling`` is over it.
        temperature: what verl divides logits by, ``actor_rollout_ref.rollout.temperature``; answers to train on are
            drawn at it. verl's loop leaves it out of what it gives to ``generate_sequences``, so name it here; None
            takes that of ``sampling`` or the run.
        name: subscription and dataset of the prompts; validation takes NAME-validation.
        timeout: longest wait of a call, in seconds; None: without end.
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
                f"temperature is {temperature:g} and sampling names {float(named):g}: verl would divide by the one "
                "what is drawn at the other. Give one of them."
            )
        #: What answers to train on are drawn at, and verl divides by.
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
        """Give both subscriptions back. Blocks shortly."""
        if self._scorer is not None:
            self._scorer.close()
        self._validation.close()
        self._train.close()

    def update_weights(self, weights: Any, *, step: int | None = None) -> int:
        """Publish a module, or named tensors; returns the version. Blocks until the files are on disk.

        What is generated after it is drawn with this version or a later one (T12).
        """
        return self._train.publish(weights, step=step)

    def report(self, **figures: Any) -> None:
        """Add figures to the row of the last answers, see ``Trainer.report``."""
        self._train.report(**figures)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One answer per row, in the order of the rows. Blocks until all are there (`penstock why` says for what).

        Prompts are taken from ``input_ids`` with ``attention_mask``, else from ``raw_prompt_ids``, else from
        ``raw_prompt`` (chat messages, or text). Rows of one ``uid`` with the same prompt are one group. A reward is
        given ``reward_model["ground_truth"]`` as its label, and ``data_source``, ``extra_info`` and ``index`` as
        metadata. ``meta_info["validate"]`` true: the prompts go to lane eval, where greedy sampling is allowed, and
        are drawn as ``rollout.eval_sampling`` says.

        Raises:
            ConfigError: the prompts are in none of these forms, hold images or the like, or are longer than
                ``prompt_length``; ``meta_info["temperature"]`` is not :attr:`temperature`; the workers drew at
                another one.
            ProtocolError: a prompt was given up by the workers, with the reason.
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
        """The engines' log-probabilities of given responses, by scoring jobs. Blocks until all are there.

        Takes ``input_ids``, ``attention_mask`` and ``responses`` of any rows. Returns ``old_log_probs`` [B, R] float32
        (0 on padding) and the column ``scored_version`` (-1: the weights that the engine started with). Observations
        are scored too; ``response_mask`` says what bears loss.

        Raises:
            ConfigError: ``meta_info["temperature"]`` is not 1, at which scores are taken.
            ScoreError: the engine refuses a sequence.
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
        """What is asked, and the rows that each answers."""
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
                    f"meta_info names temperature {named:g}, but this VerlRollout draws at {self.temperature:g}: give "
                    "VerlRollout(temperature=...) that of actor_rollout_ref.rollout."
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
    """This rank's share of a batch for a verl trainer that penstock feeds: as above, and ``advantages`` [B, R].

    Lost samples are left out, and tokens that are too old have response mask 0. ``uid`` is the job.

    Args:
        processor: ``verl.utils.hf_processor`` of a model that sees images: positions and images are then as verl has
            them for such a model (inside_verl/images.py), also of prompts without any.
        temperature: ``actor_rollout_ref.rollout.temperature``, which the batch must have been drawn at; None takes the
            batch's, as ``meta_info["temperature"]``.

    Raises:
        ConfigError: the batch was drawn at another temperature, or at several, or with logprobs from before it (T6);
            or from prompts with images, and the processor is none for them.
        ProtocolError: a sample is too long.
        PayloadError: images are gone, or are not what was committed.
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
    """Samples as verl has them; see the head of this file. Raises ProtocolError for one that is too long."""
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
        # As verl counts them: from 0 at the first token; the last one goes on through the padding.
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
    """[B, width], padded on the right."""
    out = torch.full((len(parts), width), blank, dtype=dtype)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = torch.from_numpy(np.ascontiguousarray(part)).to(dtype)
    return out


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    column: NDArray[np.object_] = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def label_of(columns: Mapping[str, Any], place: int) -> Any:
    """``reward_model["ground_truth"]`` of a row, of whatever type; None where there is none."""
    reward_model = columns["reward_model"][place] if "reward_model" in columns else {}
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
