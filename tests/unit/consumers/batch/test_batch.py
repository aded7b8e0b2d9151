"""What a trainer is handed for a batch."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from penstock import payloads
from penstock.consumers.batch.advantages import group_advantages
from penstock.consumers.batch.batch import Batch, rank_rows
from penstock.consumers.batch.token_arrays import TOKEN_KEYS, LossTokens
from penstock.errors import PayloadError, ProtocolError
from penstock.protocol.staleness import Lineage
from penstock.records.job import Job
from penstock.records.manifest import Manifest, Row
from penstock.records.sample import Sample
from tests.batch_factory import make_batch, make_manifest, make_row


def sample_of(group: int, k: int, *, first: int = 2, second: int = 3, versions: tuple[int, int] = (4, 5)) -> Sample:
    """Prompt of two, ``first`` tokens of the older version, an observation, ``second`` tokens of the newer one."""
    sample = Sample(Job(f"toy/0/{group}", 4, sampling={"temperature": 0.5 + group}), k)
    sample.append([2, 3])
    sample.prompt_length = 2
    base = 100 * group + 10 * k
    sample.append([base + t for t in range(first)], version=versions[0], logprobs=[-0.5] * first)
    sample.append([7])
    sample.append([base + 5 + t for t in range(second)], version=versions[1], logprobs=[-0.25] * second)
    sample.reward, sample.status, sample.finish_reason = float(group * 2 + k % 3), "completed", "stop"
    return sample


def three_groups() -> list[Sample]:
    return [sample_of(group, k, first=1 + k, second=1 + group * 3 % 4) for group in range(3) for k in range(4)]


def test_arrays_hold_each_sample_and_padding_holds_nothing() -> None:
    samples = [sample_of(0, 0), sample_of(0, 1, first=1, second=1)]
    data = make_batch(samples, train_version=6).arrays()
    for i, sample in enumerate(samples):
        length = len(sample.tokens)
        assert data["lengths"][i] == length
        assert data["tokens"][i, :length].tolist() == sample.tokens
        assert data["loss_mask"][i, :length].tolist() == [bool(m) for m in sample.loss_mask]
        assert data["generated"][i, :length].tolist() == [bool(m) for m in sample.generated]
        assert data["logprobs"][i, :length].tolist() == sample.logprobs
        assert data["versions"][i, :length].tolist() == sample.versions
        assert data["staleness"][i, :length].tolist() == [6 - v if v >= 0 else -1 for v in sample.versions]
    for key, blank in [("tokens", 0), ("loss_mask", 0), ("generated", 0), ("logprobs", 0), ("advantages", 0)]:
        assert (data[key][1, 5:] == blank).all(), key
    assert data["versions"][1, 5:].tolist() == data["staleness"][1, 5:].tolist() == [-1] * 3
    assert data["temperatures"].tolist() == [0.5, 0.5]
    assert data["rewards"].tolist() == [0.0, 1.0]


def test_padded_is_the_same_as_tensors() -> None:
    batch = make_batch(three_groups())
    arrays, tensors = batch.arrays(), batch.padded()
    assert arrays.keys() == tensors.keys()
    for key, value in tensors.items():
        if key != "counts":
            assert isinstance(value, torch.Tensor)
            np.testing.assert_array_equal(value.numpy(), arrays[key])
    assert (tensors["tokens"].dtype, tensors["loss_mask"].dtype) == (torch.int64, torch.bool)
    assert (tensors["logprobs"].dtype, tensors["versions"].dtype) == (torch.float32, torch.int32)


def test_only_the_arrays_that_are_asked_for_are_made_and_they_are_the_same() -> None:
    batch = make_batch(three_groups())
    whole = batch.arrays()
    for keys in (["tokens"], ["loss_mask", "versions"], ["advantages", "staleness"], []):
        some = batch.arrays(keys)
        assert whole.keys() - some.keys() == TOKEN_KEYS.keys() - set(keys)
        for key in some.keys() - {"counts"}:
            np.testing.assert_array_equal(some[key], whole[key])
    (packed,) = batch.packed(10_000, keys=["tokens"])
    assert torch.equal(packed["tokens"], batch.packed(10_000)[0]["tokens"])
    assert "logprobs" not in packed
    assert all("logprobs" not in micro for micro in batch.micro_batches(max_samples=1, keys=["tokens"]))
    with pytest.raises(ProtocolError, match="unknown array ids: keys of a batch are tokens"):
        batch.arrays(["ids"])


def test_arrays_need_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.consumers.batch.batch import Batch\n"
        "from penstock.records.manifest import Manifest\n"
        "from penstock import payloads\n"
        "m = Manifest('s', 1, 1, 4, 'mask', 'async', -1, [], 0, 0, 0, 0, 0, 0.0)\n"
        "print(Batch(m, digest='', payloads={}).arrays()['lengths'].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[1]\n", done.stderr


def test_packed_lays_the_same_samples_end_to_end() -> None:
    batch = make_batch(three_groups())
    padded = batch.padded()
    seen = []
    for micro in batch.packed(max_tokens=20):
        bounds = micro["cu_seqlens"].tolist()
        assert bounds[-1] == len(micro["tokens"]) <= 20
        assert micro["max_length"] == int(micro["lengths"].max())
        for i, row in enumerate(micro["rows"].tolist()):
            start, end = bounds[i], bounds[i + 1]
            assert micro["position_ids"][start:end].tolist() == list(range(end - start))
            for key in ("tokens", "loss_mask", "generated", "logprobs", "advantages", "versions", "staleness"):
                assert torch.equal(micro[key][start:end], padded[key][row, : end - start]), key
            seen.append(row)
    assert sorted(seen) == list(range(12))


def test_micro_batches_hold_every_sample_once() -> None:
    batch = make_batch(three_groups())
    rows = [row for micro in batch.micro_batches(max_samples=5) for row in micro["rows"].tolist()]
    assert sorted(rows) == list(range(12))
    assert [len(micro["rows"]) for micro in batch.micro_batches(max_samples=5)] == [5, 5, 2]
    for micro in batch.micro_batches(max_tokens=24):
        assert micro["tokens"].numel() <= 24


def test_T10_counts_are_those_of_all_ranks_and_every_rank_runs_equally_many_micro_batches() -> None:
    samples = three_groups()
    ranks = [make_batch(samples, dp_rank=rank, dp_size=3, row_changes={}) for rank in range(3)]
    total = sum(sum(sample.loss_mask) for sample in samples)
    assert all(
        batch.counts == {"loss_tokens": total, "loss_samples": 12, "samples": 12, "groups": 3} for batch in ranks
    )
    assert sum(int(batch.arrays()["loss_mask"].sum()) for batch in ranks) == total
    for limit in (8, 12, 100):
        assert len({len(batch.packed(limit)) for batch in ranks}) == 1
        assert len({len(list(batch.micro_batches(limit))) for batch in ranks}) == 1


def test_T10_a_rank_with_less_to_do_adds_fillers_of_weight_zero() -> None:
    # Five samples on two ranks: three and two.
    ranks = [make_batch([sample_of(0, k) for k in range(4)] + [sample_of(1, 0)], dp_rank=r, dp_size=2) for r in (0, 1)]
    short = min(ranks, key=len)
    micros = short.packed(max_tokens=8)
    assert [len(batch) for batch in sorted(ranks, key=len)] == [2, 3]
    assert len(micros) == 3
    filler = micros[-1]
    assert (filler["rows"].tolist(), filler["lengths"].tolist()) == ([-1], [1])
    assert not filler["loss_mask"].any()
    assert filler["versions"].tolist() == [-1]


def test_a_rank_without_rows_has_a_filler() -> None:
    ranks = [make_batch([sample_of(0, 0)], dp_rank=rank, dp_size=2) for rank in (0, 1)]
    empty = min(ranks, key=len)
    assert len(empty) == 0
    assert empty.arrays()["rows"].tolist() == [-1]
    assert [micro["rows"].tolist() for micro in empty.micro_batches()] == [[-1]]


def test_T11_advantages_come_from_whole_groups_before_the_split() -> None:
    samples = three_groups()
    wanted = group_advantages([s.reward or 0.0 for s in samples], [s.job.id for s in samples])
    found = {}
    for rank in range(3):
        data = make_batch(samples, dp_rank=rank, dp_size=3).arrays()
        for i, row in enumerate(data["rows"]):
            generated = data["generated"][i]
            assert len(set(data["advantages"][i][generated].tolist())) == 1
            assert not data["advantages"][i][~generated].any()
            found[int(row)] = float(data["advantages"][i][generated][0])
    np.testing.assert_allclose([found[i] for i in range(12)], wanted, rtol=1e-6)


def test_T14_ranks_share_all_samples_and_fetch_only_their_own() -> None:
    samples = three_groups()
    whole = make_batch(samples)
    fetched: list[str] = []
    data = {sample.id: payloads.encode(sample) for sample in samples}

    def fetch(row: Row) -> bytes:
        fetched.append(row.sample)
        return data[row.sample]

    for rank in range(2):
        batch = Batch(whole.manifest, digest=whole.digest, payloads=fetch, dp_rank=rank, dp_size=2)
        batch.arrays()
        batch.padded()
        mine = [row.sample for row in rank_rows(whole.manifest, rank, 2)]
        assert [row.sample for row in batch.rows] == mine
        assert fetched[-len(mine) :] == mine
    assert sorted(fetched) == sorted(data)


def test_tokens_below_the_bound_bear_no_loss() -> None:
    sample = sample_of(0, 0, first=2, second=3, versions=(4, 5))
    data = make_batch([sample], mask_below=5, train_version=9, bound=4).arrays()
    assert data["loss_mask"][0].tolist() == [False] * 5 + [True] * 3
    assert data["generated"][0].tolist() == [False] * 2 + [True] * 2 + [False] + [True] * 3
    assert data["staleness"][0].tolist() == [-1, -1, 5, 5, -1, 4, 4, 4]


def test_T11_an_answer_that_was_cut_off_bears_no_loss_and_its_reward_counts_in_its_group() -> None:
    samples = [sample_of(0, k) for k in range(3)]
    samples[1].status = "truncated"
    of_all = make_batch(samples).arrays()
    cut_off = {"num_loss": 0, "oldest_loss": -1, "loss_versions": []}
    data = make_batch(samples, mask_truncated=True, row_changes={1: cut_off}).arrays()
    assert [bool(mask.any()) for mask in data["loss_mask"]] == [True, False, True]
    for i in range(3):
        np.testing.assert_array_equal(data["generated"][i], of_all["generated"][i])
        np.testing.assert_allclose(data["advantages"][i], of_all["advantages"][i])


@pytest.mark.parametrize(
    "false", [{"length": 9}, {"prompt_length": 1}, {"num_generated": 4}, {"num_loss": 4}, {"num_loss": 6}]
)
def test_a_payload_that_is_not_what_the_batch_was_cut_with_is_refused(false: dict[str, Any]) -> None:
    batch = make_batch([sample_of(0, 0), sample_of(0, 1)], row_changes={1: false})
    with pytest.raises(PayloadError, match="toy/0/0/1: length, prompt, generated and loss tokens are"):
        batch.arrays()


def test_a_payload_with_other_versions_is_refused() -> None:
    batch = make_batch([sample_of(0, 0)], row_changes={0: {"oldest_loss": 5}})
    with pytest.raises(PayloadError, match="oldest version that bears loss is 4 in its payload"):
        batch.arrays()


def test_another_sample_s_payload_is_refused() -> None:
    first, second = sample_of(0, 0), sample_of(0, 1)
    manifest = make_manifest([make_row(first, payloads.encode(first))])
    batch = Batch(manifest, digest="", payloads={first.id: payloads.encode(second)})
    with pytest.raises(PayloadError, match="toy/0/0/0: its payload has checksum"):
        batch.arrays()


def test_a_payload_that_was_not_fetched_is_named() -> None:
    manifest = make_manifest([make_row(sample_of(0, 0), payloads.encode(sample_of(0, 0)))])
    with pytest.raises(PayloadError, match="toy/0/0/0: batch 1 was made without its payload"):
        Batch(manifest, digest="", payloads={}).arrays()


def test_lost_rows_are_fillers_and_keep_their_group_s_advantages() -> None:
    samples = [sample_of(0, k) for k in range(3)]
    data: dict[str, bytes | None] = {sample.id: payloads.encode(sample) for sample in samples}
    rows = [make_row(sample, payloads.encode(sample)) for sample in samples]
    rows[1] = make_row(samples[1], payloads.encode(samples[1]), lost=True, num_loss=0, oldest_loss=-1)
    data["toy/0/0/2"] = None
    del data["toy/0/0/1"]
    batch = Batch(make_manifest(rows), digest="", payloads=data)
    assert [row.sample for row in rank_rows(batch.manifest, 0, 1)] == ["toy/0/0/0", "toy/0/0/2"]
    arrays = batch.arrays()
    assert batch.lost == ["toy/0/0/1", "toy/0/0/2"]
    assert arrays["lengths"].tolist() == [8, 1, 1]
    assert arrays["loss_mask"].sum(axis=1).tolist() == [5, 0, 0]
    # Rewards 0, 1, 2: the mean is that of the three.
    np.testing.assert_allclose(arrays["advantages"][0].min(), -1, rtol=1e-4)


def test_I6_a_manifest_that_breaks_its_bound_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"toy/0/0/0 bears loss on version 4, which is 5 living .* the bound is 4"):
        make_batch([sample_of(0, 0)], train_version=9, bound=4)
    with pytest.raises(ProtocolError, match="is newer than its train version 3"):
        make_batch([sample_of(0, 0)], train_version=3, bound=4)
    make_batch([sample_of(0, 0)], train_version=8, bound=4)


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rows have 5 loss tokens, but the manifest has 6"):
        make_batch([sample_of(0, 0)], num_loss_tokens=6)
    with pytest.raises(ProtocolError, match="is lost, but 5 of its tokens bear loss"):
        make_batch([sample_of(0, 0)], row_changes={0: {"lost": True}})


def test_T14_a_restart_at_another_size_splits_the_same_batch_anew() -> None:
    whole = make_batch(three_groups(), seed=3)
    again = Manifest.from_bytes(whole.manifest.to_bytes())
    for size in (1, 2, 3, 5):
        rows = [row.sample for rank in range(size) for row in rank_rows(again, rank, size)]
        assert sorted(rows) == sorted(row.sample for row in whole.all_rows)


def test_T2_abandoned_versions_age_nothing() -> None:
    """Staleness per token is the lag of the lineage, which the cut was bounded by, not a difference of numbers."""
    manifest = Manifest(
        sub="s", n=1, train_version=13, bound=4, on_expiry="mask", mode="async", mask_below=8, rows=[],
        num_loss_tokens=0, num_samples=0, num_groups=0, num_first_use=0, staleness_max=0, staleness_mean=0.0,
        abandoned=[[9, 10], [12, 12]],
    )  # fmt: skip
    lineage = Lineage(((9, 10), (12, 12)))
    loss = LossTokens(manifest, [])
    assert [loss.staleness(v) for v in range(14)] == [lineage.lag(v, 13) for v in range(14)]
