"""Uses of a group, as the group keeps them: what the leader notes and the recorder reads."""

import pytest

from penstock.errors import ProtocolError
from penstock.records.manifest import Manifest
from penstock.records.sample import BatchUse, note, uses_of
from tests.integration.play import meta


def manifest(**over: object) -> Manifest:
    fields: dict[str, object] = {
        "sub": "actor", "n": 7, "train_version": 9, "bound": 4, "on_expiry": "mask", "mode": "async", "mask_below": 5,
        "rows": [], "num_loss_tokens": 0, "num_samples": 0, "num_groups": 0, "num_first_use": 0, "staleness_max": 0,
        "staleness_mean": 0.0,
    }  # fmt: skip
    return Manifest(**(fields | over))  # type: ignore[arg-type]


def test_what_the_leader_notes_is_what_the_recorder_reads() -> None:
    said = note(manifest(abandoned=[[3, 4], [7, 7]], mask_offpolicy=True), clocked=True)
    text = f"7:1500:{said};8:2000:{note(manifest(), clocked=False)}"
    first, second = uses_of(text.encode(), "group d/0/0")
    assert first == BatchUse(7, 1.5, 9, 5, True, ((3, 4), (7, 7)))
    assert second == BatchUse(8, 2.0, -1, 5)


def test_T2_versions_that_changed_no_weights_age_nothing() -> None:
    use = BatchUse(1, 0.0, 9, -1, abandoned=((3, 4), (7, 7)))
    assert [use.staleness(version) for version in (9, 6, 3, 2, 1, -1)] == [0, 2, 4, 4, 5, 0]
    assert BatchUse(1, 0.0, -1, -1).staleness(3) == 0


def test_what_was_masked_bore_no_loss() -> None:
    sample = meta(0, "tok")
    sample.loss_by_version, sample.newest = [[4, 10], [5, 20], [6, 30]], 6
    assert BatchUse(1, 0.0, 9, -1).bearing(sample) == [[4, 10], [5, 20], [6, 30]]
    assert BatchUse(1, 0.0, 9, 5).bearing(sample) == [[5, 20], [6, 30]]
    assert BatchUse(1, 0.0, 9, 5, newest_only=True).bearing(sample) == [[6, 30]]


def test_an_answer_that_was_cut_off_bore_no_loss_where_the_subscription_says_so() -> None:
    [use] = uses_of(f"7:1500:{note(manifest(mask_truncated=True), clocked=True)}".encode(), "group d/0/0")
    assert (use.no_truncated, use.newest_only) == (True, False)
    sample = meta(0, "tok")
    sample.loss_by_version, sample.newest = [[5, 20], [6, 30]], 6
    assert use.bearing(sample) == [[5, 20], [6, 30]]
    sample.status = "truncated"
    assert use.bearing(sample) == []


@pytest.mark.parametrize("text", [b"", b"1:2:3", b"1:x:3:4:0:", b"1:2:3:4:0:5-", b"\xff", b"1:2:3:4:0:;" * 200_000,
                                  b"1:%s:3:4:0:" % (b"9" * 400), b"%d:2:3:4:0:" % 2**63, b"1:2:-2:4:0:"])  # fmt: skip
def test_a_field_that_no_cut_wrote_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^group d/0/0 holds uses that no cut wrote"):
        uses_of(text, "group d/0/0")
