"""Losses and what they are divided by, against versions written out in numpy: value and gradient.

Rows hold observations between two drawn parts, padding, and one has no token that bears loss.
"""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from penstock.config import TrainerConfig
from penstock.config.trainer import LOSS_DEFAULTS
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo import losses
from penstock.consumers.grpo.step import GRPO
from penstock.records.job import Job
from penstock.records.sample import Sample
from tests.batch_factory import gradient, logprobs_of, make_batch, near_model, tiny_model

LOW, HIGH, CAP, DUAL = 0.03, 0.05, 2.0, 3.0
Array = NDArray[Any]

torch.manual_seed(0)
THETA, OLD, MU = (torch.empty(4, 12, dtype=torch.float64).uniform_(-1.6, -0.4) for _ in range(3))
ADVANTAGES = torch.tensor([[-1.1], [0.7], [-0.4], [0.5]], dtype=torch.float64).expand(4, 12).contiguous()
#: Lengths 12, 9, 12, 7; an observation at 4 and 5 of rows 0 and 2; nothing to train in row 3.
LENGTHS = [12, 9, 12, 7]
MASK = torch.tensor([[t >= 2 and t < n and not (r % 2 == 0 and t in (4, 5)) for t in range(12)] for r, n in
                     enumerate(LENGTHS)])  # fmt: skip
MASK[3] = False

theta0, old0, mu0, adv, mask = (tensor.numpy() for tensor in (THETA, OLD, MU, ADVANTAGES, MASK))


def clip(ratio: Array) -> Array:
    return np.minimum(np.maximum(ratio, 1 - LOW), 1 + HIGH)


def objective(ratio: Array, advantage: Array) -> Array:
    """min(r A, clip(r) A), and where A < 0 not below the dual clip."""
    plain = np.minimum(ratio * advantage, clip(ratio) * advantage)
    return np.where(advantage < 0, np.maximum(plain, DUAL * advantage), plain)


def ppo_np(theta: Array, proximal: Array) -> Array:
    return np.where(mask, -objective(np.exp(theta - proximal), adv), 0)


def gspo_np(theta: Array, proximal: Array) -> Array:
    out = np.zeros_like(theta)
    for row in range(len(theta)):
        drawn = np.flatnonzero(mask[row])
        if len(drawn):
            s = np.exp(sum(theta[row, t] - proximal[row, t] for t in drawn) / len(drawn))
            for t in drawn:
                out[row, t] = -objective(s, adv[row, t])
    return out


def cispo_np(theta: Array, proximal: Array) -> Array:
    weight = clip(np.exp(theta0 - proximal))  # of the point, not of the neighbour that the slope is taken to
    return np.where(mask, -weight * adv * theta, 0)


NUMPY = {"ppo": ppo_np, "gspo": gspo_np, "cispo": cispo_np}


def test_a_configuration_knows_every_loss_and_no_other() -> None:
    named = set(get_args(TrainerConfig.model_fields["loss"].annotation))
    without_ratio = {name for name, own in LOSS_DEFAULTS.items() if own.get("correction") == "truncated"}
    assert named == {*losses.RATIO_LOSSES, *without_ratio}
    assert without_ratio == {"reinforce"}
    assert set(LOSS_DEFAULTS) <= named


def slope(total: Callable[[Array], float]) -> Array:
    """Derivative of a number by every log π_θ, as a central difference."""
    step, out = 1e-6, np.zeros_like(theta0)
    for at in np.ndindex(*theta0.shape):
        up, down = theta0.copy(), theta0.copy()
        up[at] += step
        down[at] -= step
        out[at] = (total(up) - total(down)) / (2 * step)
    return out


def check(found: Callable[[Tensor], losses.TokenLoss], wanted: Callable[[Array], Array]) -> losses.TokenLoss:
    """Value per token, and gradient of their sum."""
    theta = THETA.clone().requires_grad_()
    loss = found(theta)
    (gradient,) = torch.autograd.grad(loss.loss.sum(), theta)
    np.testing.assert_allclose(loss.loss.detach().numpy(), wanted(theta0), atol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), slope(lambda t: float(wanted(t).sum())), atol=1e-6)
    return loss


