"""A cause of a wait (I8): a record with typed fields and the text that shows it.

    edge    another part has to act first: ``part`` names it, and `penstock why` follows it
    end     a person has to act; ``action`` says how
    work    something runs, or passes by itself

In Redis a cause is its name and a map of its fields. Free text is for quoted errors alone (``error``). A text continues
"has waited 9 s for ..."; it is rendered where it is read.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from string import Formatter
from typing import Any, ClassVar, dataclass_transform

from penstock.records.disposal import Disposal
from penstock.text import redact, utf8_safe

#: Most characters of a text of a cause, of its name, and most entries of its lists and maps.
MAX_TEXT, MAX_NAME, MAX_ENTRIES = 4000, 100, 64


class Kind(StrEnum):
    """How `penstock why` continues at a cause."""

    EDGE = "edge"
    END = "end"
    WORK = "work"


EDGE, END, WORK = Kind


class About(StrEnum):
    """Causes of a worker that `penstock why` looks for among its others."""

    #: The engine does not serve: a job that engines died of may be the reason.
    ENGINE_DOWN = "engine_down"
    #: An engine refuses a version of the weights.
    REFUSAL = "refusal"
    #: Samples that run do not advance.
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run: trainer, buffer, producer, worker, queue or redis. Name '' is any of the kind."""

    kind: str
    name: str = ""


@dataclass_transform(frozen_default=True)
class Cause:
    """Base of all causes. Subclasses are frozen dataclasses, whose name is that of the class in snake case.

    Arguments of a subclass:
        part: the kind of part that it is about; for an edge the one that is waited for.
        named_by: the field with the name of that part; or with its kind, where ``part`` is ''.
        subject: fields that tell two causes of one name apart; the clock of a wait restarts when they change.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    subject: ClassVar[tuple[str, ...]]
    about: ClassVar[About | None]
    #: Formatted with the fields and properties; a part in brackets is left out if a value in it is empty. A cause that
    #: needs more overrides ``words``.
    text: ClassVar[str] = ""
    #: The action that a person takes.
    action: ClassVar[str] = ""
    _part: ClassVar[str]
    _named_by: ClassVar[str]

    def __init_subclass__(
        cls, *, kind: Kind, part: str = "", named_by: str = "", subject: str = "", about: About | None = None
    ) -> None:
        dataclass(frozen=True)(cls)
        if "name" not in vars(cls):
            cls.name = snake_case(cls.__name__)
        cls.kind, cls.subject, cls.about, cls._part, cls._named_by = kind, tuple(subject.split()), about, part, named_by

    @property
    def part(self) -> Part | None:
        """Return the part that it is about; None: none is named."""
        named = getattr(self, self._named_by) if self._named_by else ""
        return Part(self._part, named) if self._part else Part(named) if named else None

    @property
    def key(self) -> tuple[Any, ...]:
        """Return its name and subject: the clock of a wait belongs to them."""
        return self.name, *(getattr(self, name) for name in self.subject)

    def fields(self) -> dict[str, Any]:
        """Return its fields as plain values, bounded, with secrets masked."""
        return {name: plain(getattr(self, name)) for name in field_names(type(self))}

    def words(self) -> str:
        """Render the cause without its action."""
        return self._format(self.text)

    def __str__(self) -> str:
        action = self._format(self.action)
        return f"{self.words()}{action and f'; {action}'}"

    def _format(self, template: str) -> str:
        def has_all(part: re.Match[str]) -> str:
            return "" if any(_is_empty(getattr(self, name)) for name in _names_in(part[1])) else part[1]

        template = _OPTIONAL.sub(has_all, template)
        return template.format(**{name: _shown(name, getattr(self, name)) for name in _names_in(template)})


def snake_case(name: str) -> str:
    """Convert the name of a class."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


_OPTIONAL = re.compile(r"\[([^]]*)\]")


def _names_in(template: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(template) if name]


def _is_empty(value: Any) -> bool:
    return value is None or (not value and not isinstance(value, float))


def _shown(name: str, value: Any) -> Any:
    if name == "error":
        return value.rstrip(".")
    if isinstance(value, Mapping):
        return ledger(value)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value


def field_names(cause: type[Cause]) -> list[str]:
    """Return the names of a cause's fields, in order."""
    return [one.name for one in dataclasses.fields(cause)]  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """Return a value of a field as plain values, bounded, with secrets masked."""
    if isinstance(value, str):
        return utf8_safe(redact(value), MAX_TEXT)
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in list(value.items())[:MAX_ENTRIES]}
    return [plain(one) for one in value[:MAX_ENTRIES]] if isinstance(value, list | tuple) else value


#: Explanations of reasons in the ledger of drops.
_MEANINGS: dict[str, str] = {
    Disposal.NO_LOSS: "no_loss (none of their tokens bears loss)",
    "filter/no_loss": "filter/no_loss (none of their tokens bears loss)",
    Disposal.PAYLOAD_LOST: "payload_lost (their payloads are gone)",
}


def ledger(dropped: Mapping[str, int], most: int = 4) -> str:
    """Render the ledger of drops, largest first: ``filter/zero_std_0.0 12, stale 3``; '' where nothing was dropped."""
    largest = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{_MEANINGS.get(reason, reason)} {count}" for reason, count in largest[:most]]
    if more := sum(count for _, count in largest[most:]):
        words.append(f"others {more}")
    return ", ".join(words)


class Unknown(Cause, kind=WORK, subject="cause"):
    """A cause of another version of penstock."""

    cause: str
    values: Mapping[str, Any]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.cause

    def fields(self) -> dict[str, Any]:
        return dict(self.values)

    def words(self) -> str:
        text = ", ".join(f"{key} {value}" for key, value in self.values.items())
        return utf8_safe(" ".join(f"{self.cause} ({text})".split()), MAX_TEXT)
