"""T18: no held-out prompt is trained on."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.prompt import Prompt
from penstock.producer.sources.rows import BadLine

#: Most training prompts that are checked at a start, for an early error; all others are checked
#: when they are taken.
MAX_EARLY_LINES = 20_000
MAX_EARLY_BYTES = 64 * 1024 * 1024


class HeldOut:
    """The prompts of the held-out sets, by digest. Blocks for reading them.

    Raises:
        ConfigError: one of them cannot be read.
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        #: (dataset, line in its slice) of each, without skipped ones.
        self.lines: list[tuple[Dataset, int]] = []
        #: Number of skipped prompts by dataset.
        self.passed: Counter[str] = Counter()
        self._where: dict[bytes, tuple[str, int]] = {}
        for dataset in datasets:
            self._take_in(dataset)

    def _take_in(self, dataset: Dataset) -> None:
        for prompt in dataset:
            self.lines.append((dataset, prompt.index - dataset.first))
            self._where[prompt.digest] = dataset.config.name, prompt.index + 1
        if passed := len(dataset) - sum(one is dataset for one, _ in self.lines):
            self.passed[dataset.config.name] = passed

    def check(self, dataset: Dataset, prompt: Prompt) -> None:
        """Raise BadLine if a training prompt is held out."""
        if found := self._where.get(prompt.digest):
            name, line = found
            raise BadLine(
                f"dataset {dataset.config.name}, line {prompt.index + 1}: this prompt is held out, as line {line} of "
                f"dataset {name}: take it out of one of the files, or its accuracy means nothing (or set on_bad_line: "
                "skip, which passes it over)."
            )


def is_small(datasets: Iterable[Dataset], lines: int = MAX_EARLY_LINES) -> bool:
    """Return whether all of it can be checked at a start."""
    some = list(datasets)
    if any(one.stream is not None for one in some):
        return False
    return sum(map(len, some)) <= lines and sum(one.rows.num_bytes for one in some) <= MAX_EARLY_BYTES


def check_overlap(
    train: Sequence[Dataset],
    held_out: Sequence[Dataset],
    look: Callable[[Dataset, Prompt], None] = lambda dataset, prompt: None,
) -> None:
    """Raise ConfigError if a row has no prompt, or a held-out prompt is trained on. Blocks for reading each.

    Args:
        look: called with each prompt.
    """

    def looked(dataset: Dataset) -> Iterator[Prompt]:
        for prompt in dataset:
            look(dataset, prompt)
            yield prompt

    seen = {prompt.digest for dataset in train for prompt in looked(dataset) if dataset.config.on_bad_line == "error"}
    for dataset in held_out:
        both = [prompt.index + 1 for prompt in looked(dataset) if prompt.digest in seen]
        if both:
            raise ConfigError(
                f"dataset {dataset.config.name}: {len(both)} of its prompts are trained on too (line {both[0]} is the "
                "first): take them out of one of the files, or its accuracy means nothing."
            )
