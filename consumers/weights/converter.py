"""Convert Megatron-core parameters to Hugging Face names: dense models, MoE models, DeepSeek-V3 with MTP layers.

For ``sources.Shards``. Tested on state dicts of megatron-core 0.16 with its own modules, complete and split by tensor
and expert parallelism: the converted weights give the same logits. The parameter names of TransformerEngine's modules
are supported too.

| Megatron | parts | engine |
|---|---|---|
| embedding, output_layer | joined on 0, padding of the vocabulary cut off | embed_tokens, lm_head; copies for MTP |
| linear_qkv | joined on 0; per group of heads: queries, key, value | q_proj, k_proj, v_proj |
| linear_q_proj, linear_q_up_proj, linear_kv_up_proj (MLA) | joined on 0 | q_proj, q_b_proj, kv_b_proj |
| linear_q_down_proj, linear_kv_down_proj (MLA) | joined on 0, or replicated | q_a_proj, kv_a_proj_with_mqa |
| linear_proj, linear_fc2 | joined on 1 | o_proj, down_proj |
| linear_fc1 | each part: gate, up; joined on 0 apart | gate_proj, up_proj |
| experts | for each rank of expert parallelism the parts of expert rank x local experts + local number | experts.N |
| norms, router | replicated | ..._layernorm, gate |
| mtp.layers.K | as a layer of the decoder; eh_proj joined on 0 | layers.(num_hidden_layers + K) |
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.consumers.weights.sources import Place
from penstock.errors import PublishError
from penstock.model.folder import count_experts

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
#: Parameter of a layer of multi-token prediction; its transformer layer has two names, by megatron-core's release.
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(transformer_layer\.|mtp_model_layer\.)?(.+)")
_MLP = re.compile(r"mlp\.(shared_experts\.)?linear_fc([12])\.weight")
#: ``experts.local_experts.3.linear_fc1.weight`` or, grouped, ``experts.linear_fc1.weight3``.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.weight(\d*)")
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
#: Norms of multi-head latent attention (MLA).
_MLA_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
}
_MTP_NORMS = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}

Named = Iterable[tuple[str, Tensor]]


def megatron_to_hf(name: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    """Return the tensors of one Megatron parameter by their Hugging Face names.

    Supports Qwen2, Qwen3, Llama, their MoE models, and DeepSeek-V3 with its MTP layers.

    Args:
        name: in the complete model: with pipeline parallelism, layers are numbered across all stages.
        shards: its parts, by rank of tensor parallelism; for experts by rank of expert parallelism, then by rank of the
            experts' tensor parallelism. ``megatron_places`` puts them in this order.
        config: the model's config.json. ``num_nextn_predict_layers`` is the number of MTP layers in the model's files.

    Raises:
        PublishError: a name or a shape that this converter does not know.
    """
    name = name.removeprefix("module.")
    if name.endswith("._extra_state"):
        return []
    if name == "embedding.word_embeddings.weight":
        return _vocabulary("model.embed_tokens.weight", "embed_tokens.weight", shards, config)
    if name == "output_layer.weight":
        if config.get("tie_word_embeddings"):
            return []
        return _vocabulary("lm_head.weight", "shared_head.head.weight", shards, config)
    if name in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
        return [("model.norm.weight", shards[0])]
    if name.startswith("mtp."):
        prefix, found = _mtp(name, shards, config)
    elif match := _LAYER.fullmatch(name):
        prefix, found = f"model.layers.{match[1]}.", _in_layer(name, match[2], shards, config)
    else:
        raise PublishError(f"{name} is not a parameter of a Megatron decoder: give a converter of your own.")
    return [(prefix + short, tensor.contiguous()) for short, tensor in found]


def megatron_places(*, tp: int, ep: int, etp: int) -> Place:
    """Return the ``place`` of ``Shards`` for this rank's parts of Megatron's parameters.

    Parts that data-parallel ranks replicate are sent once; with pipeline parallelism each stage sends its layers.

    Args:
        tp: rank in the group of tensor parallelism (``parallel_state.get_tensor_model_parallel_rank()``).
        ep: rank in the group of expert parallelism (``get_expert_model_parallel_rank()``).
        etp: rank in the group of the experts' tensor parallelism (``get_expert_tensor_parallel_rank()``).
    """
    return lambda name: (ep, etp) if ".mlp.experts." in name else (tp,)


def _in_layer(name: str, rest: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    norms = _NORMS | _MLA_NORMS if _is_latent(config) else _NORMS
    if rest in norms:
        return [(norms[rest], shards[0])]
    if (expert := _EXPERT.fullmatch(rest)) and (expert[1] or expert[3]):
        return _expert(name, int(expert[1] or expert[3]), expert[2], shards, config)
    if mlp := _MLP.fullmatch(rest):
        # DeepSeek's name, or Qwen's.
        shared = "mlp.shared_experts." if config.get("n_shared_experts") else "mlp.shared_expert."
        return _mlp(shared if mlp[1] else "mlp.", mlp[2], shards)
    if _is_latent(config) and rest in (sizes := _latent_sizes(config)):
        short, size = sizes[rest]
        return [(f"self_attn.{short}.weight", _whole(name, shards, size))]
    if rest == "self_attention.linear_proj.weight":
        return [("self_attn.o_proj.weight", torch.cat(list(shards), dim=1))]
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        return _qkv(name, shards, config)
    raise PublishError(f"{name} has no name that this converter knows: give one of your own.")


def _is_latent(config: Mapping[str, Any]) -> bool:
    """Return whether attention is multi-head latent, as in DeepSeek-V3."""
    return bool(config.get("kv_lora_rank"))


def _latent_sizes(config: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the engine's name and the number of rows of each projection of multi-head latent attention.

    Both sides rotate neighbouring dimensions of a head by the same angle (rope_interleave), so rows keep their order.
    """
    keys = ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "v_head_dim")
    if missing := [key for key in keys if not isinstance(config.get(key), int)]:
        raise PublishError(f"config.json has no {', '.join(missing)}, which multi-head latent attention has.")
    heads, rope, nope, latent, value = (int(config[key]) for key in keys)
    sizes = {
        "kv_down": ("kv_a_proj_with_mqa", latent + rope),
        "kv_up": ("kv_b_proj", heads * (nope + value)),
        "q": ("q_proj", heads * (nope + rope)),
    }
    if rank := config.get("q_lora_rank"):
        sizes |= {"q_down": ("q_a_proj", int(rank)), "q_up": ("q_b_proj", heads * (nope + rope))}
        del sizes["q"]
    return {f"self_attention.linear_{key}_proj.weight": size for key, size in sizes.items()}


