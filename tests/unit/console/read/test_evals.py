"""Evaluations as a history has them."""

from pathlib import Path
from typing import Any

from penstock.console.read.evals import list_categories, list_evals
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


def test_an_evaluation_shows_the_range_of_its_versions_their_mean_and_the_share_of_the_requested_one(
    tmp_path: Path,
) -> None:
    samples = HistoryReader(tmp_path / "history")
    drawn = [((3, 3), 30), ((5, 5), 10)]
    rows = [
        row(f"held/3/{line}", lane="eval", oldest=span[0], newest=span[1], num_generated=tokens)
        for line, (span, tokens) in enumerate(drawn)
    ]
    samples.show_too(rows)
    fields = ("version", "mean_version", "oldest", "newest", "asked_share")
    assert [tuple(one[name] for name in fields) for one in list_evals(samples)] == [(3, 3.5, 3, 5, 0.75)]


def test_the_record_of_an_evaluation_says_what_its_samples_do_not(tmp_path: Path) -> None:
    """A sample of several versions does not say how many tokens are of each."""
    samples = HistoryReader(tmp_path / "history")
    samples.show_too([row("held/3/0", lane="eval", oldest=3, newest=6, num_generated=30)])
    fields = ("mean_version", "oldest", "newest", "asked_share")
    assert [tuple(one[name] for name in fields) for one in list_evals(samples)] == [(None, 3, 6, None)]
    record = {"dataset": "held", "version": 3, "mean_version": 5.2, "asked_share": 0.012}
    found = list_evals(samples, records=[record])
    assert [tuple(one[name] for name in fields) for one in found] == [(5.2, 3, 6, 0.012)]