@pytest.mark.parametrize("name", losses.RATIO_LOSSES)
def test_T9_a_ratio_loss_under_bypass_is_its_formula(name: str) -> None:
    loss = losses.RATIO_LOSSES[name]
    found = check(
        lambda theta: losses.bypass(theta, MU, ADVANTAGES, MASK, LOW, HIGH, loss=loss),
        lambda theta: NUMPY[name](theta, mu0),
    )
    assert 0 < int(found.clipped.sum()) < int(MASK.sum())
    assert not bool((found.clipped & ~MASK).any())


@pytest.mark.parametrize("name", losses.RATIO_LOSSES)
def test_T9_a_ratio_loss_under_decoupled_is_its_formula(name: str) -> None:
    loss = losses.RATIO_LOSSES[name]
    weight = np.minimum(np.exp(old0 - mu0), CAP)
    assert (weight[mask] == CAP).any()
    check(
        lambda theta: losses.decoupled(theta, OLD, MU, ADVANTAGES, MASK, LOW, HIGH, CAP, loss=loss),
        lambda theta: weight * NUMPY[name](theta, old0),
    )


def test_T9_truncated_importance_sampling_is_its_formula() -> None:
    weight = np.minimum(np.exp(theta0 - mu0), CAP)
    found = check(
        lambda theta: losses.truncated(theta, MU, ADVANTAGES, MASK, CAP),
        lambda theta: np.where(mask, -weight * adv * theta, 0),
    )
    assert torch.equal(found.clipped, MASK & torch.from_numpy(np.exp(theta0 - mu0) > CAP))
    assert bool(found.clipped.any())


def test_gspo_is_the_same_with_samples_end_to_end() -> None:
    def flat(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[row, :length] for row, length in enumerate(LENGTHS)])

    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    segments = losses.segments_of(ends)
    padded = losses.gspo(THETA, MU, ADVANTAGES, MASK, LOW, HIGH)
    packed = losses.gspo(flat(THETA), flat(MU), flat(ADVANTAGES), flat(MASK), LOW, HIGH, segments)
    torch.testing.assert_close(packed.loss, flat(padded.loss))
    assert torch.equal(packed.clipped, flat(padded.clipped))
    torch.testing.assert_close(
        losses.token_weights(flat(MASK), "sample", segments), flat(losses.token_weights(MASK, "sample"))
    )


def test_gspo_sees_no_observation() -> None:
    """What stands on tokens that nobody drew reaches neither the ratio nor its length."""
    plain = losses.gspo(THETA, MU, ADVANTAGES, MASK, LOW, HIGH)
    theta, mu = THETA.clone(), MU.clone()
    theta[~MASK], mu[~MASK] = 800.0, -torch.inf
    theta.requires_grad_()
    found = losses.gspo(theta, mu, ADVANTAGES, MASK, LOW, HIGH)
    (gradient,) = torch.autograd.grad(found.loss.sum(), theta)
    torch.testing.assert_close(found.loss.detach(), plain.loss)
    assert torch.isfinite(gradient).all()
    assert not gradient[~MASK].any()


# --- what the sum is divided by ---------------------------------------------------------------------------------------

AGGREGATIONS: dict[str, Callable[[list[list[float]], int], float]] = {
    "token": lambda rows, constant: sum(map(sum, rows)) / sum(map(len, rows)),
    "sample": lambda rows, constant: float(np.mean([np.mean(row) for row in rows if row])),
    "constant": lambda rows, constant: sum(map(sum, rows)) / (len(rows) * constant),
}


def two_turns(group: int, k: int, models: dict[int, torch.nn.Module]) -> Sample:
    """A prompt, an answer of version 4, an observation, an answer of version 5; logprobs near those of the model."""
    rng = np.random.default_rng(10 * group + k)
    sample = Sample(Job(f"toy/0/{group}", 3, sampling={"temperature": 0.7}), k)
    parts = [(None, 3), (4, 2 + k), (None, 2), (5, 0 if (group, k) == (1, 2) else 1 + 2 * group)]
    for version, count in parts:
        tokens = rng.integers(2, 16, count).tolist()
        sample.append(tokens, **({} if version is None else {"version": version, "logprobs": [0.0] * count}))
    sample.prompt_length = 3
    for version in (4, 5):
        truth = logprobs_of(models[version], sample.tokens, 0.7).tolist()
        for t, drawn_by in enumerate(sample.versions):
            if drawn_by == version:
                sample.logprobs[t] = truth[t] + float(rng.uniform(-0.4, 0.4))
    sample.reward, sample.status, sample.finish_reason = float(rng.random()), "completed", "stop"
    return sample


