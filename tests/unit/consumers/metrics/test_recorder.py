"""What a recorder counts of the rows that it writes."""

import zlib
from typing import Any

import numpy as np

from penstock.consumers.metrics.recorder import CHECKED_CHARS, RecorderTally, is_repetitive
from penstock.history.row import Fate, SampleRow


def test_rows_and_their_tokens_are_counted_by_fate() -> None:
    tally = RecorderTally()
    tally.wrote([row(0, 10, Fate.TRAINED), row(1, 5, Fate.TRAINED), row(2, 7, Fate.DROPPED)], 0.5)
    tally.wrote([row(3, 9, Fate.TRAINED, status="given")], 0.5)
    tally.groups += 2

    samples = [one for family in tally.collect() for one in family.samples]

    found = {(one.name, one.labels.get("fate", "")): one.value for one in samples}
    assert found["penstock_recorder_generated_tokens_total", "trained"] == 15, (
        "nothing is drawn of an answer that is given"
    )
    assert found["penstock_recorder_generated_tokens_total", "dropped"] == 7
    assert found["penstock_recorder_rows_total", "trained"] == 3
    assert found["penstock_recorder_groups_total", ""] == 2


def test_the_share_of_repetitive_answers_is_over_those_recorded() -> None:
    tally = RecorderTally()
    kept: list[dict[str, Any]]
    assert "rollout_repetition_frac" not in {family.name for family in tally.collect()}
    answers = ["so it is. " * CHECKED_CHARS, "so", "", None]
    kept = [{} if answer is None else {"answer": answer, "tokens": np.zeros(1, np.int32)} for answer in answers]
    tally.wrote([SampleRow(job="d/0/0", k=k, fate=Fate.TRAINED, **one) for k, one in enumerate(kept)], 0.5)
    found = {one.name: one.value for family in tally.collect() for one in family.samples}
    assert found["penstock_recorder_repetitive_samples_total"] == 1
    assert found["rollout_repetition_frac"] == 1 / 3


def test_a_long_text_that_says_the_same_again_is_repetitive() -> None:
    prose = "".join(f"{n * n % 9973} of {n}; " for n in range(CHECKED_CHARS // 5))
    assert is_repetitive("so it is. " * CHECKED_CHARS)
    assert not is_repetitive("so it is. " * 10), "too short to tell"
    assert not is_repetitive(prose)
    assert is_repetitive(prose + "wait, " * CHECKED_CHARS), "the end counts"
    assert not is_repetitive("\ud800" * 10 + prose)


def test_what_is_repetitive_is_judged_by_the_best_that_zlib_can_do() -> None:
    phrase = "".join(chr(97 + (n * n + 3 * n) % 23) for n in range(20))
    text = list(phrase * 501)
    for j, at in enumerate(range(0, CHECKED_CHARS + 1, 22)):
        text[at - j * j % 7] = chr(97 + j * j * j % 26)
    end = "".join(text[: CHECKED_CHARS + 1])
    assert len(zlib.compress(end[-CHECKED_CHARS:].encode())) > CHECKED_CHARS / 10, "not by what it does by default"
    assert is_repetitive(end)


def row(k: int, num_generated: int, fate: Fate, status: str = "completed") -> SampleRow:
    return SampleRow(job="d/0/0", k=k, num_generated=num_generated, fate=fate, status=status)
