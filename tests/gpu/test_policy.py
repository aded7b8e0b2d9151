"""Packed rows on a GPU: torch's variable-length attention under autocast, against padded rows."""

import pytest
import torch

from penstock.consumers.grpo import policy
from penstock.consumers.grpo.policy import Policy
from tests.unit.consumers.grpo.test_policy import logprobs_and_gradient, micro_of, model_of, real


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_packed_rows_differ_from_padded_ones_by_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "CHUNK", 64)
    used: list[int] = []
    from torch.nn.attention import varlen

    original = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: used.append(1) or original(*a, **k))
    model = model_of(name).cuda()
    micro = {key: value.cuda() for key, value in micro_of(200, 1, 33, 90).items()}
    exact, packed, padded = (Policy(model, dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16))
    exact.is_packed = padded.is_packed = False

    is_real = real(micro).cuda()
    wanted, wanted_gradient = logprobs_and_gradient(exact, micro)
    errors = []
    for one in (packed, padded):
        found, gradient = logprobs_and_gradient(one, micro)
        errors.append((float((found - wanted)[is_real].abs().mean()), float((gradient - wanted_gradient).norm())))

    assert used, "the packed path has used torch's variable-length attention"
    assert errors[0][0] < 1.5 * errors[1][0]
    assert errors[0][1] < 1.5 * errors[1][1] < wanted_gradient.norm()