def settings(**changes: Any) -> TrainerConfig:
    return TrainerConfig(**({"lr": 0.0, "warmup_steps": 0, "max_grad_norm": 1e9} | changes))


COMBINATIONS = [
    {"loss": "ppo", "aggregation": "sample"},
    {"loss": "ppo", "aggregation": "constant", "constant_tokens": 11, "advantage": "dr_grpo"},
    {"loss": "ppo", "advantage": "rloo", "correction": "decoupled"},
    {"loss": "ppo", "advantage": "reinforce_pp_baseline"},
    {"loss": "gspo", "aggregation": "sample", "clip_low": 0.05, "clip_high": 0.1},
    {"loss": "gspo", "aggregation": "sample", "correction": "decoupled"},
    {"loss": "cispo", "clip_low": 1.0},
    {"loss": "reinforce", "correction": "truncated", "weight_cap": 1.1},
    {"loss": "ppo", "max_token_staleness": 0},
    {"loss": "gspo", "aggregation": "sample", "max_token_staleness": 0, "advantage": "reinforce_pp_baseline"},
]


def advantages_np(samples: list[Sample], kind: str, counts: list[int]) -> list[float]:
    rewards = [float(sample.reward or 0) for sample in samples]
    out = []
    for sample, reward in zip(samples, rewards, strict=True):
        mine = [r for s, r in zip(samples, rewards, strict=True) if s.job.id == sample.job.id]
        centred = reward - float(np.mean(mine))
        scale = {"grpo": 1 / (np.std(mine, ddof=1) + 1e-6), "rloo": len(mine) / (len(mine) - 1)}.get(kind, 1.0)
        out.append(centred * scale)
    if kind == "reinforce_pp_baseline":
        by_token = np.repeat(out, counts)
        out = [(value - by_token.mean()) / (by_token.std() + 1e-6) for value in out]
    return out


def loss_np(model: torch.nn.Module, samples: list[Sample], config: TrainerConfig) -> Tensor:
    """The whole objective in plain words: one sample after the other, no padding, double precision, by autograd."""
    limit = config.max_token_staleness
    bears = [[v >= 0 and (limit is None or 5 - v <= limit) for v in sample.versions] for sample in samples]
    given = advantages_np(samples, config.advantage, [sum(row) for row in bears])
    total, tokens = torch.zeros((), dtype=torch.float64), []
    cap = config.weight_cap or 2.0
    for sample, row, advantage in zip(samples, bears, given, strict=True):
        theta = logprobs_of(model, sample.tokens, 0.7)
        if not (at := [t for t, bearing in enumerate(row) if bearing]):
            tokens.append(theta[:0])
            continue
        mu = torch.tensor(sample.logprobs, dtype=torch.float64)
        decoupled = config.correction == "decoupled"
        proximal = theta.detach() if decoupled else mu
        weight = (theta.detach() - mu).exp().clamp(max=cap) if config.correction != "bypass" else torch.ones_like(mu)
        low, high = 1 - (config.clip_low or 0), 1 + (config.clip_high or 0)
        ratio = (theta - proximal).exp()
        if config.loss == "gspo":
            ratio = (theta - proximal)[at].mean().exp().expand_as(theta)
        if config.loss in ("ppo", "gspo"):
            each = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            each = each.clamp(max=-DUAL * advantage) if advantage < 0 else each
        elif config.loss == "cispo":
            each = -ratio.detach().clamp(low, high) * advantage * theta
        else:
            each = -advantage * theta
        tokens.append((weight * each)[at])
    if config.aggregation == "token":
        total = torch.cat(tokens).mean()
    elif config.aggregation == "sample":
        pairs = zip(tokens, samples, strict=True)
        total = torch.stack([one.sum() / sum(sample.generated) for one, sample in pairs if len(one)]).mean()
    else:
        total = torch.cat(tokens).sum() / (len(samples) * float(config.constant_tokens or 0))
    return total


