"""Errors of a configuration: one sentence per key that says what to do."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from penstock.config.reading.declared import nearest
from penstock.config.reading.key_hints import hint as hint_of
from penstock.config.reading.nested import Key
from penstock.config.reading.validation_errors import explain
from penstock.redaction import redact
from penstock.text import safe_repr, utf8_safe


def sentences(exc: ValidationError, where: dict[Key, str], path: str) -> Iterator[str]:
    """Yield a sentence for each key that was refused.

    Args:
        where: source of each key.
        path: the YAML file, for keys without a source.
    """
    seen: set[str] = set()
    for error in exc.errors(include_url=False):
        key = tuple(str(part) for part in error["loc"])
        source = where.get(key)
        if key[-1:] == ("[key]",):  # the name of an entry of a map
            source, key = where.get(key[:-1]), key[:-2]
        sentence = _sentence(key, error, source or _source(key, error, where, path))
        # A union reports each of its members; the first is enough.
        if ".".join(_declared(key)) not in seen:
            seen.add(".".join(_declared(key)))
            yield sentence


def _source(key: Key, error: Any, where: dict[Key, str], path: str) -> str:
    """Return the source of the key that made a section invalid: of the keys in the sentence, the last setting."""
    under = {at: source for at, source in where.items() if at[: len(key)] == key}
    said = str(error.get("ctx", {}).get("error", ""))
    named = [source for at, source in under.items() if re.search(rf"\b{re.escape(at[-1])}\b", said)]
    later = [source for source in named if source != path]
    return next(iter(later or named or (under.values() if key else ())), path)


def _declared(key: Key) -> Key:
    return tuple(part for part in key if part.isidentifier() or part.isdigit())


def _sentence(key: Key, error: Any, source: str) -> str:
    name = ".".join(key)
    match error["type"]:
        case "extra_forbidden":
            near = nearest(key)
            hint = hint_of(key[-1]) or (f"did you mean {near}?" if near else "remove it.")
            return f"{name} ({source}): there is no such key; {hint}"
        case "missing":
            return f"{name} is missing in {source}; set it."
        case "value_error":
            text = explain(error).rstrip(".")
            end = "" if text.endswith("?") else "."
            return f"{name} ({source}): {text}{end}" if name else f"{text} ({source})."
        case "list_type" if isinstance(error["input"], str | int | float | dict) and key[:1] != ("redis",):
            return f"{name} ({source}): it should be a list: write {_shown([error['input']])}."
    is_secret = key[:1] == ("redis",) or "env" in key
    return f"{name} ({source}): {explain(error, '' if is_secret else _shown(error['input']))}."


def _shown(value: Any) -> str:
    try:
        text = redact(json.dumps(value, default=str))
    except (TypeError, ValueError, RecursionError):  # a map whose keys are dates, say
        text = redact(safe_repr(value))
    return utf8_safe(text, 60)
