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
from penstock.consumers.grpo.step import GRPO
from penstock.records.sample import Sample
from tests.batch_factory import make_batch, make_samples, tiny_model

MICRO_BATCHES = (1, 3, 8)
CORRECTIONS = ("bypass", "decoupled")
#: One denominator per rank, or per micro-batch: what T10 forbids.
DEFECTS = ("", "rank", "micro")
WORLD = 2


def samples() -> list[Sample]:
    """Eleven answers, so that one rank has a sample less and runs fillers; one group is short."""
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, temperature=0.7)[:-1]


def gradient_of(batch: Batch, max_samples: int, correction: str, defect: str) -> tuple[Tensor, dict[str, float]]:
    model = tiny_model(3)
    config = TrainerConfig(lr=0.0, max_grad_norm=1e9, correction=correction)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = GRPO(model, optimizer, config, dp_size=batch.dp_size, max_samples=max_samples)
    if defect == "rank":
        mine = float(batch.arrays()["loss_mask"].sum())
        trainer.denominator = lambda micro: mine  # type: ignore[method-assign]
    elif defect == "micro":
        trainer.denominator = lambda micro: max(float(micro["loss_mask"].sum()), 1.0)  # type: ignore[method-assign]
    metrics = trainer.step(batch)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]), metrics


def one_group_a_rank(rank: int, size: int) -> Batch:
    """Two groups dealt out so that each lies on one rank: of every minibatch one of two ranks has nothing."""
    ours = samples()[:8]
    dealt = [ours[at] for pair in zip(range(4), range(4, 8), strict=True) for at in pair]
    return make_batch(dealt, dp_rank=rank, dp_size=size, split="strided")


def weights_after(batch: Batch, **changes: Any) -> tuple[Tensor, dict[str, float]]:
    """What several optimizer steps on one batch leave."""
    model = tiny_model(3)
    config = TrainerConfig(**({"lr": 0.05, "warmup_steps": 3, "minibatches": 2, "epochs": 2} | changes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    metrics = GRPO(model, optimizer, config, dp_size=batch.dp_size, max_samples=3).step(batch)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), metrics


def broken_on_one_rank(rank: int, size: int) -> Batch:
    """A reward of one sample is so far off that the gradient of its rank is not finite."""
    ours = samples()
    ours[0].reward = -1e30
    return make_batch(ours, dp_rank=rank, dp_size=size, advantage="dr_grpo", n=7)


def skipped_then_trained(rank: int, size: int) -> tuple[list[Tensor], list[float]]:
    """Weights before, after a batch that cannot be trained, and after one that can; norms of both."""
    model = tiny_model(3)
    config = TrainerConfig(lr=0.05, warmup_steps=0)
    trainer = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.05), config, dp_size=size)

    def weights() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()

    found, skipped = [weights()], []
    for batch in (broken_on_one_rank(rank, size), make_batch(samples(), dp_rank=rank, dp_size=size)):
        skipped.append(trainer.step(batch)["skipped_steps"])
        found.append(weights())
    return found, skipped


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
        torch.save([len(batch), results, steps, skips], f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found: its number of samples, and gradient and metrics of every case."""
    folder = tmp_path_factory.mktemp("ranks")
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
    for _, _, steps, _ in ranks:
        found, found_metrics = steps[correction]
        assert float((found - wanted).abs().max()) < 1e-6
        assert found_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)
        assert found_metrics["optimizer_steps"] == 4


def test_ranks_skip_a_gradient_that_is_not_finite_together(ranks: list[Any]) -> None:
    """One rank's sample breaks it; both skip, and go on alike with the next batch."""
    for *_, ((before, between, after), skipped) in ranks:
        assert skipped == [1, 0]
        assert torch.equal(before, between)
        assert not torch.equal(between, after)
    assert torch.equal(ranks[0][3][0][2], ranks[1][3][0][2])
