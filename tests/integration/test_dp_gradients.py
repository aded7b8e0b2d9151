"""T10: two ranks in real processes, over gloo, get the gradient that one rank gets from the same manifest."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import checkpoint
from penstock.consumers.grpo.policy import Policy
from penstock.consumers.grpo.shards import local, shard
from penstock.consumers.grpo.step import GRPO
from penstock.errors import PenstockError
from penstock.records.sample import Sample
from tests.batch_factory import end_to_end, make_batch, make_samples, tiny_model

MICRO_BATCHES = (1, 3, 8)
CORRECTIONS = ("bypass", "decoupled")
#: One denominator per rank, or per micro-batch: what T10 forbids.
DEFECTS = ("", "rank", "micro")
WORLD = 2


def samples() -> list[Sample]:
    """Eleven answers, so that one rank has a sample less and runs fillers; one group is short."""
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, temperature=0.7)[:-1]


def learner_of(config: TrainerConfig, dp_size: int, **limits: int) -> GRPO:
    """One that starts alike everywhere; its learning rate is that of ``config``."""
    policy = Policy(tiny_model(3), torch.float32)
    if dp_size > 1:
        shard(policy)
    return GRPO(policy, torch.optim.SGD(policy.parameters(), lr=config.lr), config, dp_size=dp_size, **limits)  # type: ignore[arg-type]


def gradient_of(batch: Batch, max_samples: int, correction: str, defect: str) -> tuple[Tensor, dict[str, float]]:
    config = TrainerConfig(lr=0.0, max_grad_norm=1e9, correction=correction)  # type: ignore[arg-type]
    trainer = learner_of(config, batch.dp_size, max_samples=max_samples)
    if defect == "rank":
        mine = float(batch.arrays()["loss_mask"].sum())
        trainer.denominator = lambda micro: mine  # type: ignore[method-assign]
    elif defect == "micro":
        trainer.denominator = lambda micro: max(float(micro["loss_mask"].sum()), 1.0)  # type: ignore[method-assign]
    metrics = trainer.step(batch)
    return end_to_end(p.grad for p in trainer.model.parameters() if p.grad is not None), metrics


def one_group_a_rank(rank: int, size: int) -> Batch:
    """Two groups dealt out so that each lies on one rank: of every minibatch one of two ranks has nothing."""
    ours = samples()[:8]
    dealt = [ours[at] for pair in zip(range(4), range(4, 8), strict=True) for at in pair]
    return make_batch(dealt, dp_rank=rank, dp_size=size, split="strided")


def weights_after(batch: Batch, **changes: Any) -> tuple[Tensor, dict[str, float]]:
    """What several optimizer steps on one batch leave."""
    config = TrainerConfig(**({"lr": 0.05, "warmup_steps": 3, "minibatches": 2, "epochs": 2} | changes))
    trainer = learner_of(config, batch.dp_size, max_samples=3)
    metrics = trainer.step(batch)
    return end_to_end(trainer.model.parameters()), metrics


def broken_on_one_rank(rank: int, size: int) -> Batch:
    """A reward of one sample is so far off that the gradient of its rank is not finite."""
    ours = samples()
    ours[0].reward = -1e30
    return make_batch(ours, dp_rank=rank, dp_size=size, advantage="dr_grpo", n=7)


def skipped_then_trained(rank: int, size: int) -> tuple[list[Tensor], list[float]]:
    """Weights before, after a batch that cannot be trained, and after one that can; norms of both."""
    trainer = learner_of(TrainerConfig(lr=0.05, warmup_steps=0), size)
    found, skipped = [end_to_end(trainer.model.parameters())], []
    for batch in (broken_on_one_rank(rank, size), make_batch(samples(), dp_rank=rank, dp_size=size)):
        skipped.append(trainer.step(batch)["skipped_steps"])
        found.append(end_to_end(trainer.model.parameters()))
    return found, skipped


def saved(folder: Path, learner: GRPO, rank: int, size: int) -> None:
    """Write a checkpoint of all ranks."""
    names: list[Any] = [checkpoint.save_shard(folder, step=1, rank=rank, learner=learner.state_dict()) if rank else ""]
    if size > 1:
        name, names = names[0], [""] * size
        dist.all_gather_object(names, name)
    if rank == 0:
        checkpoint.save(folder, step=1, learner=learner.state_dict(), trainer={}, shards=names[1:])
    if size > 1:
        dist.barrier()


def resumed(rank: int, size: int, folder: Path, *, saves: bool = True) -> tuple[Tensor, Tensor, float]:
    """Weights at the checkpoint and after one more step from it; the share of weights held here.

    Args:
        saves: whether to make the checkpoint; otherwise that in ``folder`` is loaded into other weights.
    """
    policy = Policy(tiny_model(3), torch.float32)
    total = sum(one.numel() for one in policy.parameters())
    if size > 1:
        shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01, fused=True)
    trainer = GRPO(policy, optimizer, TrainerConfig(lr=0.01, warmup_steps=0), dp_size=size)
    batch = make_batch(samples(), dp_rank=rank, dp_size=size)
    if saves:
        trainer.step(batch)
        saved(folder, trainer, rank, size)
        trainer.step(batch)
    found = checkpoint.latest(folder)
    assert found is not None
    trainer.load_state_dict(*found.learner)
    restored = end_to_end(policy.parameters())
    trainer.step(batch)
    held = sum(local(one).numel() for one in policy.parameters())
    return restored, end_to_end(policy.parameters()), held / total


def cases() -> Iterator[tuple[int, str, str]]:
    for max_samples in MICRO_BATCHES:
        yield from ((max_samples, correction, "") for correction in CORRECTIONS)
        yield from ((max_samples, "bypass", defect) for defect in DEFECTS if defect)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        batch = make_batch(samples(), dp_rank=rank, dp_size=WORLD)
        results = {case: gradient_of(batch, *case) for case in cases()}
        steps = {
            correction: weights_after(one_group_a_rank(rank, WORLD), correction=correction)
            for correction in CORRECTIONS
        }
        skips = skipped_then_trained(rank, WORLD)
        torch.save(
            [len(batch), results, steps, skips, resumed(rank, WORLD, Path(folder) / "two")], f"{folder}/rank{rank}.pt"
        )
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Any]:
    """What each of two processes found: its number of samples, and gradient and metrics of every case."""
    mp.spawn(run_rank, args=(str(folder),), nprocs=WORLD)
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone() -> Batch:
    torch.set_num_threads(1)
    return make_batch(samples())


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_the_ranks_have_unequal_shares(ranks: list[Any]) -> None:
    assert sorted(share for share, *_ in ranks) == [5, 6]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("max_samples", MICRO_BATCHES)
def test_T10_gradients_at_two_ranks_and_at_one_agree(
    ranks: list[Any], alone: Batch, max_samples: int, correction: str
) -> None:
    wanted, metrics = gradient_of(alone, 100, correction, "")
    for _, results, *_ in ranks:
        found, found_metrics = results[max_samples, correction, ""]
        assert difference(found, wanted) < 1e-5
        assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("defect", ["rank", "micro"])
@pytest.mark.parametrize("max_samples", [1, 3])
def test_T10_denominators_of_a_rank_or_micro_batch_are_seen(
    ranks: list[Any], alone: Batch, max_samples: int, defect: str
) -> None:
    wanted, _ = gradient_of(alone, 100, "bypass", "")
    for _, results, *_ in ranks:
        found, _ = results[max_samples, "bypass", defect]
        assert difference(found, wanted) > 1e-3


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_T9_T10_a_rank_without_a_minibatch_takes_a_filler(ranks: list[Any], correction: str) -> None:
    """Two minibatches, two epochs: the weights after four optimizer steps are those of one rank, on both ranks."""
    shares = [one_group_a_rank(rank, WORLD) for rank in range(WORLD)]
    held = [[sum(row >= 0 for m in part for row in m["rows"]) for part in share.minibatches(2)] for share in shares]
    assert sorted(held) == [[0, 4], [4, 0]]
    wanted, metrics = weights_after(one_group_a_rank(0, 1), correction=correction)
    for _, _, steps, *_ in ranks:
        found, found_metrics = steps[correction]
        assert float((found - wanted).abs().max()) < 1e-6
        assert found_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
        assert found_metrics["optimizer_steps"] == 4


def test_ranks_skip_a_gradient_that_is_not_finite_together(ranks: list[Any]) -> None:
    """One rank's sample breaks it; both skip, and go on alike with the next batch."""
    for *_, ((before, between, after), skipped), _ in ranks:
        assert skipped == [1, 0]
        assert torch.equal(before, between)
        assert not torch.equal(between, after)
    assert torch.equal(ranks[0][3][0][2], ranks[1][3][0][2])


