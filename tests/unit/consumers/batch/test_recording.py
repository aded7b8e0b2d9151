"""Recorded batches come back as they were, at any dp_size, or are refused."""

from pathlib import Path

import numpy as np
import pytest

from penstock.consumers.batch import recording
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.columns import LocalColumns
from penstock.consumers.batch.replay import RecordingOver, Replay
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, PayloadError, ProtocolError, WaitTimeout
from penstock.records.causes import ColumnPending
from penstock.records.sample import Sample
from tests.batch_factory import make_batch
from tests.unit.consumers.batch.test_batch import three_groups


def record(folder: Path, *, batches: int = 2, size: int = 2) -> tuple[str, list[Sample]]:
    """Batches of the same twelve samples, each recorded by ``size`` ranks."""
    template = str(folder / "b{rollout_id}" / "rank{rank}.bin")
    samples = three_groups()
    for n in range(1, batches + 1):
        for rank in range(size):
            batch = make_batch(samples, dp_rank=rank, dp_size=size, n=n)
            mine = {row.sample: batch.payloads[row.sample] for row in batch.rows}  # type: ignore[index]
            recording.save(template, batch.manifest, batch.digest, mine, rank, size)
    return template, samples


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_recording_is_replayed_at_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    template, samples = record(tmp_path)
    for rank in range(size):
        live = make_batch(samples, dp_rank=rank, dp_size=size, n=2)
        with Trainer.replay(template, dp_rank=rank, dp_size=size) as replay:
            first, second = list(replay)
            assert (first.n, second.n, second.digest) == (1, 2, live.digest)
            for key, value in second.arrays().items():
                np.testing.assert_array_equal(value, live.arrays()[key])


def test_columns_that_were_read_come_back_at_any_number_of_ranks(tmp_path: Path) -> None:
    template, samples = record(tmp_path, batches=1)
    whole = make_batch(samples)
    values = np.arange(whole.arrays()["tokens"].size, dtype=np.float32).reshape(whole.arrays()["tokens"].shape)
    writer = make_batch(samples, store=(store := LocalColumns()))
    writer.put("values", values)
    writer.put("score", np.arange(len(writer)))
    for rank in range(2):
        file = recording.path_of(template, 1, rank, 2)
        reader = make_batch(samples, dp_rank=rank, dp_size=2, store=recording.RecordedColumns(store, file))
        for _ in range(2):  # recorded once
            reader.get("values")
        for micro in reader.packed(16):
            reader.get("score", micro=micro)
    (again,) = list(Trainer.replay(template))
    np.testing.assert_array_equal(again.get("values"), writer.get("values"))
    np.testing.assert_array_equal(again.get("score"), writer.get("score"))
    columns = sorted(file.parent.glob(f"{file.name}.columns-*"))
    size = sum(one.stat().st_size for one in columns)
    assert size < 2 * sum(len(value) + 200 for of in store.values.values() for value in of.values())

    good = columns[0].read_bytes()
    for bad in (good[:-3], good[:60] + bytes([good[60] ^ 1]) + good[61:]):
        columns[0].write_bytes(bad)
        with pytest.raises(PayloadError, match=r"columns-0 is damaged"):
            list(Trainer.replay(template))
    record(tmp_path, batches=1)  # delivered again: columns of before are gone
    assert not [one for one in columns if one.exists()]


def test_a_replay_goes_on_where_a_state_was_taken_and_ends(tmp_path: Path) -> None:
    template, _ = record(tmp_path, batches=3)
    replay = Replay(template)
    first = replay.next()
    replay.commit(first)
    state = replay.state_dict()
    assert replay.next().n == 2
    again = Replay(template)
    again.load_state_dict(state)
    assert [batch.n for batch in again] == [2, 3]
    assert again.next_nowait() is None
    with pytest.raises(RecordingOver, match="ends with batch 3"):
        again.next()
    assert (again.publish(None), again.tick()) == (1, 2)
    again.commit(make_batch(three_groups(), n=3))
    with pytest.raises(ProtocolError, match="is out of order: batch 3"):
        again.commit(first)


def test_columns_of_a_replayed_batch_stay_in_the_process(tmp_path: Path) -> None:
    template, _ = record(tmp_path, batches=1)
    batch = Replay(template).next()
    with pytest.raises(WaitTimeout, match="Column 'values' is missing for 12 of 12 rows") as told:
        batch.get("values")
    assert (told.value.count, told.value.cause) == (0, ColumnPending("values", 0, 12, 12))
    batch.put("values", np.arange(12.0))
    np.testing.assert_array_equal(batch.get("values"), np.arange(12.0))


def test_a_lost_payload_is_recorded_as_lost(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.bin")
    batch = make_batch(three_groups())
    data: dict[str, bytes | memoryview | None] = dict(batch.payloads)  # type: ignore[arg-type]
    data["toy/0/1/2"] = None
    recording.save(template, batch.manifest, batch.digest, data)
    found = Replay(template).next()
    assert found.lost == ["toy/0/1/2"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    template, _ = record(tmp_path, batches=1)
    path = tmp_path / "b1" / "rank0.bin"
    good = path.read_bytes()

    def read(data: bytes) -> Batch:
        path.write_bytes(data)
        batch = Replay(template).next()
        batch.arrays()
        return batch

    read(good)
    at = good.index(b"payload/") + 200
    for bad in (b"PSB1" + good[4:], good[:8], good[:-16], good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :]):
        with pytest.raises(PayloadError, match=r"rank0.bin is damaged, or not a recorded batch"):
            read(bad)
    path.write_bytes(good)
    (tmp_path / "b1" / "rank1.bin").unlink()
    with pytest.raises(PayloadError, match=r"rank1.bin: batch 1 cannot be read back: No such file"):
        Replay(template).next()


def test_files_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    template, _ = record(tmp_path, batches=1)
    other = make_batch(three_groups(), dp_rank=1, dp_size=2, seed=9)
    recording.save(template, other.manifest, other.digest, {}, 1, 2)
    with pytest.raises(PayloadError, match="belong to different runs"):
        Replay(template).next()


def test_templates_that_cannot_name_batches_are_refused(tmp_path: Path) -> None:
    for bad, ranks, words in [
        ("b.bin", 1, "use {rollout_id}"),
        ("{rollout_id}{step}", 1, "use {rollout_id}"),
        ("{rollout_id}.bin", 2, "add {rank}"),
    ]:
        with pytest.raises(ConfigError, match=words):
            recording.check_template(bad, ranks)
    with pytest.raises(ConfigError, match=r"no recorded batch matches .* debug.save_batches first"):
        Replay(str(tmp_path / "{rollout_id}.bin"))
