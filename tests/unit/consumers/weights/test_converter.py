"""Megatron's parts become the weights that engines load: the logits are those that Megatron computed.

``tests/data/megatron_*.safetensors``: state dicts of GPTModel of megatron-core 0.16.1 (its own modules, float32, CPU),
random weights, with the token ids that it was given and its logits. megatron_mla is what tests/wide/megatron_rank.py
writes, with which test_megatron.py holds real splits and the logits of MTP layers against transformers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen2Config, Qwen3MoeConfig

from penstock.consumers.weights.converter import megatron_places, megatron_to_hf
from penstock.consumers.weights.sources import Shards, concatenated
from penstock.consumers.weights.write import write_weights
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
    "mla": DeepseekV3Config(
        **COMMON | {"tie_word_embeddings": False, "num_key_value_heads": 4},
        moe_intermediate_size=8,
        n_shared_experts=1,
        n_routed_experts=4,
        routed_scaling_factor=1.5,
        kv_lora_rank=8,
        q_lora_rank=12,
        qk_rope_head_dim=8,
        qk_nope_head_dim=4,
        v_head_dim=6,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        architectures=["DeepseekV3ForCausalLM"],
    ),
}


#: Ranks of tensor parallelism, of expert parallelism, and of the experts' tensor parallelism.
Split = tuple[int, int, int]


def split(name: str, tensor: Tensor, ranks: int, whole: tuple[str, ...]) -> list[Tensor]:
    """How Megatron lays a parameter out over ranks of tensor parallelism; those with ``whole`` in it lie on each."""
    if any(part in name for part in whole) or "norm" in name or "router" in name:
        return [tensor] * ranks
    if "linear_fc1" in name:
        gate, up = tensor.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(ranks), up.chunk(ranks), strict=True)]
    if "linear_proj" in name or "linear_fc2" in name:
        return list(tensor.chunk(ranks, dim=1))
    return list(tensor.chunk(ranks))


def parts_of(state: dict[str, Tensor], ranks: Split, rename: Callable[[str], str]) -> dict[str, list[Tensor]]:
    """The parts by name: experts lie on the ranks one block after the other, and are split as the rest is."""
    tp, ep, etp = ranks
    parts: dict[str, list[Tensor]] = {}
    num_experts = 1 + max((int(name.split(".")[-3]) for name in state if ".local_experts." in name), default=0)
    whole = () if rename is str else ("q_down_proj", "kv_down_proj")
    for name, tensor in state.items():
        if ".local_experts." in name:
            head, _, rest = name.partition(".local_experts.")
            number, _, tail = rest.partition(".")
            local = int(number) % (num_experts // ep)
            parts.setdefault(rename(f"{head}.local_experts.{local}.{tail}"), []).extend(split(name, tensor, etp, ()))
        else:
            parts[rename(name)] = split(name, tensor, tp, whole)
    return parts


def as_transformer_engine(name: str) -> str:
    """The names of the same parameters where TransformerEngine's modules hold them."""
    if ".local_experts." in name:
        head, _, rest = name.partition(".local_experts.")
        number, _, tail = rest.partition(".")
        return f"{head}.{tail}{number}"
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def as_latent_transformer_engine(name: str) -> str:
    """The same where attention is latent, with the name that a later megatron-core has inside MTP layers."""
    name = name.replace("transformer_layer", "mtp_model_layer")
    for latent in ("q", "kv"):
        name = name.replace(f"{latent}_layernorm.weight", f"linear_{latent}_up_proj.layer_norm_weight")
    return name if "input_layernorm" in name else as_transformer_engine(name)


