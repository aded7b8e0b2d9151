"""Read the prompts of one dataset: an index of rows, each made a prompt when it is used."""

import json
from collections.abc import Iterator
from typing import Any

from penstock.config import DatasetConfig
from penstock.config.reading.dataset_path import parse_path
from penstock.errors import ConfigError
from penstock.producer.prompt import LongPrompt, Prompt, Template, read_prompt
from penstock.producer.sources.registry import open_rows
from penstock.producer.sources.rows import BadLine
from penstock.producer.sources.stream import Stream
from penstock.records.job import Job

#: Most cached prompts, and their bytes: a job that the closed gate refused is offered again.
_KEPT, _KEPT_BYTES = 256, 32 * 1024 * 1024


class Dataset:
    """Prompts of one source by line number.

    Args:
        template: renders chat messages; needed if prompts are lists of messages.

    Raises:
        ConfigError: the source does not exist, cannot be read, or has no rows.
    """

    def __init__(self, config: DatasetConfig, template: Template | None = None) -> None:
        self.config = config
        self.template = template
        self.rows = open_rows(config)
        _, self.first, last = parse_path(config.path)
        self.stream = self.rows if isinstance(self.rows, Stream) else None
        #: Line after the last one; a stream may end before it.
        self.last = min(last, len(self.rows)) if self.stream is None else last
        self._num_lines = None if self.stream is not None else self.last - self.first
        if not self.holds(0):
            raise ConfigError(f"dataset {config.name}: {config.path} has no prompts; correct its path or slice.")
        #: Line -> prompt, for the last ones read.
        self._kept: dict[int, Prompt] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Return the number of lines in the slice. Raises ConfigError for a stream whose end is not known yet."""
        return len(self.rows) - self.first if self.num_lines is None else self.num_lines

    @property
    def num_lines(self) -> int | None:
        """Return the number of lines in the slice; None for a stream whose end is not known yet."""
        if self._num_lines is None and self.stream is not None and self.stream.num_rows is not None:
            self._num_lines = min(self.last, self.stream.num_rows) - self.first
        return self._num_lines

    def ends_after(self, num_lines: int) -> None:
        """Set the number of lines that another process found at the end of the same stream."""
        self._num_lines = num_lines

    def holds(self, line: int) -> bool:
        """Return whether line ``line``, from 0, exists. Blocks if a stream must be read."""
        if self.num_lines is not None or self.stream is None:
            return line < (self.num_lines or 0)
        if self.first + line < self.last:
            return self.stream.holds(self.first + line)
        if self.stream.holds(self.last - 1):
            self._num_lines = self.last - self.first
        return False

    def pass_of(self, number: int) -> tuple[int, int]:
        """Return the epoch, and the place in it, of prompt ``number`` of all epochs. Blocks like :meth:`holds`."""
        return (0, number) if self.num_lines is None and self.holds(number) else divmod(number, len(self))

    def window_of(self, stream: Stream, line: int) -> tuple[int, int]:
        """Return a stream window's first line and its number of lines in the slice. Blocks like :meth:`holds`."""
        begin = line - line % stream.window
        return begin, min(stream.num_from(self.first + begin), self.last - self.first - begin)

    def __getitem__(self, line: int) -> Prompt:
        """Return prompt ``line`` of the slice, from 0. Blocks for the disk.

        Raises:
            BadLine: the row has no prompt.
            ConfigError: the source can no longer be read.
        """
        if line < 0 or not self.holds(line):
            raise IndexError(line)
        if (kept := self._kept.get(line)) is not None:
            return kept
        prompt = self._kept[line] = self._read(line)
        self._kept_bytes += prompt.num_bytes
        while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept))).num_bytes
        return prompt

    def take(self, line: int) -> Prompt | str:
        """Return ``self[line]``, or the error as text if the row is skipped."""
        try:
            return self[line]
        except BadLine as exc:
            return self.skip(exc)

    def skip(self, exc: BadLine) -> str:
        """Return the error as text if such rows are skipped; else raise it."""
        policy = self.config.on_long_prompt if isinstance(exc, LongPrompt) else self.config.on_bad_line
        if policy == "error":
            raise exc
        return str(exc)

    def __iter__(self) -> Iterator[Prompt]:
        """Iterate over all prompts in order, without skipped ones, and without caching them."""
        for line in range(len(self)):
            try:
                yield self._read(line)
            except BadLine as exc:
                self.skip(exc)

    def _read(self, line: int) -> Prompt:
        index = self.first + line
        return read_prompt(self.config, self.template, index, self.rows.row(index))

    def job(self, prompt: Prompt, epoch: int, *, n: int, lane: str, sampling: dict[str, Any]) -> Job:
        """Make a job from a prompt; its id is a function of dataset, epoch and line."""
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
            images=prompt.images,
        )
