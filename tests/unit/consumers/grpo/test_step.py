"""The GRPO step against a loss that is written out sample by sample, and the defects that it must show."""

import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import payloads
from penstock.config import TrainerConfig
from penstock.consumers.batch import advantages
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import losses
from penstock.consumers.grpo.policy import Policy
from penstock.consumers.grpo.step import GRPO, Micro
from penstock.errors import PayloadError
from penstock.payloads import Payload
from penstock.records.sample import Sample
from tests.batch_factory import EOS, gradient, logprobs_of, make_batch, make_samples, near_model, tiny_model

#: Largest difference of gradients, relative to the largest entry, that rounding may make.
TOLERANCE = 1e-5
TEMPERATURE = 0.7


def config(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**({"lr": 0.1, "warmup_steps": 0, "max_grad_norm": 1e9} | changes))


def grpo(model: torch.nn.Module, **changes: Any) -> GRPO:
    """A trainer whose step leaves the weights as they are, for a look at the gradient."""
    keywords = {key: changes.pop(key) for key in ("max_samples",) if key in changes}
    return GRPO(model, torch.optim.SGD(model.parameters(), lr=0.0), config(**changes), **keywords)


@cache
def draw_once() -> list[Sample]:
    return make_samples({4: tiny_model(1), 5: tiny_model(2)}, temperature=TEMPERATURE)


def drawn() -> list[Sample]:
    """Answers that two policies drew in turn, at a temperature that is not 1; versions 4 and 5."""
    return copy.deepcopy(draw_once())


