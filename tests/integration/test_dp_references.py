"""T10, T11, T14: what comes of a teacher and of a reference policy is the same on two ranks, over gloo, and on one."""

import copy
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import step
from penstock.consumers.grpo.policy import Policy
from penstock.consumers.grpo.shards import shard
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.grpo.train_rows import Ask, TrainRow
from penstock.errors import PayloadError, PenstockError
from penstock.names import REFERENCE_LOGPROBS, STEP_REWARDS, TEACHER_LOGPROBS
from penstock.payloads import sides
from penstock.records.sample import Sample
from tests.batch_factory import gradient, logprobs_of, make_samples, near_model, tiny_model, with_beside

WORLD = 2
#: Of one rank for another: a test that fails ends.
LONGEST_WAIT = timedelta(minutes=5)
SEVERAL = {"lr": 0.05, "minibatches": 2, "epochs": 2}
TOLD = ("loss", "ref_kl", "teacher_kl", "grad_norm", "tokens")
SEEDS = {TEACHER_LOGPROBS: 7, REFERENCE_LOGPROBS: 3}


class Case(NamedTuple):
    settings: Mapping[str, Any]
    #: Side arrays that the samples have.
    sides: str = ""
    #: The trainer's own reference.
    own: bool = False
    temperature: float = 1.0
    #: Of the cut.
    mask_below: int = -1
    #: Rows that a hook takes the loss off.
    removed: tuple[int, ...] = ()
    #: Asked as ``hooks.postprocess``.
    postprocess: Ask | None = None


def _kl(place: str, **more: Any) -> dict[str, Any]:
    return {"kl": {"weight": 0.5, "place": place} | more}


def without_ends(batch: Batch, rows: list[TrainRow]) -> None:
    """Take the loss off the last token of every second sample, and weigh the others."""
    for row in rows:
        if row.index % 2:
            row.loss_mask[-1] = False
        else:
            row.advantages = row.advantages * (2 + row.index)


CASES = {
    "KL in the loss, own reference": Case(_kl("loss"), own=True, temperature=0.7),
    "KL in the loss, frozen model": Case(_kl("loss", estimator="k2"), REFERENCE_LOGPROBS, mask_below=5),
    "KL in the reward, own reference": Case(_kl("reward"), own=True, temperature=0.7),
    "KL in the reward, frozen model": Case(_kl("reward", estimator="k1"), REFERENCE_LOGPROBS),
    "KL in the reward, masks": Case(_kl("reward"), REFERENCE_LOGPROBS, mask_below=5, removed=(1, 6)),
    "KL in the reward, steps": Case(_kl("reward") | SEVERAL, own=True),
    "distill alone": Case({"distill": {}}, TEACHER_LOGPROBS),
    "distill with rewards, truncated": Case(
        {"distill": {"with_rewards": True}, "loss": "reinforce"}, TEACHER_LOGPROBS, mask_below=5
    ),
    "rewards of steps": Case({"process": {"weight": 0.5}}, STEP_REWARDS, mask_below=5),
    "rewards of steps too, removed": Case({"process": {"with_rewards": True}} | SEVERAL, STEP_REWARDS, removed=(1, 6)),
    "rows postprocessed": Case(SEVERAL, postprocess=without_ends, mask_below=5),
    "rows postprocessed, by sample": Case({"aggregation": "sample"}, postprocess=without_ends),
    "distill, decoupled": Case({"distill": {}, "correction": "decoupled"} | SEVERAL, TEACHER_LOGPROBS),
    "distill with rewards, gspo": Case(
        {"distill": {"with_rewards": True}, "loss": "gspo", "clip_low": 0.2, "clip_high": 0.2} | SEVERAL,
        TEACHER_LOGPROBS,
        removed=(0,),
    ),
}
#: What must be seen: penalties, and rewards of steps, of a rank alone.
ADDED_UP = [name for name in CASES if "reward," in name or "steps" in CASES[name].sides]
#: As tensors that ranks add up begin: [3, N] of penalties, [groups] of steps.
THREE = 3


def samples_of(temperature: float) -> list[Sample]:
    """Eight answers in groups of three, three and two: ranks have unequal shares, and no group to themselves."""
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, groups=3, n=3, temperature=temperature)[:-1]


@torch.no_grad()
def said(samples: list[Sample], name: str) -> dict[str, NDArray[Any]]:
    """What a teacher or a reference says of what follows each prompt; rewards of one to four steps."""
    if name == STEP_REWARDS:
        rng = np.random.default_rng(5)
        counts = {one.id: int(rng.integers(1, 5)) for one in samples}
        ends = {
            one.id: np.sort(rng.choice(len(one.tokens) - one.prompt_length, counts[one.id], replace=False))
            for one in samples
        }
        return {one: np.stack([at, rng.random(len(at))], axis=1).astype(np.float32) for one, at in ends.items()}
    model = tiny_model(SEEDS[name])
    return {one.id: logprobs_of(model, one.tokens, 1.0)[one.prompt_length :].float().numpy() for one in samples}


def batch_of(case: Case, rank: int, size: int) -> Batch:
    samples = samples_of(case.temperature)
    name = case.sides or TEACHER_LOGPROBS
    beside = said(samples, name) if case.sides else {}
    batch = with_beside(samples, name, beside, mask_below=case.mask_below, dp_rank=rank, dp_size=size)
    batch.remove(case.removed)
    return batch


