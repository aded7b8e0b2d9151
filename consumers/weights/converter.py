"""Megatron-core parameters as the names that engines load: dense models, and MoE experts in order.

For ``sources.Shards``: the parts of one parameter by rank, and what Hugging Face calls it. Tried on state
dicts of megatron-core 0.16 with its own modules, whose logits the converted weights give; the names under which
TransformerEngine's modules hold the same parameters are read too.

| Megatron | parts | engine |
|---|---|---|
| embedding, output_layer | joined on 0, padding of the vocabulary cut off | embed_tokens, lm_head |
| linear_qkv | joined on 0; per group of heads: queries, key, value | q_proj, k_proj, v_proj |
| linear_proj, linear_fc2 | joined on 1 | o_proj, down_proj |
| linear_fc1 | each part: gate, up; joined on 0 apart | gate_proj, up_proj |
| experts | one part per rank of expert parallelism, expert = rank x local experts + local number | experts.N |
| norms, router | the same everywhere | ..._layernorm, gate |
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PublishError
from penstock.weights.model_folder import count_experts

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
#: ``experts.local_experts.3.linear_fc1.weight`` or, grouped, ``experts.linear_fc1.weight3``.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}

Named = Iterable[tuple[str, Tensor]]


def megatron_to_hf(name: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    """Tensors of one Megatron parameter by the names of Hugging Face (Qwen2, Qwen3, Llama, and their MoE models).

    Args:
        name: of the whole model: with pipeline parallelism layers are numbered from the first stage's first.
        shards: its parts, by rank of tensor (or, for experts, expert) parallelism.
        config: the model's config.json.

    Raises:
        PublishError: a name or a shape that this converter does not know.
    """
    name = name.removeprefix("module.")
    if name.endswith("._extra_state"):
        return []
    if name == "embedding.word_embeddings.weight":
        return [("model.embed_tokens.weight", _vocabulary(shards, config))]
    if name == "output_layer.weight":
        return [] if config.get("tie_word_embeddings") else [("lm_head.weight", _vocabulary(shards, config))]
    if name in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
        return [("model.norm.weight", shards[0])]
    match = _LAYER.fullmatch(name)
    if match is None:
        raise PublishError(f"{name} is not a parameter of a Megatron decoder: give a converter of your own.")
    prefix, rest = f"model.layers.{match[1]}.", match[2]
    return [(prefix + short, tensor.contiguous()) for short, tensor in _in_layer(name, rest, shards, config)]


def _in_layer(name: str, rest: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    if rest in _NORMS:
        return [(_NORMS[rest], shards[0])]
    if expert := _EXPERT.fullmatch(rest):
        return _expert(name, expert, shards, config)
    split: dict[str, Callable[[], Named]] = {
        "self_attention.linear_qkv.weight": lambda: _qkv(name, shards, config, "weight"),
        "self_attention.linear_qkv.bias": lambda: _qkv(name, shards, config, "bias"),
        "self_attention.linear_proj.weight": lambda: [("self_attn.o_proj.weight", torch.cat(list(shards), dim=1))],
        "mlp.linear_fc1.weight": lambda: _gate_up("mlp.", shards),
        "mlp.linear_fc2.weight": lambda: [("mlp.down_proj.weight", torch.cat(list(shards), dim=1))],
        "mlp.shared_experts.linear_fc1.weight": lambda: _gate_up("mlp.shared_expert.", shards),
        "mlp.shared_experts.linear_fc2.weight": lambda: [
            ("mlp.shared_expert.down_proj.weight", torch.cat(list(shards), dim=1))
        ],
    }
    if rest not in split:
        raise PublishError(f"{name} has no name that this converter knows: give one of your own.")
    return split[rest]()


def _vocabulary(shards: Sequence[Tensor], config: Mapping[str, Any]) -> Tensor:
    """Megatron pads the vocabulary so that it divides among ranks."""
    return torch.cat(list(shards))[: int(config["vocab_size"])].contiguous()


def _qkv(name: str, shards: Sequence[Tensor], config: Mapping[str, Any], kind: str) -> Named:
    """[groups x (queries per group + 2) x head, ...] to queries, keys and values."""
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    whole = torch.cat(list(shards))
    per_group = heads // groups
    if whole.shape[0] != groups * (per_group + 2) * size:
        raise PublishError(
            f"{name} has {whole.shape[0]} rows where {heads} heads in {groups} groups of size {size} need "
            f"{groups * (per_group + 2) * size}: config.json is of another model, or a part is missing."
        )
    grouped = whole.reshape(groups, per_group + 2, size, *whole.shape[1:])
    parts = {"q": grouped[:, :per_group], "k": grouped[:, per_group : per_group + 1], "v": grouped[:, per_group + 1 :]}
    return [(f"self_attn.{one}_proj.{kind}", part.reshape(-1, *whole.shape[1:])) for one, part in parts.items()]


def _gate_up(prefix: str, shards: Sequence[Tensor]) -> Named:
    halves = [shard.chunk(2) for shard in shards]
    yield f"{prefix}gate_proj.weight", torch.cat([gate for gate, _ in halves])
    yield f"{prefix}up_proj.weight", torch.cat([up for _, up in halves])


def _expert(name: str, match: "re.Match[str]", shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    """The parts are different experts: one of each rank."""
    local = int(match[1] if match[1] is not None else match[4])
    which = match[2] or match[3]
    total = count_experts(config)
    per_rank, rest = divmod(total, len(shards))
    if rest or local >= per_rank:
        raise PublishError(
            f"{name}: {total} experts of config.json do not lie {local + 1} or more on each of {len(shards)} ranks: "
            "experts that are also split by tensor parallelism need a converter of your own."
        )
    for rank, shard in enumerate(shards):
        prefix = f"mlp.experts.{rank * per_rank + local}."
        if which == "1":
            yield from _gate_up(prefix, [shard])
        else:
            yield f"{prefix}down_proj.weight", shard
