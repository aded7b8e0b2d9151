"""Packed rows have the log-probabilities and gradients of padded ones, and no [tokens, vocabulary] exists."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from penstock.consumers.grpo import losses, policy
from penstock.consumers.grpo.policy import PACKED, Policy

VOCABULARY = 31
#: In float32 on a CPU: sums in another order.
TOLERANCE = 2e-5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE),
}


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)


def micro_of(*lengths: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(VOCABULARY, (length,), generator=generator)
    temperatures = torch.rand(tokens.shape, generator=generator) + 0.5
    return {"tokens": tokens, "lengths": torch.tensor(lengths), "temperatures": temperatures}


def logprobs_and_gradient(made: Policy, micro: dict[str, Any]) -> tuple[Tensor, Tensor]:
    made.zero_grad()
    found = made(micro)
    weights = torch.linspace(-1, 1, found.numel(), device=found.device).view(found.shape) * real(micro).to(found.device)
    (found * weights).sum().backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None])


def real(micro: dict[str, Any]) -> Tensor:
    return torch.arange(micro["tokens"].shape[1]) < micro["lengths"].cpu()[:, None]


@pytest.mark.parametrize("name", sorted(PACKED))
@pytest.mark.parametrize("lengths", [(9, 1, 14, 5), (6, 6), (1,)])
def test_packed_rows_have_the_logprobs_and_gradients_of_padded_ones(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "CHUNK", 8)
    model, micro = model_of(name), micro_of(*lengths)
    packed = Policy(model, torch.float32)
    assert packed.is_packed
    padded = Policy(model, torch.float32)
    padded.is_packed = False
    before = model.config._attn_implementation

    found, gradient = logprobs_and_gradient(packed, micro)
    wanted, of_padded = logprobs_and_gradient(padded, micro)

    assert model.config._attn_implementation == before
    torch.testing.assert_close(found, torch.where(real(micro), wanted, 0.0), atol=TOLERANCE, rtol=0)
    assert not found[:, 0].any()
    torch.testing.assert_close(gradient, of_padded, atol=TOLERANCE * float(of_padded.abs().max() + 1), rtol=0)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_model_with_gradient_checkpointing_has_the_same_gradients(is_reentrant: bool) -> None:
    """Its layers run again in the backward pass, and must not see the row before theirs there."""
    model, micro = model_of("llama").train(), micro_of(9, 1, 14, 5)
    _, wanted = logprobs_and_gradient(Policy(model, torch.float32), micro)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    _, found = logprobs_and_gradient(Policy(model, torch.float32), micro)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE * float(wanted.abs().max() + 1), rtol=0)


def test_a_row_does_not_see_the_row_before_it() -> None:
    made = Policy(model_of("llama"), torch.float32)
    both, alone = micro_of(9, 14), micro_of(9, 14)
    alone["tokens"][0] = 0
    with torch.no_grad():
        assert torch.equal(made(both)[1], made(alone)[1])


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_of_a_chunk_are_the_largest_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "CHUNK", 8)
    seen: list[int] = []
    original = losses.chosen_logprobs

    def watched(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
        seen.append(logits.shape[0])
        return original(logits, tokens, temperatures)

    monkeypatch.setattr(losses, "chosen_logprobs", watched)
    logprobs_and_gradient(Policy(model_of(name), torch.float32), micro_of(30, 21, 4))
    assert max(seen) == 8
    assert sum(seen) == 2 * 55, "each position once, and once more in the backward pass"


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SHAPE, sliding_window=4),
        Qwen2Config(
            **{k: v for k, v in SHAPE.items() if k != "head_dim"}, use_sliding_window=True, max_window_layers=1
        ),
    ],
)
def test_a_model_with_a_sliding_window_gets_padded_rows(config: Any) -> None:
    assert not Policy(AutoModelForCausalLM.from_config(config), torch.float32).is_packed


@pytest.mark.parametrize("release", ["2.9", "2.10"])
def test_an_older_torch_attends_row_by_row(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch>=2.6`` is allowed: 2.9 has no attention of packed rows, that of 2.10 takes neither scale nor window."""
    older = None if release == "2.9" else SimpleNamespace(varlen_attn=lambda query, *, is_causal=False: query)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", older)
    policy._varlen.cache_clear()
    try:
        assert policy._varlen() is None
    finally:
        policy._varlen.cache_clear()


def test_attention_computes_in_the_type_of_the_values() -> None:
    """Under autocast rotary embeddings make queries and keys float32, for which a GPU has no packed attention."""
    query, key, value = (torch.rand(1, 2, 5, 8) for _ in range(3))
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    found, _ = policy.attend(
        torch.nn.Module(), query, key, value.bfloat16(), None, 1.0, cu_seq_lens_q=ends, max_length_q=3
    )
    assert found.dtype is torch.bfloat16