def learner_of(case: Case, size: int, max_samples: int | None) -> GRPO:
    policy = Policy(near_model(), torch.float32)
    if size > 1:
        shard(policy)
    config = TrainerConfig(**({"lr": 0.0, "max_grad_norm": 1e9, "warmup_steps": 0} | dict(case.settings)))
    reference = tiny_model(SEEDS[REFERENCE_LOGPROBS]) if case.own else None
    optimizer = torch.optim.SGD(policy.parameters(), lr=config.lr)
    learner = GRPO(policy, optimizer, config, dp_size=size, max_samples=max_samples, reference=reference)
    learner.postprocess = case.postprocess
    return learner


def gradient_of(case: Case, rank: int = 0, size: int = 1, max_samples: int | None = None) -> tuple[Tensor, Any]:
    """That of the last optimizer step, and metrics."""
    trainer = learner_of(case, size, max_samples)
    metrics = trainer.step(batch_of(case, rank, size))
    return gradient(trainer.model), {name: metrics[name] for name in TOLD if name in metrics}


def of_own_rank_alone(case: Case, rank: int) -> Tensor:
    """The gradient where ranks do not add up what advantages are made of."""
    trainer = learner_of(case, WORLD, None)
    trainer._ranks.add_up = lambda tensor: None if tensor.shape[0] == THREE else dist.all_reduce(tensor)  # type: ignore[method-assign]
    trainer.step(batch_of(case, rank, WORLD))
    return gradient(trainer.model)


def without_its_payload(batch: Batch) -> None:
    assert isinstance(batch.payloads, dict)
    first = batch.manifest.samples()[0].sample
    batch.payloads[first] = batch.payloads[first][:-8]


def without_its_array(batch: Batch) -> None:
    """Of one sample the array is there, and it is not what was committed."""
    read = batch._opened._read_sides
    assert read is not None
    first = batch.manifest.samples()[0]

    def damaged(rows: Any, name: str) -> dict[str, bytes | None]:
        wrong = sides.pack(name, np.zeros(1, np.float32), first.sample)
        return {sample: wrong if sample == first.sample else data for sample, data in read(rows, name).items()}

    batch._opened._read_sides = damaged


#: What one rank alone can see, and what another one would wait for in vain.
DAMAGES: dict[str, tuple[str, Callable[[Batch], None]]] = {
    "payload": ("distill alone", without_its_payload),
    "array": ("distill alone", without_its_array),
    "payload, KL in the reward": ("KL in the reward, own reference", without_its_payload),
    "array, rewards of steps": ("rewards of steps", without_its_array),
    "array, KL in the reward": ("KL in the reward, frozen model", without_its_array),
}


def refused(name: str, rank: int) -> str:
    """What a rank says of a batch of which one sample cannot be read; '' where it goes on."""
    case, damage = DAMAGES[name]
    batch = batch_of(CASES[case], rank, WORLD)
    damage(batch)
    try:
        learner_of(CASES[case], WORLD, None).step(batch)
    except PenstockError as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=LONGEST_WAIT
    )
    try:
        found = {(name, most): gradient_of(case, rank, WORLD, most) for name, case in CASES.items() for most in (1, 3)}
        alone = {name: of_own_rank_alone(CASES[name], rank) for name in ADDED_UP}
        torch.save([found, alone, {name: refused(name, rank) for name in DAMAGES}], f"{folder}/rank{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(str(folder),), nprocs=WORLD)
    return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("max_samples", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_T10_T11_two_ranks_have_the_gradient_of_one(ranks: list[Any], name: str, max_samples: int) -> None:
    wanted, metrics = gradient_of(CASES[name])
    case = CASES[name]
    assert metrics.keys() & {"ref_kl", "teacher_kl"} or case.postprocess or "process" in case.settings
    for of_rank, *_ in ranks:
        found, found_metrics = of_rank[name, max_samples]
        assert difference(found, wanted) < 1e-4
        assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ADDED_UP)
def test_T11_what_a_rank_takes_for_the_whole_is_seen(ranks: list[Any], name: str) -> None:
    wanted, _ = gradient_of(CASES[name])
    assert any(difference(alone[name], wanted) > 1e-2 for _, alone, _ in ranks)


def test_T11_penalties_over_the_loss_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["KL in the reward, masks"]
    wanted, _ = gradient_of(case)
    real = step.distances

    def over_loss_tokens(*values: Any) -> Tensor:
        found = copy.copy(real(*values))
        found[0] = found[1]
        return found

    monkeypatch.setattr(step, "distances", over_loss_tokens)
    found, _ = gradient_of(case)
    assert difference(found, wanted) > 1e-2


@pytest.mark.parametrize("name", DAMAGES)
def test_T14_what_one_rank_cannot_read_stops_all(ranks: list[Any], name: str) -> None:
    """Neither waits for the other in a collective."""
    kinds = sorted(refusals[name].partition(":")[0] for *_, refusals in ranks)
    assert kinds == ["PayloadError", "PenstockError"], [refusals[name] for *_, refusals in ranks]
    told = next(refusals[name] for *_, refusals in ranks if refusals[name].startswith("PenstockError"))
    assert "Another rank could not take its share of batch 1" in told


def test_T14_an_array_that_a_sample_lacks_is_seen_by_every_rank() -> None:
    samples = samples_of(1.0)
    beside = said(samples, TEACHER_LOGPROBS)
    del beside[samples[0].id]
    for rank in range(WORLD):
        batch = with_beside(samples, TEACHER_LOGPROBS, beside, dp_rank=rank, dp_size=WORLD)
        # By the manifest: no process group is there to ask others in.
        with pytest.raises(PayloadError, match=f"sample {samples[0].id} lacks side array"):
            learner_of(CASES["distill alone"], 1, None)._parts(batch)
