"""A sample of several parts: a row for each in a batch, one sample in the statistics of its group."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import payloads
from penstock.buffer.filters import nonzero_std
from penstock.buffer.manifest import bearing_of
from penstock.config import TrainerConfig
from penstock.consumers.adapters.requests import groups_of
from penstock.consumers.adapters.slime import train_shares
from penstock.consumers.batch import recording
from penstock.consumers.batch.advantages import KINDS, Kind
from penstock.consumers.batch.batch import Batch
from penstock.consumers.batch.replay import Replay
from penstock.consumers.grpo.step import GRPO, take_off
from penstock.consumers.metrics.steps import answer_figures, batch_figures
from penstock.errors import PayloadError, ProtocolError
from penstock.history.eval_rows import summarize
from penstock.payloads import sides
from penstock.records.manifest import Manifest, Row, first_rows
from penstock.records.sample import Sample
from penstock.records.sample_meta import CompletedGroup
from tests.batch_factory import gradient, make_row, tiny_model
from tests.parted_samples import Turn, apart, batch_of, make_sample, manifest_of, packed, turn

REWARDS = (0.0, 1.0, 3.0, 0.5)
NAMES = ("tokens", "loss_mask", "generated", "logprobs", "versions", "staleness")


def group(job: str = "toy/0/0") -> list[Sample]:
    """Four samples of 1, 2, 3 and 1 parts."""
    parts = [
        [turn(2, 3)],
        [turn(2, 2), turn(4, 3)],
        [turn(2, 1), turn(3, 2, 4), turn(5, 4)],
        [turn(2, 5)],
    ]
    return [make_sample(k, one, REWARDS[k], job) for k, one in enumerate(parts)]


def of_one_part(samples: Sequence[Sample]) -> list[Sample]:
    """Samples with the same rewards and loss tokens, each in one part."""
    return [make_sample(one.k, [turn(2, sum(one.loss_mask))], one.reward or 0.0, one.job.id) for one in samples]


def sequences(samples: Sequence[Sample]) -> list[Sample]:
    return [one for sample in samples for one in apart(sample, 100 * sample.k)]


def rows_by_id(batch: Any, name: str) -> dict[str, list[float]]:
    arrays = batch.arrays([name])
    ids = [row.sample for row in batch.rows]
    return {one: arrays[name][i, : arrays["lengths"][i]].tolist() for i, one in enumerate(ids)}


def test_a_sample_of_m_parts_is_m_rows_with_ids_lengths_and_versions_of_their_own() -> None:
    rows = batch_of(group()).all_rows

    assert [row.sample for row in rows] == [
        "toy/0/0/0", "toy/0/0/1", "toy/0/0/1.1", "toy/0/0/2", "toy/0/0/2.1", "toy/0/0/2.2", "toy/0/0/3",
    ]  # fmt: skip
    assert [row.payload_id for row in rows][3:6] == ["toy/0/0/2"] * 3
    assert [(row.length, row.prompt_length, row.num_generated, row.num_loss) for row in rows][3:6] == [
        (3, 2, 1, 1), (5, 3, 2, 2), (9, 5, 4, 4),
    ]  # fmt: skip
    assert [(row.oldest, row.newest, row.oldest_loss) for row in rows][3:6] == [(5, 5, 5), (4, 4, 4), (5, 5, 5)]
    assert [row.begin for row in rows] == [-1, 0, 4, 0, 3, 8, -1]


def test_an_ordinary_sample_costs_no_column_of_the_manifest() -> None:
    columns = manifest_of([group()[0]])[0].to_map()["rows"]

    assert not {"part", "begin"} & columns.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_T11_a_sample_counts_once_in_its_group_and_all_its_parts_get_its_advantage(kind: Kind) -> None:
    samples = [*group("toy/0/0"), *group("toy/0/1")]

    batch, ordinary = batch_of(samples, advantage=kind), batch_of(of_one_part(samples), advantage=kind)

    expected = dict(zip((row.payload_id for row in ordinary.all_rows), ordinary.advantages, strict=True))
    assert batch.advantages.tolist() == pytest.approx([expected[row.payload_id] for row in batch.all_rows])
    assert len(set(batch.advantages.round(6))) == 4


def test_T10_the_rows_of_a_batch_are_those_of_the_same_sequences_as_samples() -> None:
    samples = group()
    batch, separate = batch_of(samples), batch_of(sequences(samples))

    found, expected = batch.arrays(NAMES), separate.arrays(NAMES)

    for name in (*NAMES, "lengths", "rewards", "temperatures"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert batch.counts == separate.counts == {"loss_tokens": 20, "loss_samples": 7, "samples": 7, "groups": 1}


@pytest.mark.parametrize("aggregation", ["token", "sample"])
def test_T10_a_step_over_parts_is_that_over_the_same_sequences_as_samples(aggregation: str) -> None:
    samples = group()
    batch, separate = batch_of(samples), batch_of(sequences(samples))
    separate.set_advantages(batch.advantages.tolist())
    found = []
    for one in (batch, separate):
        model = tiny_model(3)
        config = TrainerConfig(lr=0.1, warmup_steps=0, aggregation=aggregation, minibatches=1)
        figures = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config).step(one)
        found.append((figures["loss"], gradient(model)))

    assert found[0][0] == pytest.approx(found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    assert found[0][1].abs().max() > 0


class Source:
    """Returns payloads, and notes which were read."""

    def __init__(self, data: dict[str, bytes]) -> None:
        self._data = data
        self.read: list[str] = []

    def __call__(self, row: Row) -> bytes:
        self.read.append(row.payload_id)
        return self._data[row.payload_id]


def test_T14_two_ranks_have_each_row_once_and_read_the_payload_of_a_sample_once() -> None:
    samples = [*group("toy/0/0"), *group("toy/0/1")]
    _, data = manifest_of(samples)
    complete = batch_of(samples)
    found: dict[str, list[float]] = {}
    split = False
    for rank in range(2):
        source = Source(data)
        batch = batch_of(samples, dp_rank=rank, dp_size=2, payloads=source)
        mine = rows_by_id(batch, "tokens")
        assert not found.keys() & mine.keys()
        assert sorted(source.read) == sorted({row.payload_id for row in batch.rows})
        split |= any(row.payload_id in {one.split(".")[0] for one in found} for row in batch.rows)
        found |= mine
    assert found == rows_by_id(complete, "tokens")
    assert split, "no sample was divided between the ranks, so this proves nothing"


def test_a_lost_payload_makes_all_its_parts_fillers() -> None:
    samples = group()
    _, data = manifest_of(samples)

    after = batch_of(samples, payloads=data | {"toy/0/0/2": None})
    arrays = after.arrays(["loss_mask"])

    assert after.lost == ["toy/0/0/2", "toy/0/0/2.1", "toy/0/0/2.2"]
    assert arrays["lengths"].tolist() == [5, 4, 7, 1, 1, 1, 7]
    assert arrays["loss_mask"].sum() == 20 - 7
    before = batch_of(samples, lost=frozenset({2}))
    assert [row.num_loss for row in before.all_rows if row.lost] == [0, 0, 0]
    assert before.counts["loss_tokens"] == 13
    assert before.arrays(["loss_mask"])["loss_mask"].sum() == 13


def test_T4_what_is_too_old_bears_no_loss_part_by_part() -> None:
    batch = batch_of(group(), floor=5)

    assert [row.num_loss for row in batch.all_rows][3:6] == [1, 0, 4]
    assert batch.arrays(["loss_mask"])["loss_mask"].sum(axis=1).tolist()[3:6] == [1, 0, 4]


def test_the_policy_mask_keeps_the_newest_version_of_each_part() -> None:
    sample = make_sample(0, [Turn(1, ((4, 2, True),)), Turn(2, ((4, 1, True), (5, 3, True)))])

    batch = batch_of([sample], mask_offpolicy=True)

    assert [row.num_loss for row in batch.all_rows] == [2, 3]
    assert batch.arrays(["loss_mask"])["loss_mask"].sum(axis=1).tolist() == [2, 3]


def test_a_part_without_loss_has_no_row_unless_the_sample_would_have_none() -> None:
    some = make_sample(0, [turn(2, 2, loss=False), turn(1, 3), Turn(2, ())])
    none = make_sample(1, [turn(2, 2, loss=False), turn(1, 3, loss=False)])

    batch = batch_of([some, none])

    assert [(row.sample, row.num_loss, row.masked) for row in batch.all_rows] == [
        ("toy/0/0/0.1", 3, False), ("toy/0/0/1", 0, True),
    ]  # fmt: skip
    assert rows_by_id(batch, "tokens")["toy/0/0/0.1"] == some.tokens[4:8]


def test_T10_loss_is_removed_from_one_part_alone() -> None:
    batch = batch_of(group())

    batch.remove([4])

    assert batch.counts["loss_tokens"] == 18
    assert batch.arrays(["loss_mask"])["loss_mask"].sum(axis=1).tolist() == [3, 2, 3, 1, 0, 4, 5]


def test_T13_a_column_has_a_value_for_each_part() -> None:
    samples = group()
    batch = batch_of(samples)
    values = batch.arrays(["tokens"])["tokens"].astype(np.float32)

    batch.put("values", values)

    np.testing.assert_array_equal(batch.get("values"), values)


def test_the_distance_to_the_reference_is_summed_over_the_parts_of_a_sample() -> None:
    samples = group()
    batch, ordinary = batch_of(samples), batch_of(of_one_part(samples))
    found = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [0.0] * 7, [0.0] * 7])

    take_off(batch, found, 2.0)

    ordinary.set_rewards([0.0 - 0.2, 1.0 - 1.0, 3.0 - 3.0, 0.5 - 1.4])
    expected = ordinary.advantages
    assert batch.advantages.tolist() == pytest.approx(expected[[0, 1, 1, 2, 2, 2, 3]].tolist())


def test_means_of_rewards_count_a_sample_once_and_tokens_all_its_parts() -> None:
    manifest, _ = manifest_of(group())

    figures = batch_figures(manifest)

    assert figures["reward_mean"] == sum(REWARDS) / 4
    assert (figures["samples"], figures["generated_tokens"], figures["loss_tokens"]) == (7, 20, 20)
    truncated = make_sample(1, [turn(1, 1), turn(1, 1)])
    truncated.status = "truncated"
    assert answer_figures(manifest_of([group()[0], truncated])[0])["rollout/truncated_ratio"] == 0.5


def test_an_evaluation_counts_an_answer_of_several_parts_once() -> None:
    one, other = (
        make_sample(0, [turn(1, 2), turn(1, 3)], 1.0, "held/3/0"),
        make_sample(1, [turn(1, 4)], 0.0, "held/3/0"),
    )

    [found] = summarize(manifest_of([one, other])[0].samples(), 1)

    assert (found["num"], found["accuracy"], found["pass@1"], found["pass@2"]) == (2, 0.5, 0.5, 1.0)
    assert found["mean_version"] == 5


def test_a_filter_and_the_ledger_count_a_sample_once() -> None:
    samples = group()
    metas = tuple(packed(sample)[1] for sample in samples)
    kept, _ = nonzero_std(CompletedGroup("toy/0/0", "train", 4, metas))
    manifest, _ = manifest_of(samples)

    assert kept
    assert CompletedGroup("toy/0/0", "train", 4, metas).rewards == list(REWARDS)
    assert bearing_of(manifest, ["toy/0/0", "other/0/0"]) == ["0:3,1:5,2:7,3:5", ""]


def test_a_recorded_batch_of_parts_is_replayed(tmp_path: Path) -> None:
    samples = group()
    manifest, data = manifest_of(samples)
    template = str(tmp_path / "{rollout_id}.bin")

    recording.save(template, manifest, Manifest.digest(manifest.to_bytes()), data)

    assert rows_by_id(Replay(template).next(), "tokens") == rows_by_id(batch_of(samples), "tokens")


def test_slime_gets_a_sequence_for_each_part_and_rewards_of_samples() -> None:
    samples = group()
    shares = train_shares(batch_of(samples), 2)

    ids = [number for share in shares for number in share["sample_indices"]]
    rewards = dict(zip(ids, [one for share in shares for one in share["rewards"]], strict=True))
    assert sorted(rewards) == list(range(7))
    assert [rewards[i] for i in range(7)] == pytest.approx(batch_of(samples).advantages.tolist())
    lengths = {i: len(t) for share in shares for i, t in zip(share["sample_indices"], share["tokens"], strict=True)}
    assert [lengths[i] for i in range(7)] == [5, 4, 7, 3, 5, 9, 7]


def test_a_caller_that_wants_one_sequence_per_answer_is_told_so() -> None:
    with pytest.raises(ProtocolError, match="toy/0/0/1 has several parts, and an answer is one sequence"):
        groups_of(batch_of(group()), {"toy/0/0": 4}, 0)


def with_side(sample: Sample, name: str, array: np.ndarray[Any, Any]) -> Any:
    """A batch of one sample with a side array in a key of its own."""
    data = sides.pack(name, array, sample.id)
    manifest, stored = manifest_of([sample])
    entry = [[name, len(data), payloads.checksum_of(data)]]
    for row in manifest.rows:
        row.sides = entry
    asked: list[Sequence[Row]] = []

    def read(rows: Sequence[Row], wanted: str) -> dict[str, bytes | None]:
        asked.append(rows)
        return {row.payload_id: data for row in rows}

    batch = Batch(manifest, digest="d", payloads=stored, read_sides=read)
    return batch.side(name), asked


@pytest.mark.parametrize("prompt", [0, 2])
def test_side_arrays_with_an_entry_per_token_are_cut(prompt: int) -> None:
    sample = make_sample(0, [turn(2, 2), turn(3, 1), turn(1, 4)])
    values = np.arange(prompt, 13, dtype=np.float32)

    found, asked = with_side(sample, "teacher_logprobs", values)

    assert [one.tolist() for one in found] == [[*range(prompt, 4)], [4, 5, 6, 7], [8, 9, 10, 11, 12]]
    assert [[row.sample for row in rows] for rows in asked] == [["toy/0/0/0"]]


def test_T17_routing_is_cut_to_the_positions_of_a_part_that_were_fed() -> None:
    sample = make_sample(0, [turn(1, 2), turn(2, 2)])

    found, _ = with_side(sample, "routed_experts", np.arange(6, dtype=np.int16).reshape(6, 1, 1))

    assert [one.reshape(-1).tolist() for one in found] == [[0, 1], [3, 4, 5]]


def test_a_side_array_of_the_sample_is_that_of_each_part() -> None:
    found, _ = with_side(make_sample(0, [turn(1, 2), turn(2, 2)]), "embedding", np.array([[1.0, 2.0]]))

    assert [one.tolist() for one in found] == [[[1.0, 2.0]]] * 2


@pytest.mark.parametrize("name", ["pixel_values", "image_grid_thw", "step_rewards"])
def test_what_belongs_to_no_part_is_refused(name: str) -> None:
    with pytest.raises(PayloadError, match=f"has several parts, and its side array '{name}' cannot be divided"):
        with_side(make_sample(0, [turn(1, 2), turn(2, 2)]), name, np.ones((2, 2)))


def test_a_row_that_is_not_in_its_payload_is_refused() -> None:
    samples = [make_sample(0, [turn(1, 2), turn(2, 2)])]
    manifest, data = manifest_of(samples)
    for begin in (2, 100, 2**40):
        manifest.rows[1].begin = begin
        with pytest.raises(PayloadError, match=r"sample toy/0/0/0\.1: "):
            Batch(manifest, digest="d", payloads=data).arrays()


def test_first_rows_are_one_of_each_sample() -> None:
    rows = manifest_of(group())[0].rows

    assert [row.sample for row in first_rows(rows)] == [f"toy/0/0/{k}" for k in range(4)]
    assert [row.sample for row in first_rows(rows[2:])] == ["toy/0/0/1.1", "toy/0/0/2", "toy/0/0/3"]
    ordinary = [make_row(group()[0], packed(group()[0])[0])]
    assert first_rows(ordinary) == ordinary
