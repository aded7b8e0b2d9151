"""T8: what becomes text of a turn, and what its tokens keep."""

from typing import Any

import pytest

from penstock.workers.jobs.stops import StopRule
from tests.unit.workers.jobs.test_generate import EOS, Letters


class Marked(Letters):
    """Shows its eos as text, unless it is told to skip it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(
            ("" if skip_special_tokens else "<eos>") if token == EOS else chr(token + 96) for token in token_ids
        )


def ids(text: str) -> list[int]:
    return [EOS if letter == "!" else ord(letter) - 96 for letter in text]


@pytest.mark.parametrize(
    ("sampling", "drawn", "stopped", "text"),
    [
        ({}, "abc!", True, "abc"),
        ({"stop": ["bc"]}, "abc", True, "a"),
        ({"stop": "bc"}, "abcx", True, "a"),
        ({"stop": ["c", "bc"]}, "abc", True, "a"),
        ({"stop": ["bc"], "no_stop_trim": True}, "abcx", True, "abc"),
        ({"stop": ["bc"]}, "abc", False, "abc"),
        ({"stop_token_ids": [3]}, "abc", True, "ab"),
        ({"stop_token_ids": [3], "no_stop_trim": True}, "abc", True, "abc"),
        ({"skip_special_tokens": False}, "a!b!", True, "a<eos>b"),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "a!b!", True, "a<eos>b<eos>"),
        ({"skip_special_tokens": False, "ignore_eos": True}, "ab!", False, "ab<eos>"),
        ({"stop_regex": "b."}, "abc", True, "abc"),
        ({"stop_regex": "[o-q]", "skip_special_tokens": False}, "a!", True, "a<eos>"),
        ({"stop": "e", "skip_special_tokens": False}, "a!", True, "a<"),
        ({"stop": "e"}, "a!", True, "a"),
        ({}, "", True, ""),
    ],
)
def test_T8_the_text_of_a_turn_is_what_sampling_asks_for(
    sampling: dict[str, Any], drawn: str, stopped: bool, text: str
) -> None:
    rule = StopRule.of(sampling, Marked(), frozenset({EOS}))
    assert rule.text_of(ids(drawn), stopped=stopped) == text


def test_spaces_between_special_tokens_are_asked_for_only_where_they_are_not_wanted() -> None:
    asked: list[dict[str, Any]] = []

    class Spaces(Letters):
        def decode(self, token_ids: list[int], **options: Any) -> str:
            asked.append(options)
            return ""

    for given in ({}, {"spaces_between_special_tokens": False}):
        StopRule.of(given, Spaces(), frozenset()).text_of([1], stopped=False)
    assert asked == [
        {"skip_special_tokens": True},
        {"skip_special_tokens": True, "spaces_between_special_tokens": False},
    ]