def test_T10_what_expiry_leaves_of_an_answer_weighs_no_more_than_before() -> None:
    """100 tokens of a stale answer of which 5 bear loss still: each weighs a hundredth of it, not a fifth."""
    generated = torch.ones(2, 100, dtype=torch.bool)
    mask = generated.clone()
    mask[1, :95] = False
    weights = losses.token_weights(mask, "sample", generated=generated)
    assert weights[0].tolist() == pytest.approx([0.01] * 100)
    assert weights[1].tolist() == pytest.approx([0.0] * 95 + [0.01] * 5)
    segments = torch.arange(2).repeat_interleave(100)
    flat = losses.token_weights(mask.flatten(), "sample", segments, generated.flatten())
    torch.testing.assert_close(flat, weights.flatten())


@pytest.mark.parametrize("mask_below", [-1, 5])
def test_T10_every_token_weighs_the_same_however_much_of_its_answer_expired(mask_below: int) -> None:
    """The weights that a step uses, through the batch: 1 / generated on what bears loss, whatever expiry took."""
    models = {4: tiny_model(1), 5: tiny_model(2)}
    samples = [two_turns(group, k, models) for group in range(2) for k in range(3)]
    data = make_batch(samples, train_version=5, mask_below=mask_below).padded()
    found = losses.token_weights(data["loss_mask"], "sample", generated=data["generated"])
    for row, sample in enumerate(samples):
        bearing = [int(v >= max(mask_below, 0)) / sum(sample.generated) for v in sample.versions]
        assert found[row, : len(bearing)].tolist() == pytest.approx(bearing)


@pytest.mark.parametrize("changes", COMBINATIONS, ids=lambda c: "-".join(map(str, c.values())))
def test_T9_T10_T11_a_step_has_the_gradient_written_out(changes: dict[str, Any]) -> None:
    """Every loss, correction, advantage and aggregation, over micro-batches, and summed over two ranks."""
    models = {4: tiny_model(1), 5: tiny_model(2)}
    samples = [two_turns(group, k, models) for group in range(2) for k in range(3)]
    config = settings(**changes)
    model = near_model()
    loss_np(model, samples, config).backward()  # type: ignore[no-untyped-call]
    wanted = gradient(model)
    for size in (1, 2):
        found = torch.zeros_like(wanted)
        for rank in range(size):
            batch = Batch(
                (whole := make_batch(samples, train_version=5)).manifest, digest=whole.digest,
                payloads=dict(whole.payloads),  # type: ignore[arg-type]
                dp_rank=rank, dp_size=size, advantage=config.advantage, max_staleness=config.max_token_staleness,
            )  # fmt: skip
            mine = near_model()
            grpo = GRPO(mine, torch.optim.SGD(mine.parameters(), lr=0.0), config, max_samples=2)
            grpo.step(batch)
            found += gradient(mine)  # counts are of all ranks, so ranks sum up
        assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_T10_tokens_masked_by_the_trainer_are_left_out_of_every_count() -> None:
    models = {4: tiny_model(1), 5: tiny_model(2)}
    samples = [two_turns(group, k, models) for group in range(2) for k in range(3)]
    whole = make_batch(samples, train_version=5)
    batch = Batch(whole.manifest, digest="", payloads=dict(whole.payloads), max_staleness=0)  # type: ignore[arg-type]
    data = batch.arrays()
    assert data["loss_mask"].sum() == batch.counts["loss_tokens"] == sum(s.versions.count(5) for s in samples)
    assert (data["staleness"][data["loss_mask"]] == 0).all()
    assert (data["generated"] == whole.arrays()["generated"]).all()
    assert whole.counts["loss_tokens"] > batch.counts["loss_tokens"]
    shares = [batch.share(rank, 2) for rank in range(2)]
    assert all(share.counts == batch.counts for share in shares)
    assert sum(int(share.arrays()["loss_mask"].sum()) for share in shares) == batch.counts["loss_tokens"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"correction": "truncated"}, "corrects twice"),
        ({"correction": "truncated", "loss": "cispo"}, "corrects twice"),
        ({"loss": "reinforce", "correction": "bypass"}, "leave stale data uncorrected"),
        ({"correction": "bypass", "weight_cap": 2.0}, "a second one would correct twice"),
        ({"correction": ["bypass", "decoupled"]}, "Input should be"),
        ({"aggregation": "constant"}, "belong together"),
        ({"constant_tokens": 5}, "belong together"),
    ],
)
def test_T9_a_configuration_that_corrects_twice_or_not_at_all_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        settings(**changes)
