"""What a recorder counts of the rows that it writes."""

from penstock.consumers.metrics.recorder import RecorderCollector, RecorderTally
from penstock.history.row import Fate, SampleRow


def test_rows_and_their_tokens_are_counted_by_fate() -> None:
    tally = RecorderTally()
    tally.wrote([row(0, 10, Fate.TRAINED), row(1, 5, Fate.TRAINED), row(2, 7, Fate.DROPPED)], 0.5)
    tally.wrote([row(3, 9, Fate.TRAINED, status="given")], 0.5)
    tally.groups += 2

    samples = [one for family in RecorderCollector(tally).collect() for one in family.samples]

    found = {(one.name, one.labels.get("fate", "")): one.value for one in samples}
    assert found["penstock_recorder_generated_tokens_total", "trained"] == 15, (
        "nothing is drawn of an answer that is given"
    )
    assert found["penstock_recorder_generated_tokens_total", "dropped"] == 7
    assert found["penstock_recorder_rows_total", "trained"] == 3
    assert found["penstock_recorder_groups_total", ""] == 2


def row(k: int, num_generated: int, fate: Fate, status: str = "completed") -> SampleRow:
    return SampleRow(job="d/0/0", k=k, num_generated=num_generated, fate=fate, status=status)
