"""Test the offer at a position: a job, or a line that is skipped."""

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.producer.dataset import Dataset
from penstock.producer.held_out import HeldOut
from penstock.producer.mixture import Mixture
from penstock.producer.offers import LOGGED_SKIPS, Offer, Offers, SkippedRow, record_of
from penstock.producer.prompt import LongPrompt, Template
from penstock.producer.sources.rows import BadLine
from penstock.protocol.pass_rate import Skip
from penstock.records.job import Job
from tests.unit.producer.making import made

CONFIG = Config.model_validate(
    {"run": "r", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d"}]}, "rollout": {"n": 2}}
)
ROWS = [{"prompt": "a"}, "not json", {"prompt": "c"}, {"other": 1}]


def offers(dataset: Dataset, held_out: list[Dataset] | None = None) -> Offers:
    return Offers(CONFIG, Mixture([dataset], 0), HeldOut(held_out or []))


def names(found: list[Offer]) -> list[str]:
    return [one.id if isinstance(one, Job) else "-" for one in found]


def test_a_bad_line_is_an_error_or_keeps_its_place_empty(tmp_path: Path) -> None:
    strict = offers(made(tmp_path, ROWS, shuffle=False))
    assert names([strict.at(0)]) == ["d/0/0"]
    with pytest.raises(BadLine, match=r"line 2 of .* is not JSON"):
        strict.at(1)
    lenient = offers(made(tmp_path, ROWS, shuffle=False, on_bad_line="skip"))
    assert names([lenient.at(i) for i in range(8)]) == ["d/0/0", "-", "d/0/2", "-", "d/1/0", "-", "d/1/2", "-"]
    assert record_of(lenient.at(1)) == (None, b"d")
    found = lenient.at(0)
    assert isinstance(found, Job)
    assert record_of(found) == (found, found.to_bytes())


def test_T18_a_held_out_prompt_is_passed_over_where_bad_lines_are(tmp_path: Path) -> None:
    held = made(tmp_path, [{"prompt": "c"}], "e")
    lenient = offers(made(tmp_path, [{"prompt": "a"}, {"prompt": "c"}], shuffle=False, on_bad_line="skip"), [held])
    found = lenient.at(1)
    assert isinstance(found, SkippedRow)
    assert "line 2: this prompt is held out, as line 1 of dataset e" in found.why


def test_an_evaluation_has_the_lines_that_are_not_passed_over(tmp_path: Path) -> None:
    held = HeldOut([made(tmp_path, ROWS, "e", on_bad_line="skip")])
    assert [line for _, line in held.lines] == [0, 2]
    assert held.skipped == {"e": 2}
    with pytest.raises(BadLine, match="line 2 of"):
        HeldOut([made(tmp_path, ROWS, "e")])


def test_a_long_prompt_has_a_choice_of_its_own(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": "a b c"}, {"prompt": [1, 2, 3]}, {"prompt": "a"}, {"prompt": [1]}]
    template = Template(count=lambda text: len(text.split()))
    keys: dict[str, Any] = {"template": template, "shuffle": False, "max_prompt_tokens": 2}
    lenient = offers(made(tmp_path, rows, on_long_prompt="skip", **keys))
    assert names([lenient.at(i) for i in range(4)]) == ["-", "-", "d/0/2", "d/0/3"]
    strict = offers(made(tmp_path, rows, on_bad_line="skip", **keys))
    for line in (0, 1):
        with pytest.raises(LongPrompt, match=f"line {line + 1}: its prompt has 3 tokens, but max_prompt_tokens is 2"):
            strict.at(line)


def test_lines_that_are_passed_over_are_told_and_never_all_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = 2 * LOGGED_SKIPS
    lenient = offers(made(tmp_path, ["bad"] * count, on_bad_line="skip"))
    found = [lenient.at(i) for i in range(count)]
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ConfigError, match=f"None of {count} consecutive lines"),
    ):
        lenient.record_skips(found)
    assert len(caplog.records) == LOGGED_SKIPS + 1
    assert "skipping more rows of dataset d" in caplog.messages[-1]


CURRICULUM = {"skip_above": 0.9, "skip_below": 0.1, "groups": 3, "revisit": 0.25}


def test_a_prompt_of_a_curriculum_is_skipped_by_its_bounds_but_for_a_share_that_is_another_one_in_each_epoch(
    tmp_path: Path,
) -> None:
    train = [{"name": "d", "path": "d", "curriculum": CURRICULUM}, {"name": "e", "path": "e"}]
    config = Config.model_validate(CONFIG.model_dump() | {"data": {"train": train}})
    dataset = made(tmp_path, [{"prompt": f"p{i}"} for i in range(400)], shuffle=False)
    found = Offers(config, Mixture([dataset], 0), HeldOut([]))
    skips = [found.skip_rule(found.at(position)) for position in range(800)]
    assert {str(one) for one in skips if one} == {str(Skip(3, easy=0.9, hard=0.1))}
    epochs = [[one is None for one in skips[:400]], [one is None for one in skips[400:]]]
    assert all(60 < sum(come) < 140 for come in epochs), "about a quarter comes all the same"
    assert epochs[0] != epochs[1]
    again = Offers(config, Mixture([dataset], 0), HeldOut([]))
    assert [again.skip_rule(again.at(position)) for position in range(800)] == skips
    other = made(tmp_path, [{"prompt": "a"}], "e")
    assert found.skip_rule(other.job(other[0], 0, n=1, lane="train", sampling={})) is None
    assert found.skip_rule(SkippedRow("d", "why")) is None
