"""What became of a sample, as its group's own fields tell it."""

from typing import Any

import pytest

from penstock.consumers.history.retired import Retired, group_of
from penstock.consumers.history.rows import fate_of, uses_of_sample
from penstock.consumers.history.texts import Texts
from penstock.history.row import Fate, Use
from penstock.records.sample import BatchUse
from penstock.records.sample_meta import SampleMeta
from tests.integration.play import meta

IN_A_BATCH = {"actor": [BatchUse(3, 5.0, 9, -1)]}


def sample(version: int = 7) -> SampleMeta:
    return meta(0, "tok", version)


def fate(**fields: Any) -> tuple[Fate, str]:
    group = Retired("d/0/0", lane=fields.pop("lane", "train"), **fields)
    return fate_of(group, sample(), uses_of_sample(group, sample()))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"uses": IN_A_BATCH, "account": "masked", "checkpoints": {"actor": 3}}, (Fate.TRAINED, "")),
        ({"uses": IN_A_BATCH, "account": "masked", "checkpoints": {"actor": 2}}, (Fate.MASKED, "")),
        ({"uses": {"actor": [BatchUse(3, 5.0, 9, 8)]}, "account": "masked", "checkpoints": {"actor": 3}},
         (Fate.MASKED, "")),
        ({"account": "masked"}, (Fate.TRAINED, "")),  # cut before the run kept a history
        ({"uses": IN_A_BATCH, "account": "evicted"}, (Fate.EVICTED, "")),
        ({"uses": IN_A_BATCH, "account": "masked", "lost": frozenset({0})}, (Fate.PAYLOAD_LOST, "")),
        ({"account": "filtered:easy"}, (Fate.FILTERED, "easy")),
        ({"account": "dropped:stale"}, (Fate.DROPPED, "stale")),
        ({"account": "dropped:timed_out"}, (Fate.DROPPED, "timed_out")),
        ({"account": "dropped:unwanted"}, (Fate.DROPPED, "unused")),
        ({"account": "payload_lost"}, (Fate.PAYLOAD_LOST, "")),
        ({"account": "cancelled"}, (Fate.CANCELLED, "")),
        ({"account": "evaluated", "lane": "eval"}, (Fate.EVALUATED, "")),
        ({"account": "collected", "lane": "score"}, (Fate.SCORED, "")),
        ({"broken": "its records cannot be read"}, (Fate.DROPPED, "unreadable")),
    ],
)  # fmt: skip
def test_the_fate_of_a_sample(fields: dict[str, Any], expected: tuple[Fate, str]) -> None:
    assert fate(**fields) == expected


def test_a_use_says_how_old_what_bore_loss_was() -> None:
    old = BatchUse(4, 6.0, 9, -1, abandoned=((8, 8),))
    group = Retired("d/0/0", uses={"actor": [BatchUse(3, 5.0, 9, 8), old], "copy": [BatchUse(1, 5.0, -1, -1)]})
    assert uses_of_sample(group, sample(7)) == [
        Use("d/0/0", 0, "actor", 3, 9, -1, 0),
        Use("d/0/0", 0, "actor", 4, 9, 1, 2),
        Use("d/0/0", 0, "copy", 1, -1, 0, 2),
    ]


def test_a_group_is_read_from_its_fields() -> None:
    raw = {
        b"ln": b"train", b"seq": b"12", b"att": b"2", b"eid": b"1500-0", b"t0": b"2000",
        b"t1": b"9000", b"h:actor": b"3:5000:9:-1:0:", b"x:1": b"1",
    }  # fmt: skip
    group = group_of("d/0/0", raw, sample().to_bytes())
    assert (group.seq, group.attempts, group.admitted_s, group.leased_s, group.ready_s) == (12, 2, 1.5, 2.0, 9.0)
    assert group.uses == IN_A_BATCH
    assert (group.lost, len(group.samples)) == (frozenset({1}), 1)
    assert group_of("d/0/0", raw | {b"ta": b"1000"}, None).admitted_s == 1.0


@pytest.mark.parametrize(
    "bad", [{b"seq": b"x"}, {b"cp": b"actor"}, {b"tr": b"x"}, {b"tr": b"\xff"}, {b"h:actor": b"3"}, {b"t1": b"1e400"}]
)
def test_a_group_that_cannot_be_read_says_so_and_is_told_all_the_same(bad: dict[bytes, bytes]) -> None:
    group = group_of("d/0/0", {b"ln": b"train"} | bad, None)
    assert (group.lane, group.samples) == ("train", ())
    assert group.broken
    assert group_of("d/0/0", {b"ln": b"train"}, b"\xc1").broken


def test_without_a_tokenizer_there_is_no_text(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    texts = Texts(str(tmp_path))
    assert texts.prompt([1, 2]) == texts.answer([3]) == ""
    assert texts.pieces([1]) == {}
    assert not texts.is_spelled
    assert caplog.text.count("failed to load the tokenizer, recording tokens without text") == 1
