"""Evaluations as a history has them."""

from pathlib import Path
from typing import Any

from console.read.evals import list_categories
from penstock.history.read_part import ReadPart
from penstock.history.reader import HistoryReader
from penstock.history.row import SampleRow
from penstock.history.writer import HistoryWriter
from tests.unit.penstock.history.rows import row

VERSIONS, PROMPTS = range(1, 9), 6


class Reading(HistoryReader):
    """Counts the rows that it unpacks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_read = 0

    def _read(self, part: ReadPart, number: int, *, arrays: bool) -> SampleRow | None:
        self.num_read += 1
        return super()._read(part, number, arrays=arrays)


def history(folder: Path) -> Reading:
    """Two datasets, of which one was evaluated for the last time at an earlier version; prompts of two categories."""
    writer = HistoryWriter(folder, 1, max_bytes=2**30)
    for dataset, versions in (("held", VERSIONS), ("early", VERSIONS[:3])):
        for version in versions:
            drawn: list[Any] = [
                row(f"{dataset}/{version}/{line}", k, lane="eval", reward=float(version == versions[-1]),
                    reward_info={"category": "odd" if line % 2 else "even", "pred": "5"})
                for line in range(PROMPTS) for k in range(2)
            ]  # fmt: skip
            writer.write(drawn)
    writer.close()
    return Reading(folder)


def test_categories_of_the_newest_version_are_read_from_its_rows_alone(tmp_path: Path) -> None:
    samples = history(tmp_path / "history")

    found = list_categories(samples, "held", newest=True)

    assert [(one["version"], one["category"], one["answers"]) for one in found] == [(8, "even", 6), (8, "odd", 6)]
    assert samples.num_read == 2 * PROMPTS


def test_each_dataset_has_a_newest_version_of_its_own(tmp_path: Path) -> None:
    samples = history(tmp_path / "history")

    found = list_categories(samples, newest=True)

    assert {(one["dataset"], one["version"], one["reward_mean"]) for one in found} == {("early", 3, 1), ("held", 8, 1)}
    assert found == [
        one for one in list_categories(samples) if (one["dataset"], one["version"]) in {("early", 3), ("held", 8)}
    ]
    samples.close()
