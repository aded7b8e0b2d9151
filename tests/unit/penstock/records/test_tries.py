"""Tries of a job, as verbs write them and readers take them."""

import pytest

from penstock.errors import ProtocolError
from penstock.records.job import Try, tries_of


def test_what_verbs_write_is_read() -> None:
    text = "+3;train:w1:1500:2500:failed reward_raised;suspect:w-2.a:3000"
    first = Try(4, "train", "w1", 1.5, 2.5, "failed reward_raised")
    assert tries_of(text, "group d/0/0") == [first, Try(5, "suspect", "w-2.a", 3.0, 0.0, "")]
    assert tries_of(text, "group d/0/0", ready_s=9.0)[-1] == Try(5, "suspect", "w-2.a", 3.0, 9.0, "committed")
    assert tries_of("", "group d/0/0") == []


@pytest.mark.parametrize(
    "text",
    [
        *("x", ";", "+3;", "train:w:1:2", "train:w:x", "train:w:1:2:", "train:w:1;" * 4000, "+x;train:w:1", "a:b:-1"),
        "train:w:" + "9" * 15,
    ],
)
def test_a_field_that_no_verb_wrote_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"^group d/0/0 holds tries that no lease wrote"):
        tries_of(text, "group d/0/0")
