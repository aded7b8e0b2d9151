"""Rows of a history for a sample of several parts, and the reports that count it once."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.console.launch.trials import of_run
from penstock.console.read.evals import list_categories, list_evals, prompts_over_versions
from penstock.consumers.history.retired import Retired
from penstock.consumers.history.rows import rows_of
from penstock.history.reader import HistoryReader
from penstock.history.row import Fate, SampleRow
from penstock.history.writer import HistoryWriter
from penstock.records.sample import BatchUse, Sample
from tests.parted_samples import make_sample, packed, turn


def samples() -> list[Sample]:
    """Two answers to a held-out prompt: one of three parts, one of one."""
    parted = make_sample(0, [turn(2, 1, 3), turn(1, 2, 3), turn(2, 4, 3)], 1.0, "held/3/0")
    return [parted, make_sample(1, [turn(2, 5, 3)], 0.0, "held/3/0")]


def rows(lane: str = "eval", **fields: object) -> list[SampleRow]:
    group = Retired("held/3/0", lane=lane, account="evaluated", **fields)  # type: ignore[arg-type]
    return [row for one in samples() for row, _ in rows_of(group, packed(one)[1], None, None, {})]


@pytest.fixture
def history(tmp_path: Path) -> Iterator[HistoryReader]:
    writer = HistoryWriter(tmp_path, 1, max_bytes=2**30)
    writer.write(rows())
    writer.close()
    with closing(HistoryReader(tmp_path)) as reader:
        yield reader


def test_each_part_has_a_row_with_its_own_tokens_and_the_reward_of_the_sample() -> None:
    assert [(row.id, row.num_generated, row.reward) for row in rows()] == [
        ("held/3/0/0", 1, 1.0), ("held/3/0/0.1", 2, 1.0), ("held/3/0/0.2", 4, 1.0), ("held/3/0/1", 5, 0.0),
    ]  # fmt: skip


def test_what_became_of_a_part_is_its_own() -> None:
    sample = make_sample(0, [turn(1, 2, 3), turn(1, 3, 5)])
    group = Retired("toy/0/0", account="masked", uses={"actor": [BatchUse(4, 6.0, 6, 5)]}, checkpoints={"actor": 4})

    found = rows_of(group, packed(sample)[1], None, None, {})

    assert [(row.fate, [(use.part, use.loss_tokens, use.staleness) for use in uses]) for row, uses in found] == [
        (Fate.MASKED, [(0, 0, -1)]), (Fate.TRAINED, [(1, 3, 1)]),
    ]  # fmt: skip


def test_T11_evaluations_count_an_answer_once(history: HistoryReader) -> None:
    [found], [category] = list_evals(history), list_categories(history)

    assert (found["answers"], found["reward_mean"]) == (2, 0.5)
    assert (category["answers"], category["reward_mean"]) == (2, 0.5)
    assert [row["rewards"] for row in prompts_over_versions(history, "held")["rows"]] == [[0.5]]


def test_a_trial_of_rewards_leaves_out_a_sample_of_which_it_would_see_a_part() -> None:
    given = [SampleRow("d/0/0", k, part, answer="x", reward=1.0) for k, part in ((0, 0), (0, 1), (1, 0), (2, 0))]

    assert [one.k for one, _ in of_run(given, None)] == [1, 2]
