"""Several optimizer steps on one batch: whole groups, π_old from before the first, denominators of each step."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.consumers.batch import advantages
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.step import GRPO, Micro
from penstock.errors import ConfigError
from penstock.protocol import partition
from penstock.records.manifest import Row
from penstock.records.sample import Sample
from tests.batch_factory import gradient, logprobs_of, make_batch, make_samples, near_model, tiny_model

TEMPERATURE = 0.7


def rows_of(groups: Sequence[Sequence[int]]) -> list[Row]:
    return [
        Row(f"toy/0/{g}", k, "t", "s", 0, 0, length, 1, length - 1, length - 1, 1, 1, 1, 0.0, "completed")
        for g, lengths in enumerate(groups)
        for k, length in enumerate(lengths)
    ]


uneven_groups = st.lists(st.lists(st.integers(1, 4000), min_size=1, max_size=5), max_size=20)


@settings(deadline=None)
@given(uneven_groups, st.integers(1, 6), st.integers(0, 3))
def test_T10_minibatches_keep_groups_whole_and_miss_no_row(groups: list[list[int]], count: int, seed: int) -> None:
    rows = rows_of(groups)
    parts = partition.minibatches(rows, count, seed)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    jobs = [{rows[i].job for i in part} for part in parts]
    assert sum(map(len, jobs)) == len(groups)
    assert max(map(len, jobs)) <= -(-len(groups) // count)
    assert parts == partition.minibatches(list(rows), count, seed)
    assert sorted(parts) == sorted(partition.minibatches(rows, count, seed + 1))


def test_a_number_of_minibatches_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 minibatches"):
        partition.minibatches(rows_of([[1]]), 0)
    with pytest.raises(ValidationError, match="minibatches is 5, but a batch has only 4 groups"):
        TrainerConfig(batch_groups=4, minibatches=5)
    TrainerConfig(batch_groups=4, minibatches=5, subscription={"unit": "tokens", "size": 4096})


@pytest.mark.parametrize("dp_size", [1, 2, 5])
def test_T10_each_minibatch_has_its_own_counts_on_every_rank(dp_size: int) -> None:
    samples = make_samples({4: tiny_model(1), 5: tiny_model(2)})
    whole = make_batch(samples, mask_below=5)
    ranks = [whole.share(rank, dp_size) for rank in range(dp_size)]
    by_rank = [list(rank.minibatches(2, max_samples=2)) for rank in ranks]
    seen: list[int] = []
    for step, part in enumerate(partition.minibatches(whole.all_rows, 2, whole.manifest.seed)):
        micros = [micro for minibatches in by_rank for micro in minibatches[step]]
        rows = [whole.all_rows[i] for i in part]
        wanted = {
            "loss_tokens": sum(row.num_loss for row in rows),
            "loss_samples": len(rows),
            "samples": len(rows),
            "groups": len({row.job for row in rows}),
        }
        assert all(micro["counts"] == wanted for micro in micros)
        assert len({len(minibatches[step]) for minibatches in by_rank}) == 1
        assert sum(int(micro["loss_mask"].sum()) for micro in micros) == wanted["loss_tokens"]
        held = sorted(int(row) for micro in micros for row in micro["rows"] if row >= 0)
        assert held == part
        seen += held
    assert sorted(seen) == list(range(len(samples)))
    (one,) = ranks[0].minibatches(1)
    assert one[0]["counts"] == whole.counts


# --- against the steps written out ------------------------------------------------------------------------------------


def drawn() -> list[Sample]:
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, temperature=TEMPERATURE)


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**({"lr": 0.05, "warmup_steps": 0, "max_grad_norm": 1e9} | changes))


def logprobs_np(model: torch.nn.Module, samples: Sequence[Sample]) -> list[Tensor]:
    return [logprobs_of(model, sample.tokens, TEMPERATURE) for sample in samples]


def step_np(
    model: torch.nn.Module, samples: Sequence[Sample], part: Sequence[int], old: Sequence[Tensor], of: TrainerConfig
) -> Tensor:
    """Gradient of one optimizer step in plain words; advantages of the whole batch, denominators of the part."""
    given = advantages.group_advantages([float(s.reward or 0) for s in samples], [s.job.id for s in samples])
    sums, weights = torch.zeros((), dtype=torch.float64), []
    for i in part:
        sample, advantage = samples[i], float(given[i])
        theta = logprobs_of(model, sample.tokens, TEMPERATURE)
        mu = torch.tensor(sample.logprobs, dtype=torch.float64)
        at = [t for t, bears in enumerate(sample.generated) if bears]
        if of.correction == "bypass":
            ratio, weight = (theta - mu).exp(), torch.ones_like(mu)
        else:
            ratio, weight = (theta - old[i]).exp(), (old[i] - mu).exp().clamp(max=2.0)
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        objective = objective.clamp(min=3 * advantage) if advantage < 0 else objective
        each = (-weight * objective)[at]
        weights.append(len(at))
        sums = sums + (each.mean() if of.aggregation == "sample" else each.sum())
    loss = sums / (len(part) if of.aggregation == "sample" else sum(weights))
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return gradient(model)


@pytest.mark.parametrize("limits", [{}, {"max_samples": 2}])
@pytest.mark.parametrize(
    "changes",
    [
        {"correction": "decoupled", "minibatches": 3},
        {"correction": "decoupled", "minibatches": 2, "epochs": 2, "aggregation": "sample"},
        {"correction": "bypass", "minibatches": 2, "epochs": 2},
    ],
    ids=lambda c: "-".join(map(str, c.values())),
)
def test_T9_T10_every_optimizer_step_has_the_gradient_written_out(
    changes: dict[str, Any], limits: dict[str, int]
) -> None:
    samples, settings = drawn(), config(**changes)
    batch = make_batch(samples)
    model = near_model()
    with torch.no_grad():
        old = logprobs_np(near_model(), samples)
    trainer = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.05), settings, **limits)
    apply, errors = trainer.apply, []
    parts = partition.minibatches(batch.all_rows, settings.minibatches) * settings.epochs

    def watched(batch: Batch) -> Any:
        found, twin = gradient(model), tiny_model()
        twin.load_state_dict(model.state_dict())
        wanted = step_np(twin, samples, parts[len(errors)], old, settings)
        errors.append(float((found - wanted).abs().max() / wanted.abs().max()))
        return apply(batch)

    trainer.apply = watched  # type: ignore[method-assign]
    metrics = trainer.step(batch)
    assert len(errors) == settings.minibatches * settings.epochs == metrics["optimizer_steps"] == trainer.steps
    assert max(errors) < 2e-5
    assert metrics["tokens"] == batch.counts["loss_tokens"]


def trained(batch: Batch, **changes: Any) -> tuple[np.ndarray[Any, Any], dict[str, float]]:
    model = near_model()
    metrics = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.05), config(**changes)).step(batch)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy(), metrics


def test_T9_decoupled_is_more_than_a_weight_only_with_several_steps() -> None:
    batch = make_batch(drawn())
    for count, equal in ((1, True), (3, False)):
        mine, metrics = trained(batch, correction="decoupled", minibatches=count)
        other, _ = trained(batch, loss="reinforce", correction="truncated", minibatches=count)
        assert np.allclose(mine, other, atol=1e-7) == equal
        assert (metrics["clip_frac"] == 0) == equal


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"correction": "decoupled"}, 1),
        ({"correction": "decoupled", "minibatches": 3}, 2),
        ({"correction": "decoupled", "epochs": 2}, 3),
        ({"correction": "bypass", "minibatches": 3}, 1),
    ],
)
def test_a_pass_for_pi_old_is_made_only_where_it_says_something(
    changes: dict[str, Any], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, seen = make_batch(drawn()), 0
    original = GRPO.logprobs

    def counted(self: GRPO, micro: Micro) -> Tensor:
        nonlocal seen
        seen += len(micro["lengths"])
        return original(self, micro)

    monkeypatch.setattr(GRPO, "logprobs", counted)
    trained(batch, **changes)
    assert seen == passes * len(batch)


@pytest.mark.parametrize("correction", ["bypass", "decoupled"])
def test_T6_the_reported_difference_is_of_the_policy_before_its_first_step(correction: str) -> None:
    """Engine and trainer are the same program here; what the first steps change is no difference between them."""
    model = tiny_model(2)
    batch = make_batch(make_samples({6: tiny_model(2)}, temperature=TEMPERATURE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = GRPO(model, optimizer, config(lr=1.0, correction=correction, minibatches=3, epochs=2))
    metrics = trainer.step(batch)
    assert metrics["optimizer_steps"] == 6
    assert metrics["ratio_max"] > 1.2, "the policy moved"
    assert 0 <= metrics["logprob_diff_fresh_mean"] <= metrics["logprob_diff_fresh_max"] < 1e-5
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["tokens"] == batch.counts["loss_tokens"]


def test_T9_rounding_between_engine_and_trainer_stops_no_sample_of_gspo(caplog: pytest.LogCaptureFixture) -> None:
    """A bfloat16 engine: log μ is off by 1e-3, and no weight has changed."""
    samples = make_samples({6: tiny_model(2)}, groups=8, temperature=TEMPERATURE)
    noise = torch.Generator().manual_seed(3)
    for sample in samples:
        off = torch.randn(len(sample.logprobs), generator=noise).tolist()
        sample.logprobs = [
            logprob + 1e-3 * away if drawn else 0.0
            for logprob, away, drawn in zip(sample.logprobs, off, sample.generated, strict=True)
        ]
    found = {}
    for over in ({}, {"correction": "bypass"}):
        model = tiny_model(2)
        wanted = TrainerConfig(loss="gspo", lr=0.0, warmup_steps=0, **over)
        trainer = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), wanted)
        found[wanted.correction] = trainer.step(make_batch(samples))["clip_frac"]
    assert found["decoupled"] == 0
    assert found["bypass"] > 0.1, "which is why it is not the default, and warned of"
    (said,) = caplog.messages
    assert "trainer.loss gspo with trainer.correction bypass clips at 0.0003 and 0.0004 what rounding" in said


def test_warm_up_counts_optimizer_steps() -> None:
    model = near_model()
    trainer = GRPO(
        model, torch.optim.SGD(model.parameters(), lr=1.0), config(lr=1.0, warmup_steps=8, minibatches=3, epochs=2)
    )
    rates = [trainer.step(make_batch(drawn()))["lr"] for _ in range(2)]
    assert rates == [6 / 8, 1.0]
    assert trainer.steps == 12


def test_a_minibatch_without_loss_is_no_step() -> None:
    samples = copy.deepcopy(drawn())
    first = samples[0].job.id
    for sample in samples:
        if sample.job.id == first:
            sample.loss_mask = [0] * len(sample.tokens)
    _, metrics = trained(make_batch(samples), minibatches=3)
    assert metrics["optimizer_steps"] == 2
