"""One rank of a megatron-core GPTModel of DeepSeek-V3's shape: ``python -m tests.wide.megatron_rank JOB.json RANK``.

The job: ``model`` a folder of Hugging Face, ``world``, ``tp``, ``ep``, ``etp`` how the model is split, ``store`` a file
where ranks meet, ``out`` a folder. Every rank fills its parts with numbers of its own and writes them to
``out/rankR.safetensors``; all publish through Shards into ``out/weights``; rank 0 writes what the model computed to
``out/computed.safetensors``: ids [B, L], logits [B, L, V] and for MTP layer K ``mtpK`` [B, L, V].

megatron-core asks for CUDA, TransformerEngine and Apex in places where none of them is needed: these are answered here.
"""

import json
import os
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
torch.cuda.current_device = lambda: torch.device("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig  # noqa: E402

from penstock.consumers.weights.converter import megatron_places, megatron_to_hf  # noqa: E402
from penstock.consumers.weights.sources import Shards  # noqa: E402
from penstock.consumers.weights.write import write_weights  # noqa: E402

# 0.16.1 without TransformerEngine: it is taken for installed here, and looked for by a name that is not defined there.
multi_latent_attention.HAVE_TE = False
moe_utils.te_general_gemm = None


class Attention(torch.nn.Module):
    """Causal attention, which has no parameters; megatron's own wants values as wide as keys."""

    def __init__(self, config: MLATransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """[L, B, heads, size] each to [L, B, heads x value size]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2)


def megatron_config(hf: dict[str, Any], job: dict[str, Any]) -> MLATransformerConfig:
    rope = hf["rope_parameters"]
    yarn: dict[str, Any] = {"rope_type": "rope"}
    # A factor of 1 leaves the softmax its scale, where rope_type alone would not.
    yarn["rotary_scaling_factor"] = 1.0
    if rope["rope_type"] == "yarn":
        yarn = {"rope_type": "yarn", "rotary_scaling_factor": rope["factor"]}
        yarn |= {key: rope[key] for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
        yarn["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    is_mixture = [int(layer >= hf["first_k_dense_replace"]) for layer in range(hf["num_hidden_layers"])]
    return MLATransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"], q_lora_rank=hf["q_lora_rank"], kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"], qk_pos_emb_head_dim=hf["qk_rope_head_dim"], v_head_dim=hf["v_head_dim"],
        qk_layernorm=True, add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        normalization="RMSNorm", layernorm_epsilon=hf["rms_norm_eps"], rotary_base=rope["rope_theta"], **yarn,
        num_moe_experts=hf["n_routed_experts"], moe_layer_freq=is_mixture,
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        moe_router_topk=hf["num_experts_per_tok"], moe_router_score_function="sigmoid", moe_router_pre_softmax=True,
        moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=hf["routed_scaling_factor"],
        moe_router_num_groups=hf["n_group"], moe_router_group_topk=hf["topk_group"],
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather", moe_router_dtype="fp32",
        mtp_num_layers=hf["num_nextn_predict_layers"], params_dtype=torch.float32, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=job["tp"],
        expert_model_parallel_size=job["ep"], expert_tensor_parallel_size=job["etp"], apply_rope_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip


def build(hf: dict[str, Any], job: dict[str, Any]) -> GPTModel:
    config = megatron_config(hf, job)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config, spec, vocab_size=hf["vocab_size"], max_sequence_length=64, mtp_block_spec=mtp,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, parallel_output=False,
    )  # fmt: skip
    return model.eval()


def fill(model: GPTModel, ep: int, tp: int, etp: int) -> None:
    """Numbers that differ by parameter and part, and are alike where ranks hold the same: megatron says which do."""
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        if tensor is None:
            continue
        is_split = getattr(parameters.get(name), "tensor_model_parallel", False)
        of_expert = ".mlp.experts." in name
        place = (ep, etp) if of_expert else (tp if is_split else 0,)
        seed = zlib.crc32(f"{name} {place}".encode())
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_(1 + 0.2 * drawn if "norm" in name else 0.3 * drawn)


def compute(model: GPTModel, hf: dict[str, Any]) -> dict[str, Tensor]:
    ids = torch.randint(hf["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(1))
    seen: list[Tensor] = []
    model.output_layer.register_forward_hook(lambda _, __, found: seen.append(found[0].transpose(0, 1).contiguous()))
    mask = torch.triu(torch.ones(24, 24, dtype=torch.bool), 1)[None, None]
    # With labels, because without them megatron computes no logits of MTP layers and fails.
    model(ids, torch.arange(24)[None].expand(2, -1), mask, labels=ids, loss_mask=torch.ones(2, 24))
    *mtp, logits = seen
    return {"ids": ids, "logits": logits} | {f"mtp{layer}": found for layer, found in enumerate(mtp)}


def main(job: dict[str, Any], rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=job["world"])
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job["tp"],
        expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=job["etp"],
    )
    places = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "etp": parallel_state.get_expert_tensor_parallel_rank(),
    }
    folder, out = Path(job["model"]), Path(job["out"])
    hf = json.loads((folder / "config.json").read_text())
    model = build(hf, job)
    with torch.no_grad():
        fill(model, **places)
        computed = compute(model, hf)
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
    save_file(state, out / f"rank{rank}.safetensors")
    source = Shards(state, megatron_to_hf, place=megatron_places(**places))
    if rank == 0:
        save_file(computed, out / "computed.safetensors")
        write_weights(source, folder, out / "weights", 1)
    else:
        assert not list(source.tensors(hf))
    dist.barrier()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    # All is said and done; gloo's threads have been seen to abort the interpreter's own end.
    sys.stdout.flush()
    os._exit(0)
