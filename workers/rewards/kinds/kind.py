"""What a reward by name is, and how one is asked."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.workers.rewards.kinds.box import last_box
from penstock.workers.rewards.kinds.question import Question


def _no_reading(label: str) -> None:
    """Nothing of a label is read beforehand."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A reward by name: pure but for ``random``, and it imports nothing that a question names."""

    #: A number, or a dict whose ``score`` is the number. ValueError where the label is not one for this reward, or
    #: longer than what is quick reads of one.
    #: Called with a question; where ``needs_jail``, with the workshop (code.py) too.
    judge: Callable[..., Any]
    #: It may take long, or hang: it runs in a process with a limit of CPU time, where Python is not asked. What is not
    #: slow takes time by the length of the answer alone, and runs in the worker's event loop.
    is_slow: bool = False
    #: Of one that is slow: does for a label what all its answers share, at the expense of no answer. ValueError where
    #: the label cannot be read.
    read_label: Callable[[str], object] = _no_reading
    #: What ``boxed_NAME`` is given in place of the answer: the content of the last box, as this one expects a result.
    boxed: str = "{}"
    #: What it imports, of an extra.
    package: str = ""
    #: Imports that in a way of its own; None: by its name.
    load: Callable[[], None] | None = None
    #: It reads the metadata of a question too.
    reads_metadata: bool = False
    #: It runs what an answer wrote.
    needs_jail: bool = False

    def of_box(self) -> "Kind":
        """The same reward for what is in the last box of an answer; of '' where there is none."""

        def judge(question: Question, *more: Any) -> Any:
            content = last_box(question.text)
            # No template: the content may have braces.
            text = "" if content is None else self.boxed.replace("{}", content, 1)
            return self.judge(replace(question, text=text), *more)

        return replace(self, judge=judge)
