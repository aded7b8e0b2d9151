"""Ensure that no held-out prompt is trained on (T18)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.prompt import Prompt
from penstock.producer.sources.rows import BadLine

#: Limits up to which all training prompts are checked at startup; larger datasets are checked while jobs are made.
MAX_EARLY_LINES = 20_000
MAX_EARLY_BYTES = 64 * 1024 * 1024


class HeldOut:
    """Index the prompts of the held-out datasets by digest. Blocks for reading them.

    Raises:
        ConfigError: a dataset cannot be read.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        #: (dataset, line in its slice) of each prompt, without skipped ones.
        self.lines: list[tuple[Dataset, int]] = []
        #: Dataset -> number of skipped prompts.
        self.skipped: Counter[str] = Counter()
        #: Digest -> (dataset, line from 1).
        self._lines_by_digest: dict[bytes, tuple[str, int]] = {}
        for dataset in datasets:
            self._add(dataset)

    def _add(self, dataset: Dataset) -> None:
        for prompt in dataset:
            self.lines.append((dataset, prompt.index - dataset.first))
            self._lines_by_digest[prompt.digest] = dataset.config.name, prompt.index + 1
        if skipped := len(dataset) - sum(one is dataset for one, _ in self.lines):
            self.skipped[dataset.config.name] = skipped

    def check(self, dataset: Dataset, prompt: Prompt) -> None:
        """Raise BadLine if a training prompt is also in a held-out dataset."""
        if found := self._lines_by_digest.get(prompt.digest):
            name, line = found
            raise BadLine(
                f"dataset {dataset.config.name}, line {prompt.index + 1}: this prompt is held out, as line {line} of "
                f"dataset {name}: remove it from one of the files, or its accuracy is meaningless (or set on_bad_line: "
                "skip to skip it)."
            )


def is_small(datasets: Iterable[Dataset], lines: int = MAX_EARLY_LINES) -> bool:
    """Return whether the datasets are small enough to be checked completely at startup."""
    some = list(datasets)
    if any(one.stream is not None for one in some):
        return False
    return sum(map(len, some)) <= lines and sum(one.rows.num_bytes for one in some) <= MAX_EARLY_BYTES


def check_overlap(
    train: Sequence[Dataset],
    held_out: Sequence[Dataset],
    on_prompt: Callable[[Dataset, Prompt], None] = lambda dataset, prompt: None,
) -> None:
    """Raise ConfigError if a row has no prompt, or a held-out prompt is trained on. Blocks for reading all rows.

    Args:
        on_prompt: called with each prompt.
    """

    def prompts_of(dataset: Dataset) -> Iterator[Prompt]:
        for prompt in dataset:
            on_prompt(dataset, prompt)
            yield prompt

    seen = {
        prompt.digest for dataset in train for prompt in prompts_of(dataset) if dataset.config.on_bad_line == "error"
    }
    for dataset in held_out:
        both = [prompt.index + 1 for prompt in prompts_of(dataset) if prompt.digest in seen]
        if both:
            raise ConfigError(
                f"dataset {dataset.config.name}: {len(both)} of its prompts are also trained on (line {both[0]} is the "
                "first): remove them from one of the files, or its accuracy is meaningless."
            )
