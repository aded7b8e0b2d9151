"""Megatron's parts become the weights that engines load: the logits are those that Megatron computed.

``tests/data/megatron_*.safetensors``: state dicts of GPTModel of megatron-core 0.16.1 (its own modules, float32, CPU),
random weights, with the token ids that it was given and its logits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from consumers.weights.converter import megatron_to_hf
from consumers.weights.publish import write_weights
from consumers.weights.sources import concatenated, load_converter
from penstock.errors import ConfigError, PublishError

DATA = Path(__file__).parents[3] / "data"
COMMON: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "dtype": "float32", "rms_norm_eps": 1e-6, "intermediate_size": 24,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "dense": Qwen2Config(**COMMON, architectures=["Qwen2ForCausalLM"]),
    "moe": Qwen3MoeConfig(
        **COMMON,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=4,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        attention_bias=False,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}


def split(name: str, tensor: Tensor, ranks: int) -> list[Tensor]:
    """How Megatron lays a parameter out over ranks of tensor parallelism."""
    if "linear_fc1" in name:
        gate, up = tensor.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    if "linear_qkv" in name or "word_embeddings" in name:
        return list(tensor.chunk(ranks))
    if "linear_proj" in name or "linear_fc2" in name:
        return list(tensor.chunk(ranks, dim=1))
    return [tensor] * ranks


def parts_of(state: dict[str, Tensor], ranks: int, rename: Callable[[str], str]) -> dict[str, list[Tensor]]:
    """The parts by name: experts lie on the ranks one block after the other, the rest is split."""
    parts: dict[str, list[Tensor]] = {}
    num_experts = sum("layers.0.mlp.experts" in name and "fc1" in name for name in state)
    for name, tensor in state.items():
        if ".local_experts." in name:
            head, _, rest = name.partition(".local_experts.")
            number, _, tail = rest.partition(".")
            local = int(number) % (num_experts // ranks)
            parts.setdefault(rename(f"{head}.local_experts.{local}.{tail}"), []).append(tensor)
        else:
            parts[rename(name)] = split(name, tensor, ranks)
    return parts


def as_transformer_engine(name: str) -> str:
    """The names of the same parameters where TransformerEngine's modules hold them."""
    if ".local_experts." in name:
        head, _, rest = name.partition(".local_experts.")
        number, _, tail = rest.partition(".")
        return f"{head}.{tail}{number}"
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


@pytest.mark.parametrize("rename", [str, as_transformer_engine])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_logits_are_megatrons(kind: str, ranks: int, rename: Callable[[str], str], tmp_path: Path) -> None:
    state = load_file(DATA / f"megatron_{kind}.safetensors")
    ids, logits = state.pop("_ids"), state.pop("_logits")
    config = CONFIGS[kind]
    config.save_pretrained(tmp_path / "model")
    # What a vocabulary is padded with so that it divides among ranks.
    padding = torch.full((4, 16), 7.0)
    state["embedding.word_embeddings.weight"] = torch.cat([state["embedding.word_embeddings.weight"], padding])
    converted = {
        name: tensor
        for whole, parts in parts_of(state, ranks, rename).items()
        for name, tensor in megatron_to_hf("module." + whole, parts, config.to_dict())
    }
    written = write_weights(converted, tmp_path / "model", tmp_path / "weights", 1)
    model = AutoModelForCausalLM.from_pretrained(written.path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, logits, atol=1e-5)


def test_what_the_converter_does_not_know_is_said() -> None:
    config = CONFIGS["moe"].to_dict()
    with pytest.raises(PublishError, match="give one of your own"):
        list(megatron_to_hf("decoder.layers.0.self_attention.linear_q.weight", [torch.ones(2)], config) or [])
    with pytest.raises(PublishError, match="not a parameter of a Megatron decoder"):
        megatron_to_hf("encoder.weight", [torch.ones(2)], config)
    with pytest.raises(PublishError, match="has 30 rows where 4 heads in 2 groups"):
        list(megatron_to_hf("decoder.layers.0.self_attention.linear_qkv.weight", [torch.ones(30, 16)], config))
    name = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight"
    with pytest.raises(PublishError, match="do not lie 3 or more on each of 2 ranks"):
        list(megatron_to_hf(name, [torch.ones(16, 8)] * 2, config))


def test_a_converter_is_found_by_its_import_path() -> None:
    assert load_converter("consumers.weights.converter:megatron_to_hf") is megatron_to_hf
    for path in ("consumers.weights.converter", "consumers.weights.converter:nothing", "no.such:thing"):
        with pytest.raises(ConfigError, match=r"cannot be imported|is not a function"):
            load_converter(path)
    whole = torch.arange(12).reshape(4, 3)
    joined = dict(concatenated({"w": 0})("w", whole.chunk(2), {}))
    assert torch.equal(joined["w"], whole)
