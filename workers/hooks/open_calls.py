"""What a worker has asked of others and not heard of yet: services over HTTP, code of the user's. It becomes waits.

Whoever works for others makes ``OpenCalls`` and ``hears`` around that work; what is asked inside, however deep, is
noted in it. Where nobody hears, nothing is noted.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from penstock.protocol.records.causes import CodeCalled, ServiceCalled

Call = CodeCalled | ServiceCalled


@dataclass(frozen=True, slots=True)
class OpenCall:
    """What one kind of question waits for."""

    #: The oldest one, how many more there are, and how the last try failed.
    cause: Call
    #: When the oldest was asked (Unix time).
    since_s: float


class OpenCalls:
    """Open questions of one worker, by kind. Of an event loop; none of its methods blocks."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        #: Kind -> question -> what was called, and when (Unix time).
        self._open: dict[str, dict[int, tuple[Call, float]]] = {}
        #: Kind -> how its last try failed.
        self._troubles: dict[str, str] = {}

    @contextmanager
    def hears(self) -> Iterator[None]:
        """What is asked inside of the ``with``, and in tasks that are made there, is noted here."""
        token = _hearing.set(self)
        try:
            yield
        finally:
            _hearing.reset(token)

    @contextmanager
    def of(self, kind: str, call: Call) -> Iterator[None]:
        """A question is open inside of the ``with``."""
        serial, questions = next(self._serial), self._open.setdefault(kind, {})
        questions[serial] = call, time.time()
        try:
            yield
        finally:
            questions.pop(serial, None)

    def fail(self, kind: str, trouble: str) -> None:
        """A try of a question failed, or '': one was answered."""
        self._troubles[kind] = trouble

    def open(self) -> Mapping[str, OpenCall | None]:
        """Every kind that was ever asked; None where nothing is open."""
        return {kind: self._oldest(kind, questions) for kind, questions in self._open.items()}

    def _oldest(self, kind: str, questions: Mapping[int, tuple[Call, float]]) -> OpenCall | None:
        if not questions:
            return None
        call, since_s = next(iter(questions.values()))
        return OpenCall(replace(call, more=len(questions) - 1, error=self._troubles.get(kind, "")), since_s)


#: Kind of what a user's code was called for, and rewards of our own in processes of theirs.
CODE = "code"

_hearing: ContextVar[OpenCalls | None] = ContextVar("penstock_open_calls", default=None)


@contextmanager
def calling(kind: str, call: Call) -> Iterator[None]:
    """A question is open inside of the ``with``, for whoever hears.

    Args:
        kind: what questions are counted together, of few: a key of the configuration, say.
        call: what is called.
    """
    asked = _hearing.get()
    if asked is None:
        yield
        return
    with asked.of(kind, call):
        yield


def note_trouble(kind: str, trouble: str) -> None:
    """A try of such a question failed, and how; '': one was answered."""
    if (asked := _hearing.get()) is not None:
        asked.fail(kind, trouble)
