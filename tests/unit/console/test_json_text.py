from typing import Any

import orjson
import pytest

from penstock.console.terminal import MOST, json_bytes
from penstock.text import TooMuch


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    "odd", [b"\xff\x00", nested(400), "\ud800", {1: object()}], ids=["bytes", "deep", "half", "object"]
)
def test_what_json_has_no_form_for_becomes_text(odd: Any) -> None:
    assert orjson.loads(json_bytes({"reward_info": odd, "beside": 1}))["beside"] == 1


def test_what_it_has_a_form_for_is_as_it_was() -> None:
    value = {"b": [1, 2.5, None, True], "a": "\x1b[2J"}
    assert orjson.loads(json_bytes(value, orjson.OPT_SORT_KEYS)) == value


def test_there_is_a_bound_on_what_is_made_text() -> None:
    with pytest.raises(TooMuch):
        json_bytes([b"", "x" * MOST])
