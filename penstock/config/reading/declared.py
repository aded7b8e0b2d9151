"""Which keys the models of the configuration declare."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from penstock.config import Config
from penstock.config.reading.nested import Key

#: Most characters of a key that is looked for among the known ones; that takes the more time, the longer it is.
_LONGEST = 128


def annotation(key: Key) -> Any:
    """Type that the model declares at ``key``; Any where it declares none."""
    at: Any = Config
    for part in key:
        if isinstance(at, type) and issubclass(at, BaseModel):
            field = at.model_fields.get(part)
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


def wants_text(annotation: Any) -> bool:
    """Whether a type takes text as it stands."""
    return annotation in (str, Path) or any(wants_text(part) for part in get_args(annotation))


def nearest(key: Key) -> str | None:
    """The declared key that was probably meant, in dots; None for what is longer than any."""
    if sum(map(len, key)) > _LONGEST:
        return None
    if close := _close(key):
        return close
    known = [".".join(path) for path in _all_keys(Config)]
    same = [path for path in known if path.rsplit(".", 1)[-1] == key[-1]]
    return next(iter(same or difflib.get_close_matches(".".join(key), known, n=1)), None)


def _close(key: Key) -> str | None:
    """The key of the same section that is spelt nearly so."""
    section = annotation(key[:-1])
    if isinstance(section, type) and issubclass(section, BaseModel):
        close = difflib.get_close_matches(key[-1], section.model_fields, n=1, cutoff=0.75)
        if close:
            return ".".join((*key[:-1], close[0]))
    return None


def _all_keys(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        at = field.annotation
        if isinstance(at, type) and issubclass(at, BaseModel):
            yield from _all_keys(at, (*prefix, name))
        else:
            yield (*prefix, name)
