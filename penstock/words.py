"""Texts of others (a user's code, an engine, a library) as something that can be written anywhere.

What a user's exception says may hold lone surrogates, which no record, stream or terminal takes, or may itself raise.
Such texts are made writable where they enter.
"""

import traceback
from typing import Any

#: Most characters of an exception's own text, and of a traceback; of both the beginning and the end are kept.
MAX_SAID = 4_000
MAX_TRACE = 32_000


def writable(text: str, most: int | None = None) -> str:
    """``text`` as UTF-8 can hold it: lone surrogates are escaped; of what is longer than ``most`` the middle goes."""
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]} ... {text[-(most // 2) :]}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def shown(value: object, most: int = 80) -> str:
    """``repr`` of anything, cut to ``most`` characters; its type where it cannot be shown."""
    try:
        return writable(repr(value)[:most])
    except BaseException:
        return f"<{type(value).__name__} that cannot be shown>"


def said(exc: BaseException) -> str:
    """``TypeName: text`` of an exception, whatever its ``__str__`` does."""
    try:
        text = str(exc)
    except BaseException:
        text = "<its text cannot be shown>"
    return writable(f"{type(exc).__name__}: {text}", MAX_SAID)


def trace_of(exc: BaseException) -> str:
    """The traceback of an exception, with those that caused it."""
    try:
        text = "".join(traceback.format_exception(exc)).strip()
    except BaseException:
        text = said(exc)
    return writable(text, MAX_TRACE)


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` as something that msgpack and JSON carry: arrays as lists, what is unknown as text. Never raises.

    Integers beyond 64 bits and what is nested deeper than ``MAX_DEPTH`` become text.
    """
    try:
        return _plain(value, depth)
    except BaseException:
        return f"<{type(value).__name__} that cannot be read>"


#: Deepest nesting of what a reward gives beside its number; a cyclic value ends here.
MAX_DEPTH = 16


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else shown(value, 1000)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return writable(str.__str__(value))
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {_key(key): plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, depth + 1) for entry in value]
    if callable(tolist := getattr(value, "tolist", None)):
        return plain(tolist(), depth + 1)
    return shown(value, 1000)


def _key(key: Any) -> str:
    return writable(str.__str__(key)) if isinstance(key, str) else writable(str(key))