def expected_gradient(
    model: torch.nn.Module, samples: Sequence[Sample], correction: str = "bypass", old: torch.nn.Module | None = None
) -> Tensor:
    """T9 to T11 in plain words: no padding, no batch, double precision, one sample after the other."""
    settings = config()
    num_tokens = sum(sum(sample.generated) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        rewards = [float(other.reward or 0) for other in samples if other.job.id == sample.job.id]
        advantage = (float(sample.reward or 0) - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
        theta = logprobs_of(model, sample.tokens, sample.job.sampling["temperature"])
        with torch.no_grad():
            proximal = logprobs_of(old or model, sample.tokens, sample.job.sampling["temperature"])
        for t, mu in enumerate(sample.logprobs):
            if not sample.generated[t]:
                continue
            base, weight = (
                (mu, 1.0)
                if correction == "bypass"
                else (
                    float(proximal[t]),
                    min(math.exp(float(proximal[t]) - mu), losses.DEFAULT_CAP),
                )
            )
            ratio = torch.exp(theta[t] - base)
            clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
            objective = torch.minimum(ratio * advantage, clipped * advantage)
            if advantage < 0:
                objective = objective.clamp(min=3.0 * advantage)
            loss = loss - weight * objective / num_tokens
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return gradient(model)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@cache
def wanted_once(correction: str) -> Tensor:
    return expected_gradient(near_model(), draw_once(), correction)


def gradient_error(batch: Batch, correction: str = "bypass", **changes: Any) -> float:
    """For a batch of ``drawn()``: how far the step's gradient is from the one written out.

    This is the check that the seeded defects must turn red.
    """
    model = near_model()
    wanted = wanted_once(correction)
    grpo(model, correction=correction, **changes).step(batch)
    return error(gradient(model), wanted)


@pytest.mark.parametrize("correction", ["bypass", "decoupled"])
@pytest.mark.parametrize("limits", [{}, {"max_samples": 1}, {"max_samples": 5}, {"max_tokens": 60}])
def test_T9_T10_the_gradient_is_the_one_written_out(correction: str, limits: dict[str, int]) -> None:
    samples = drawn()
    assert gradient_error(make_batch(samples), correction, **limits) < TOLERANCE


def test_T9_pi_old_is_frozen_at_the_batch_s_first_step() -> None:
    samples = drawn()
    batch = make_batch(samples)
    model, old = near_model(), near_model()
    trainer = GRPO(model, torch.optim.SGD(model.parameters(), lr=0.2), config(lr=0.2, correction="decoupled", epochs=2))
    before_last: list[Tensor] = []
    apply = trainer.apply

    def watched(batch: Batch) -> float:
        before_last.append(gradient(model))
        if len(before_last) == 2:
            twin = tiny_model()
            twin.load_state_dict(model.state_dict())
            wanted.append(expected_gradient(twin, samples, "decoupled", old=old))
            wrong.append(expected_gradient(twin, samples, "decoupled", old=None))
        return apply(batch)

    wanted: list[Tensor] = []
    wrong: list[Tensor] = []
    trainer.apply = watched  # type: ignore[method-assign]
    trainer.step(batch)
    assert error(before_last[1], wanted[0]) < TOLERANCE
    assert error(before_last[1], wrong[0]) > 100 * TOLERANCE


def test_padding_changes_nothing() -> None:
    samples = drawn()
    model = near_model()
    with torch.no_grad():
        found = grpo(model).logprobs(make_batch(samples).padded())
        for i, sample in enumerate(samples):
            alone = logprobs_of(model, sample.tokens, TEMPERATURE)
            np.testing.assert_allclose(found[i, : len(sample.tokens)], alone, atol=2e-5)


def test_T6_the_reported_difference_is_that_of_engine_and_trainer() -> None:
    """Fresh tokens have one set of weights on both sides; older ones have not."""
    samples = drawn()
    metrics = grpo(tiny_model(2)).step(make_batch(samples, train_version=5))
    assert metrics["logprob_diff_fresh_max"] < 1e-4
    assert metrics["logprob_diff_max"] > 0.1
    fresh = [
        abs(theta - mu)
        for sample in samples
        for theta, mu, version in zip(
            logprobs_of(tiny_model(2), sample.tokens, TEMPERATURE).tolist(),
            sample.logprobs,
            sample.versions,
            strict=True,
        )
        if version >= 0
    ]
    assert metrics["logprob_diff_mean"] == pytest.approx(statistics.mean(fresh), rel=1e-3)


# The seeded defects. Each is put in at one place; the check beside it passes without and fails with it.


def test_T6_logprobs_shifted_by_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn()
    honest = gradient_error(make_batch(samples))
    original = Policy.forward
    monkeypatch.setattr(Policy, "forward", lambda self, micro: original(self, micro).roll(1, dims=1))
    assert honest < TOLERANCE
    assert gradient_error(make_batch(samples)) > 100 * TOLERANCE


def test_T6_behaviour_logprobs_shifted_by_one_are_seen_in_the_metrics() -> None:
    def fresh_difference(shift: int) -> float:
        samples = make_samples({5: tiny_model(2)}, temperature=TEMPERATURE)
        for sample in samples:
            start = sample.prompt_length
            answer = sample.logprobs[start:]
            sample.logprobs[start:] = answer[-shift:] + answer[:-shift] if shift else answer
        return grpo(tiny_model(2)).step(make_batch(samples, train_version=5))["logprob_diff_fresh_max"]

    assert fresh_difference(0) < 1e-4
    assert fresh_difference(1) > 0.1


def version_error(batch: Batch) -> float:
    """Largest difference of a logprob from a pass with the weights of the version that the token carries (T6)."""
    models = {4: tiny_model(1), 5: tiny_model(2)}
    data = batch.padded()
    largest = 0.0
    with torch.no_grad():
        found = {version: grpo(model).logprobs(data) for version, model in models.items()}
    for version, logprobs in found.items():
        of_it = data["versions"] == version
        assert torch.equal(of_it, data["staleness"] == batch.train_version - version)
        largest = max(largest, float((logprobs - data["logprobs"])[of_it].abs().max()))
    return largest


@pytest.mark.parametrize("shift", [-1, 1])
def test_T6_a_version_boundary_shifted_by_one_is_seen(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn()
    honest = version_error(make_batch(samples))
    masked = make_batch(samples, mask_below=5, train_version=9)
    decode = payloads.decode

    def off_by_one(data: bytes, sample_id: str, checksum: int | None = None) -> Payload:
        payload = decode(data, sample_id, checksum)
        (first, boundary, old), (also, last, new) = payload.spans
        assert boundary == also
        return replace(payload, spans=((first, boundary + shift, old), (boundary + shift, last, new)))

    monkeypatch.setattr(payloads, "decode", off_by_one)
    assert honest < 1e-4
    assert version_error(make_batch(samples)) > 0.1
    # And with a bound between the two, by count.
    with pytest.raises(PayloadError, match="loss tokens are"):
        masked.arrays()


def test_T8_a_masked_eos_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn()
    data = make_batch(samples).padded()
    assert bool(data["loss_mask"][data["tokens"] == EOS].all())
    honest = gradient_error(make_batch(samples))
    decode = payloads.decode

    def without_eos(data: bytes, sample_id: str, checksum: int | None = None) -> Payload:
        payload = decode(data, sample_id, checksum)
        keep = np.where(payload.tokens == EOS, payloads.GENERATED, payloads.GENERATED | payloads.LOSS)
        return replace(payload, mask=payload.mask & keep.astype(np.uint8))

    # Lost on the way to the trainer, the count of the manifest gives it away ...
    batch = make_batch(samples)
    monkeypatch.setattr(payloads, "decode", without_eos)
    with pytest.raises(PayloadError, match="loss tokens are"):
        batch.arrays()
    # ... and left out by everybody from the start, the gradient does.
    assert honest < TOLERANCE
    assert gradient_error(make_batch(samples)) > 100 * TOLERANCE


def test_T11_advantages_across_groups_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn()
    honest = gradient_error(make_batch(samples))
    original = advantages.group_advantages
    monkeypatch.setattr(
        advantages, "group_advantages", lambda rewards, groups, *more: original(rewards, ["all"] * len(groups), *more)
    )
    assert honest < TOLERANCE
    assert gradient_error(make_batch(samples)) > 100 * TOLERANCE


def test_T9_both_corrections_at_once_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn()
    honest = gradient_error(make_batch(samples))
    original = GRPO.token_loss

    def twice(self: GRPO, micro: Micro, logprobs: Tensor, old: Tensor | None) -> losses.TokenLoss:
        of = original(self, micro, logprobs, old)
        weight = torch.where(micro["loss_mask"], logprobs - micro["logprobs"], 0.0).exp().clamp(max=2.0).detach()
        return of._replace(loss=weight * of.loss)

    monkeypatch.setattr(GRPO, "token_loss", twice)
    assert honest < TOLERANCE
    assert gradient_error(make_batch(samples)) > 100 * TOLERANCE


def test_T6_an_ignored_temperature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = drawn()
    honest = gradient_error(make_batch(samples))
    original = losses.chosen_logprobs

    def at_1(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
        return original(logits, tokens, torch.ones_like(temperatures))

    monkeypatch.setattr(losses, "chosen_logprobs", at_1)
    assert honest < TOLERANCE
    assert gradient_error(make_batch(samples)) > 100 * TOLERANCE
    assert grpo(tiny_model(2)).step(make_batch(samples, train_version=5))["logprob_diff_fresh_max"] > 0.1


# What a step does beside its gradient.


def test_a_step_clips_warms_up_and_counts() -> None:
    model = near_model()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = GRPO(
        model, torch.optim.SGD(model.parameters(), lr=0.5), config(lr=0.5, warmup_steps=4, max_grad_norm=1e-3)
    )
    batch = make_batch(drawn())
    metrics = trainer.step(batch)
    moved = math.sqrt(
        sum(float((p.detach() - q).pow(2).sum()) for p, q in zip(model.parameters(), before, strict=True))
    )
    assert metrics["grad_norm"] > 1e-3
    assert moved == pytest.approx(0.5 / 4 * 1e-3, rel=1e-2)
    rates = [metrics["lr"]] + [trainer.step(batch)["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    assert trainer.steps == 6
    assert metrics["tokens"] == batch.counts["loss_tokens"]


def test_a_step_raises_the_chance_of_what_was_rewarded() -> None:
    samples = make_samples({5: tiny_model(2)}, groups=2)
    batch = make_batch(samples, train_version=5)
    model = tiny_model(2)
    before = [float(logprobs_of(model, s.tokens, 1.0).detach().sum()) for s in samples]
    GRPO(model, torch.optim.SGD(model.parameters(), lr=0.01), config(lr=0.01)).step(batch)
    after = [float(logprobs_of(model, s.tokens, 1.0).detach().sum()) for s in samples]
    gains = np.array(after) - np.array(before)
    rewards = np.array([s.reward for s in samples]).reshape(2, 4)
    for group, gain in zip(rewards, gains.reshape(2, 4), strict=True):
        assert gain[group.argmax()] > gain[group.argmin()]


def test_a_batch_without_loss_changes_nothing() -> None:
    model = near_model()
    before = [p.detach().clone() for p in model.parameters()]
    batch = make_batch(drawn(), mask_below=6)
    assert GRPO(model, torch.optim.AdamW(model.parameters()), config()).step(batch)["skipped"] == 1
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_restored_trainer_goes_on_as_the_first_would() -> None:
    batch = make_batch(drawn())

    def fresh() -> GRPO:
        model = near_model()
        return GRPO(model, torch.optim.AdamW(model.parameters(), lr=0.01), config(lr=0.01, warmup_steps=3))

    first, second = fresh(), fresh()
    first.step(batch)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for trainer in (first, second):
        trainer.step(batch)
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
