"""Lookup of the keys that the models of the configuration declare."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from penstock.config import Config
from penstock.config.reading.nested import Key

#: Most characters of a key that is compared with the known ones, which takes time by its length.
_LONGEST = 128


def annotation(key: Key) -> Any:
    """Return the type that the model declares at ``key``; Any if it declares none."""
    at: Any = Config
    for part in key:
        if get_origin(at) is not list and (section := _section(at)) is not None:
            field = section.model_fields.get(part)
            if field is None:
                return Any
            at = field.annotation
        elif get_origin(at) is dict:
            at = get_args(at)[1]
        elif get_origin(at) is list and part.isdigit():
            at = get_args(at)[0]
        else:
            return Any
    return at


def section_at(key: Key) -> type[BaseModel] | None:
    """Return the section that is, or may be, at ``key``; None if it is not a section."""
    return _section(annotation(key))


def wants_text(annotation: Any) -> bool:
    """Return whether a type accepts unparsed text."""
    return annotation in (str, Path) or any(wants_text(part) for part in get_args(annotation))


def nearest(key: Key) -> str | None:
    """Return the declared key that was probably meant, in dots; None for a key that is too long."""
    if sum(map(len, key)) > _LONGEST:
        return None
    if close := _close(key, 0.75):
        return close
    known = list(_all_keys(Config))
    # The same name in another section: preferably of the same top-level section.
    same = sorted((path for path in known if path[-1] == key[-1]), key=lambda path: path[:1] != key[:1])
    if same:
        return ".".join(same[0])
    if any(part.isdigit() for part in key[:-1]):
        return _close(key, 0.6)  # such long keys are similar because of their common beginning
    return next(iter(difflib.get_close_matches(".".join(key), map(".".join, known), n=1)), None)


def _close(key: Key, cutoff: float) -> str | None:
    """Return the key of the same section with a similar spelling."""
    section = section_at(key[:-1])
    if section is not None:
        close = difflib.get_close_matches(key[-1], section.model_fields, n=1, cutoff=cutoff)
        if close:
            return ".".join((*key[:-1], close[0]))
    return None


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a type; None if it has none."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _all_keys(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Yield keys and sections, and those of the first entry of a list of sections."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        if (section := _section(field.annotation)) is not None:
            place = ("0",) if get_origin(field.annotation) is list else ()
            yield from _all_keys(section, (*prefix, name, *place))
