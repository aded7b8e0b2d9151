"""The definition of a built-in reward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.records.sample import Sample
from penstock.workers.rewards.kinds.boxed import last_box


@dataclass(frozen=True, slots=True)
class Case:
    #: Text on stdin; '' if a function is called.
    stdin: str = ""
    #: Name and arguments of the function; '': the program runs by itself.
    function: str = ""
    arguments: tuple[Any, ...] = ()
    #: Source of that function, if the test defines it; it is appended to the program.
    asking: str = ""
    #: Expected text on stdout, or return value; any of them is right.
    expected: tuple[Any, ...] = ()


#: Longest label, with all texts that count as one, that is read in the worker's event loop, in characters.
MAX_LABEL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Question:
    """The fields of a sample that built-in rewards see; sent as JSON to the processes that check."""

    text: str
    #: The label as text; another type as JSON.
    label: str = ""
    #: The label as the dataset has it: text, or a number, list or map.
    raw_label: Any = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: Sample) -> "Question":
        return cls(sample.text, sample.job.label, sample.job.raw_label, sample.job.metadata)


def check_label(name: str, texts: Iterable[str], most: int = MAX_LABEL) -> None:
    """Raise ValueError if the texts that reward ``name`` compares answers with have more than ``most`` characters,
    each counted as one more."""
    if (count := sum(len(text) + 1 for text in texts)) > most:
        raise ValueError(
            f"reward {name}: the label has {count:,} characters, and at most {most:,} are read: shorten it"
        )


def _no_reading(label: str) -> None:
    """Read nothing of a label beforehand."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A built-in reward: pure except for ``random``, and it imports nothing that a question names."""

    #: Returns a number, or a dict whose ``score`` is the number. ValueError if the label is invalid for this reward, or
    #: longer than a quick reward reads.
    #: Called with a question; and with the workshop (code.py) if ``needs_jail``.
    judge: Callable[..., Any]
    #: It may take long, or hang: it runs in a process with a CPU time limit set by the kernel. A reward that is not
    #: slow takes time linear in the answer, and runs in the worker's event loop.
    is_slow: bool = False
    #: For slow rewards: parses the label once for all answers, at no answer's expense. ValueError if the label cannot
    #: be parsed.
    read_label: Callable[[str], object] = _no_reading
    #: Template of the text that ``boxed_NAME`` reads instead of the answer, around the content of the last box.
    boxed: str = "{}"
    #: Package of an extra that it imports.
    package: str = ""
    #: Imports the package in its own way; None: by its name.
    load: Callable[[], None] | None = None
    #: Whether it reads the metadata of a question.
    reads_metadata: bool = False
    #: Whether it runs code of an answer.
    needs_jail: bool = False

    def of_box(self) -> "Kind":
        """Return the same reward for the content of an answer's last box, '' if it has none."""

        def judge(question: Question, *more: Any) -> Any:
            content = last_box(question.text)
            # No template: the content may have braces.
            text = "" if content is None else self.boxed.replace("{}", content, 1)
            return self.judge(replace(question, text=text), *more)

        return replace(self, judge=judge)
