"""Hostile input for whatever reads bytes, and the law of it: any bytes give a value or an error of penstock's own.

The same input at every run; small, so that all of it is tried in seconds.
"""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgpack
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError

#: For every property: the same examples everywhere, and no truth that depends on how fast a machine is.
SAME = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

#: What a number, a text or a list may be at its worst; all of it fits into msgpack.
WORST: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**40, -(2**63), 2**63, 2**64 - 1, 0.5, 1e308, float("inf"), float("nan")),
    *("", "x", "0", "inf", "../../x", "x" * 70_000, "\x00", b"", b"\xff", b"x" * 70),
    *([], {}, [[]], [None], [[1, 2]], [[2**40, -(2**40)]], {"x": [[]]}, [2**64 - 1]),
]
#: The same for JSON, which has no bytes, and numbers of any length.
WORST_JSON: list[Any] = [value for value in WORST if not isinstance(value, bytes)] + [10**400, -(10**400), "\ud800"]
#: Headers that claim much, and nesting without an end.
HEADS = [
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"),
    *(b"\xdd\x00\x0f\xff\xff" * 40, b"\x91" * 3000, b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x00\x01", b"\xc1"),
    *(b"[" * 20_000, b'{"":' * 10_000, b"9" * 5000, b"\xff\xfe", b"\x00", b"\xed\xa0\x80"),
]


def near(good: bytes) -> st.SearchStrategy[bytes]:
    """Anything, and ``good`` with some of its bytes changed, left out, or put in."""
    return st.one_of(st.binary(max_size=80), st.sampled_from(HEADS), _changed(good), _packed(_values(WORST)))


def packed_near(good: Any) -> st.SearchStrategy[bytes]:
    """The same for a msgpack record, some of whose values are something else, or are not there."""
    return st.one_of(near(msgpack.packb(good)), _packed(value_near(good, WORST)))


def json_near(good: Any) -> st.SearchStrategy[bytes]:
    """The same for JSON."""
    written = json.dumps(good).encode()
    return st.one_of(near(written), value_near(good, WORST_JSON).map(lambda value: json.dumps(value).encode()))


@st.composite
def value_near(draw: st.DrawFn, good: Any, worst: list[Any] = WORST) -> Any:
    """``good`` with one to three of its inner values at their worst, gone, or of another name."""
    value: Any = json.loads(json.dumps(good)) if worst is WORST_JSON else msgpack.unpackb(msgpack.packb(good))
    for _ in range(draw(st.integers(1, 3))):
        value = _spoilt(draw, value, worst)
    return value


def _spoilt(draw: st.DrawFn, value: Any, worst: list[Any]) -> Any:
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(worst))
    key = draw(st.sampled_from(sorted(value, key=str) if isinstance(value, dict) else range(len(value))))
    copied: Any = value.copy()
    match draw(st.integers(0, 5)):
        case 0:
            del copied[key]
        case 1 if isinstance(value, dict):
            copied[draw(st.sampled_from(["", "x", "cls", "self"]))] = draw(st.sampled_from(worst))
        case _:
            copied[key] = _spoilt(draw, copied[key], worst)
    return copied


def _values(worst: list[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.sampled_from(worst), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner)
    )


def _packed(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return values.map(lambda value: bytes(msgpack.packb(value)))


@st.composite
def _changed(draw: st.DrawFn, good: bytes) -> bytes:
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 4)):
            case 0 if data:
                data[at] = draw(st.integers(0, 255))
            case 1:
                del data[at : at + draw(st.integers(1, 8))]
            case 2:
                data[at:at] = draw(st.sampled_from(HEADS))
            case 3:
                data[at:at] = draw(st.binary(min_size=1, max_size=4))
            case _:
                data = data[:at]
    return bytes(data)


def is_read_or_refused(decode: Callable[..., object], *given: Any) -> None:
    """Whatever is raised beside penstock's own errors ends the test."""
    with contextlib.suppress(PenstockError):
        decode(*given)


class OneHash:
    """A client whose hashes all hold the same, for readers that ask Redis themselves."""

    def __init__(self, held: dict[bytes, bytes]) -> None:
        self._held = held

    def hgetall(self, _: str) -> dict[bytes, bytes]:
        return dict(self._held)

    def hmget(self, _: str, fields: list[str]) -> list[bytes | None]:
        return [self._held.get(field.encode()) for field in fields]

    def hget(self, _: str, field: str) -> bytes | None:
        return self._held.get(field.encode())

    def exists(self, _: str) -> int:
        return 0

    def pipeline(self, *, transaction: bool) -> "OneHash._Pipe":
        return OneHash._Pipe(self._held)

    class _Pipe:
        def __init__(self, held: dict[bytes, bytes]) -> None:
            self._held = held
            self._answers: list[list[bytes | None]] = []

        def hmget(self, _: str, *fields: str) -> None:
            self._answers.append([self._held.get(field.encode()) for field in fields])

        def execute(self) -> list[list[bytes | None]]:
            return self._answers