def test_T14_a_checkpoint_of_two_ranks_goes_on_with_any_number(ranks: list[Any], folder: Path, tmp_path: Path) -> None:
    """Each rank holds half of the weights and of the optimizer's state, and writes no more than that."""
    restored, wanted, share = resumed(0, 1, tmp_path)
    assert share == 1
    by_one = resumed(0, 1, folder / "two", saves=False)
    for *_, (found, after, share) in ranks:
        assert share == pytest.approx(0.5, abs=0.02)
        assert torch.equal(found, by_one[0])
        assert float((found - restored).abs().max()) < 1e-5
        assert float((after - wanted).abs().max()) < 1e-5
        assert float((by_one[1] - after).abs().max()) < 1e-5
    sizes = [one.stat().st_size for one in (folder / "two").iterdir()]
    assert len(sizes) == WORLD
    assert max(sizes) < 0.75 * next(tmp_path.iterdir()).stat().st_size


def test_T14_a_checkpoint_without_the_shards_of_a_rank_is_damaged(folder: Path, ranks: list[Any]) -> None:
    (shards,) = (folder / "two").glob("*rank1*")
    shards.rename(folder / shards.name)
    with pytest.raises(PenstockError, match=r"every checkpoint in .* is damaged"):
        checkpoint.latest(folder / "two")
    (folder / shards.name).rename(shards)
    data = bytearray(shards.read_bytes())
    data[len(data) // 2] ^= 1
    shards.write_bytes(data)
    with pytest.raises(PenstockError, match=r"every checkpoint in .* is damaged"):
        checkpoint.latest(folder / "two")
