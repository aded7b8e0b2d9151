"""Prompts of a run: files read whole, lines addressed by number, an order that is a function of seed and position."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import parse_path
from penstock.errors import ConfigError
from penstock.names import check_name
from penstock.protocol.records.job import Job
from producer.lines import check_writable, read_lines

#: Renders chat messages to a prompt.
Template = Callable[[list[dict[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a dataset."""

    #: Line or row number in the file, from 0; part of the job's id.
    index: int
    text: str | None
    ids: list[int] | None
    #: Any JSON value.
    label: Any
    metadata: dict[str, Any]
    #: Given answers: text or token ids.
    answers: list[Any] = field(default_factory=list)

    @property
    def digest(self) -> bytes:
        """Of the prompt alone: equal prompts have equal digests (T18)."""
        content = self.text if self.text is not None else json.dumps(self.ids)
        return hashlib.blake2b(content.encode(), digest_size=12).digest()


class Dataset:
    """One file of prompts.

    Args:
        template: renders chat messages; needed where prompts are lists of messages.

    Raises:
        ConfigError: the file is not there, a line cannot be read (its number is given), or it has no line.
    """

    def __init__(self, config: DatasetConfig, template: Template | None = None) -> None:
        check_name("dataset", config.name)
        self.config = config
        self._template = template
        path, first, last = parse_path(config.path)
        if not path.is_file():
            raise ConfigError(f"dataset {config.name}: there is no file {path}; correct its path.")
        rows = read_lines(path, config)
        self.prompts = [self._prompt(i, row) for i, row in enumerate(rows) if first <= i < last]
        if not self.prompts:
            raise ConfigError(f"dataset {config.name}: {config.path} holds no prompt.")

    def __len__(self) -> int:
        return len(self.prompts)

    def _prompt(self, index: int, row: dict[str, Any]) -> Prompt:
        config = self.config
        where = f"dataset {config.name}, line {index + 1}"
        if config.input_key not in row:
            raise ConfigError(f"{where}: there is no {config.input_key!r}; set the dataset's input_key.")
        text, ids = self._render(row[config.input_key], where)
        label = self._label(row, where)
        metadata = row.get(config.metadata_key) if config.metadata_key else None
        if metadata is not None and not isinstance(metadata, dict):
            raise ConfigError(f"{where}: {config.metadata_key!r} is not a map.")
        answers = self._answers(row, where)
        check_writable([text, ids, label, metadata, answers], where)
        return Prompt(index, text, ids, label, metadata or {}, answers)

    def _label(self, row: dict[str, Any], where: str) -> Any:
        """The label as the file has it; '' where the configuration says that there is none."""
        key = self.config.label_key
        if key is None:
            return ""
        if row.get(key) is None:
            raise ConfigError(
                f"{where}: {'its' if key in row else 'there is no'} {key!r}{' is null' if key in row else ''}; set the "
                "dataset's label_key, or `label_key: null` where the reward needs none."
            )
        label = row[key]
        try:
            json.dumps(label)
        except RecursionError:
            pass  # reported below, as of the whole line
        except TypeError as exc:
            raise ConfigError(
                f"{where}: its {key!r} is not a label: it holds what JSON cannot represent ({exc})."
            ) from exc
        return label

    def _answers(self, row: dict[str, Any], where: str) -> list[Any]:
        key = self.config.answer_key
        if key is None:
            return []
        if key not in row:
            raise ConfigError(f"{where}: there is no {key!r}; set the dataset's answer_key, or give null for none.")
        value = row[key] if row[key] is not None else []
        answers = [value] if isinstance(value, str) or _is_ids(value) else value
        if not isinstance(answers, list) or not all(isinstance(one, str) or _is_ids(one) for one in answers):
            raise ConfigError(f"{where}: {key!r} is not an answer: give text, a list of token ids, or a list of those.")
        return answers

    def _render(self, value: Any, where: str) -> tuple[str | None, list[int] | None]:
        if isinstance(value, str):
            if not self.config.apply_chat_template:
                return value, None
            value = [{"role": "user", "content": value}]
        if _is_ids(value):
            return None, value
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            if self._template is None:
                raise ConfigError(f"{where}: chat messages need apply_chat_template: true for this dataset.")
            try:
                return self._template(value), None
            except Exception as exc:  # a template may raise anything
                raise ConfigError(f"{where}: the model's chat template refuses these messages ({exc}).") from exc
        raise ConfigError(f"{where}: a prompt is text, a list of messages or a list of token ids.")

    def job(self, prompt: Prompt, epoch: int, *, n: int, lane: str, sampling: dict[str, Any]) -> Job:
        """The job of a prompt; its id is a function of dataset, epoch and line."""
        config = self.config
        return Job(
            id=f"{config.name}/{epoch}/{prompt.index}",
            n=config.n or n,
            prompt=prompt.text,
            prompt_ids=prompt.ids,
            label=prompt.label if isinstance(prompt.label, str) else json.dumps(prompt.label, ensure_ascii=False),
            label_value=None if isinstance(prompt.label, str) else prompt.label,
            metadata=prompt.metadata,
            sampling={**sampling, **config.sampling},
            lane=lane,
            reward=config.reward,
            environment=config.environment,
            answers=prompt.answers,
        )


class Mixture:
    """Several datasets as one endless sequence: position -> (dataset, epoch, prompt).

    Epoch e is a permutation by (seed, e) over all lines, the shuffled datasets' at least; so a position alone says
    which prompt comes next, after any crash.
    """

    def __init__(self, datasets: Sequence[Dataset], seed: int) -> None:
        self.datasets = list(datasets)
        self._seed = seed
        self._lines = [(d, i) for d, dataset in enumerate(self.datasets) for i in range(len(dataset))]
        self._shuffle = any(dataset.config.shuffle for dataset in self.datasets)
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        """Lines of one epoch."""
        return len(self._lines)

    def at(self, position: int) -> tuple[Dataset, int, Prompt]:
        epoch, offset = divmod(position, len(self._lines))
        d, line = self._lines[int(self._order(epoch)[offset])]
        dataset = self.datasets[d]
        return dataset, epoch, dataset.prompts[line]

    def _order_of(self, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if not self._shuffle:
            return np.arange(len(self._lines))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._lines))

    def fingerprint(self, held_out: Sequence[Dataset] = ()) -> str:
        """Changes whenever a position would mean another job, in training or in an evaluation."""
        digest = hashlib.blake2b(digest_size=12)
        digest.update(json.dumps([self._seed, self._shuffle, len(self.datasets)]).encode())
        for dataset in (*self.datasets, *held_out):
            digest.update(f"{dataset.config.name}\0{len(dataset)}\0".encode())
            for prompt in dataset.prompts:
                digest.update(b"%d\0" % prompt.index + prompt.digest)
                if prompt.answers:
                    digest.update(json.dumps(prompt.answers).encode())
        return digest.hexdigest()


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def check_overlap(train: Sequence[Dataset], held_out: Sequence[Dataset]) -> None:
    """T18: raise ConfigError when a held-out prompt is trained on."""
    seen = {prompt.digest for dataset in train for prompt in dataset.prompts}
    for dataset in held_out:
        both = [prompt.index + 1 for prompt in dataset.prompts if prompt.digest in seen]
        if both:
            raise ConfigError(
                f"dataset {dataset.config.name}: {len(both)} of its prompts are trained on too (line {both[0]} is the "
                "first): take them out of one of the files, or its accuracy means nothing."
            )