def _mtp(name: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> tuple[str, Named]:
    """Return the engine's prefix of a multi-token prediction layer, and the converted parameter."""
    match = _MTP_LAYER.fullmatch(name)
    if match is None or int(match[1]) >= _count_mtp(config):
        raise PublishError(
            f"{name}: config.json names {_count_mtp(config)} layers of multi-token prediction as DeepSeek-V3 has them "
            "(num_nextn_predict_layers, kv_lora_rank): set it right, or give a converter of your own."
        )
    prefix = f"model.layers.{int(config['num_hidden_layers']) + int(match[1])}."
    if match[2]:
        return prefix, _in_layer(name, match[3], shards, config)
    if match[3] == "eh_proj.weight":
        return prefix, [("eh_proj.weight", _whole(name, shards, int(config["hidden_size"])))]
    if match[3] not in _MTP_NORMS:
        raise PublishError(f"{name} has no name that this converter knows: give one of your own.")
    return prefix, [(_MTP_NORMS[match[3]], shards[0])]


def _count_mtp(config: Mapping[str, Any]) -> int:
    """Return the number of MTP layers that the model's files have after the last layer, as in DeepSeek-V3."""
    return int(config.get("num_nextn_predict_layers") or 0) if _is_latent(config) else 0


def _vocabulary(name: str, short: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    """Return embedding or head without Megatron's padding, and a copy for each MTP layer, as the files have them."""
    tensor = torch.cat(list(shards))[: int(config["vocab_size"])].contiguous()
    first = int(config.get("num_hidden_layers") or 0)
    copies = [(f"model.layers.{first + layer}.{short}", tensor) for layer in range(_count_mtp(config))]
    return [(name, tensor), *copies]


def _whole(name: str, shards: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return [num_rows, ...] from parts that are joined on 0, or replicated."""
    whole = shards[0] if shards[0].shape[0] == num_rows else torch.cat(list(shards))
    if whole.shape[0] != num_rows:
        raise PublishError(
            f"{name} has {whole.shape[0]} rows in {len(shards)} parts where config.json needs {num_rows}: it is of "
            "another model, a part is missing, or ranks give the same part (Shards' place says which do)."
        )
    return whole


def _qkv(name: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    """Split [groups x (queries per group + 2) x head, ...] into queries, keys and values."""
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    whole = _whole(name, shards, (heads + 2 * groups) * size)
    parts = torch.split(whole.reshape(groups, -1, size, *whole.shape[1:]), [heads // groups, 1, 1], dim=1)
    kind = name.rpartition(".")[2]
    return [
        (f"self_attn.{one}_proj.{kind}", part.reshape(-1, *whole.shape[1:]))
        for one, part in zip("qkv", parts, strict=True)
    ]


def _mlp(prefix: str, which: str, shards: Sequence[Tensor]) -> Named:
    """Convert the parts of ``linear_fc1`` (``which`` is '1'), each gate and up, or of ``linear_fc2``."""
    if which == "2":
        return [(f"{prefix}down_proj.weight", torch.cat(list(shards), dim=1))]
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return [(f"{prefix}gate_proj.weight", torch.cat(gates)), (f"{prefix}up_proj.weight", torch.cat(ups))]


def _expert(name: str, local: int, which: str, shards: Sequence[Tensor], config: Mapping[str, Any]) -> Named:
    """Convert the parts of one local expert number: one expert per rank of expert parallelism, in one or more parts."""
    total = count_experts(config)
    per_expert = _parts_per_expert(name, shards[0], which, config)
    ranks, left = divmod(len(shards), per_expert)
    per_rank, rest = divmod(total, max(ranks, 1))
    if left or rest or local >= per_rank:
        raise PublishError(
            f"{name}: {total} experts of config.json, each in {per_expert} parts, do not lie {local + 1} or more on "
            f"each of {ranks} ranks ({len(shards)} parts): a part is missing, or ranks give the same part (Shards' "
            "place says which do)."
        )
    for rank in range(ranks):
        parts = shards[rank * per_expert : (rank + 1) * per_expert]
        yield from _mlp(f"mlp.experts.{rank * per_rank + local}.", which, parts)


def _parts_per_expert(name: str, part: Tensor, which: str, config: Mapping[str, Any]) -> int:
    """Return the number of parts of an expert: its size in config.json divided by the size of one part."""
    keys = ("moe_intermediate_size", "intermediate_size")
    size = next((size for key in keys if isinstance(size := config.get(key), int) and size), 0)
    held = part.shape[0] // 2 if which == "1" else part.shape[1]
    if not size:
        return 1
    per_expert, rest = divmod(size, max(held, 1))
    if rest or not per_expert:
        raise PublishError(
            f"{name}: its part is {list(part.shape)}, no share of an expert of size {size} as config.json says "
            "(moe_intermediate_size): it is of another model, or needs a converter of your own."
        )
    return per_expert