def convert(kind: str, ranks: Split, rename: Callable[[str], str]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What the converter makes of a recorded model; the ids that it was given, and its logits."""
    if kind == "mla" and rename is as_transformer_engine:
        rename = as_latent_transformer_engine
    state = load_file(DATA / f"megatron_{kind}.safetensors")
    ids, logits = state.pop("_ids"), state.pop("_logits")
    # What a vocabulary is padded with so that it divides among ranks.
    for name in {"embedding.word_embeddings.weight", "output_layer.weight"} & state.keys():
        state[name] = torch.cat([state[name], torch.full((4, 16), 7.0)])
    converted = {
        name: tensor
        for whole, parts in parts_of(state, ranks, rename).items()
        for name, tensor in megatron_to_hf("module." + whole, parts, CONFIGS[kind].to_dict())
    }
    return converted, ids, logits


@pytest.mark.parametrize("rename", [str, as_transformer_engine])
@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_logits_are_megatrons(kind: str, ranks: Split, rename: Callable[[str], str], tmp_path: Path) -> None:
    CONFIGS[kind].save_pretrained(tmp_path / "model")
    converted, ids, logits = convert(kind, ranks, rename)
    written = write_weights(converted, tmp_path / "model", tmp_path / "weights", 1)
    model = AutoModelForCausalLM.from_pretrained(written.path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, logits, atol=1e-5)


def test_a_layer_of_multi_token_prediction_is_one_after_the_last() -> None:
    converted, _, _ = convert("mla", (1, 1, 1), str)
    layer = {name.removeprefix("model.layers.2.") for name in converted if name.startswith("model.layers.2.")}
    as_any = {name.removeprefix("model.layers.1.") for name in converted if name.startswith("model.layers.1.")}
    own = {"eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"}
    assert layer - as_any == {f"{name}.weight" for name in own}
    assert as_any <= layer
    assert torch.equal(converted["model.layers.2.embed_tokens.weight"], converted["model.embed_tokens.weight"])
    assert torch.equal(converted["model.layers.2.shared_head.head.weight"], converted["lm_head.weight"])


def test_queries_without_a_latent_have_one_projection() -> None:
    config = CONFIGS["mla"].to_dict() | {"q_lora_rank": None}
    parts = list(torch.arange(48 * 16.0).reshape(48, 16).chunk(2))
    found = dict(megatron_to_hf("decoder.layers.0.self_attention.linear_q_proj.weight", parts, config))
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], torch.cat(parts))


def test_parts_of_experts_have_places_of_their_own() -> None:
    place = megatron_places(tp=1, ep=2, etp=3)
    assert place("decoder.layers.3.mlp.experts.local_experts.0.linear_fc1.weight") == (2, 3)
    assert place("mtp.layers.0.transformer_layer.mlp.experts.linear_fc2.weight0") == (2, 3)
    assert place("decoder.layers.3.mlp.shared_experts.linear_fc1.weight") == (1,)
    assert place("decoder.layers.3.self_attention.linear_proj.weight") == (1,)


@pytest.mark.parametrize(
    ("name", "parts", "changes", "said"),
    [
        ("mtp.layers.1.enorm.weight", [(16,)], {}, "mtp.layers.1.enorm.weight: config.json names 1 layers"),
        ("mtp.layers.0.enorm.weight", [(16,)], {"kv_lora_rank": None}, "names 0 layers"),
        ("mtp.layers.0.other.weight", [(16,)], {}, "mtp.layers.0.other.weight has no name"),
        ("mtp.layers.0.eh_proj.weight", [(8, 32)] * 3, {}, "has 24 rows in 3 parts where config.json needs 16"),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.weight", [(20, 8)] * 4, {}, "has 80 rows in 4 parts"),
        ("decoder.layers.0.self_attention.linear_q_proj.weight", [(48, 16)], {}, "linear_q_proj.weight has no name"),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.weight", [(40, 8)], {"v_head_dim": None}, "v_head_dim"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight0", [(10, 16)], {}, r"\[10, 16\], no share of an expert"),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight0", [(8, 16)] * 3, {}, r"each in 2 parts.*\(3 parts\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_deepseeks_config_is_said(
    name: str, parts: list[tuple[int, ...]], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(PublishError, match=said):
        list(megatron_to_hf(name, [torch.ones(shape) for shape in parts], CONFIGS["mla"].to_dict() | changes))


def test_what_the_converter_does_not_know_is_said() -> None:
    config = CONFIGS["moe"].to_dict()
    with pytest.raises(PublishError, match="give one of your own"):
        list(megatron_to_hf("decoder.layers.0.self_attention.linear_q.weight", [torch.ones(2)], config) or [])
    with pytest.raises(PublishError, match="not a parameter of a Megatron decoder"):
        megatron_to_hf("encoder.weight", [torch.ones(2)], config)
    with pytest.raises(PublishError, match=r"has 30 rows in 1 parts where config\.json needs 32"):
        list(megatron_to_hf("decoder.layers.0.self_attention.linear_qkv.weight", [torch.ones(30, 16)], config))
    name = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight"
    with pytest.raises(PublishError, match="do not lie 3 or more on each of 2 ranks"):
        list(megatron_to_hf(name, [torch.ones(16, 8)] * 2, config))


def test_a_converter_is_found_by_its_import_path() -> None:
    assert Shards({}, "penstock.consumers.weights.converter:megatron_to_hf")._convert is megatron_to_hf
    for path in (
        "penstock.consumers.weights.converter",
        "penstock.consumers.weights.converter:nothing",
        "no.such:thing",
    ):
        with pytest.raises(ConfigError, match=r"The converter .* (cannot be imported|is not an import path)"):
            Shards({}, path)
    whole = torch.arange(12).reshape(4, 3)
    joined = dict(concatenated({"w": 0})("w", whole.chunk(2), {}))
    assert torch.equal(joined["w"], whole)
