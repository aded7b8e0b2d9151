"""Models of megatron-core of DeepSeek-V3's shape, whole and split among ranks, become what transformers computes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

from tests import missing

PROCESS_S = 300
pytestmark = [pytest.mark.timeout(2 * PROCESS_S)]
#: The long context of DeepSeek-V3, over an original one that the sequences here exceed.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 2, "n_routed_experts": 8,
    "routed_scaling_factor": 1.5, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 6,
    "qk_nope_head_dim": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1,
    "bos_token_id": None, "eos_token_id": 1, "rope_parameters": YARN, "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "float32",
}  # fmt: skip
#: Plain rotary embedding, queries without a latent, several MTP layers, every layer a mixture.
PLAIN = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "q_lora_rank": None,
    "num_nextn_predict_layers": 2,
    "first_k_dense_replace": 0,
}


@pytest.fixture(autouse=True)
def _megatron() -> None:
    if subprocess.run([sys.executable, "-c", "import megatron.core"], capture_output=True).returncode != 0:
        missing.lack("megatron-core is missing: run make browser")


def checkpoint(shape: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """A model as its publisher would give it: what transformers saves, and the MTP layers as DeepSeek-V3's files do."""
    config = DeepseekV3Config(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    hidden = config.hidden_size
    last = f"model.layers.{config.num_hidden_layers - 1}."
    for number in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        own = {name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
        own |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        own |= {
            "shared_head.head.weight": tensors["lm_head.weight"].clone(),
            "eh_proj.weight": torch.ones(hidden, 2 * hidden),
        }
        own |= {f"{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
        tensors |= {f"model.layers.{number}.{name}": tensor for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def train(job: dict[str, Any], folder: Path) -> None:
    """Run the ranks of one model to their end."""
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.wide.megatron_rank", str(folder / "job.json")]
    with (folder / "log").open("wb") as log:
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, env=environment)
            for rank in range(job["world"])
        ]
    try:
        for process in ranks:
            assert process.wait(PROCESS_S) == 0, (folder / "log").read_text()[-6000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@torch.no_grad()
def computed_by_transformers(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    from transformers.modeling_layers import MtpModel

    first = model.config.num_hidden_layers
    # What transformers takes for MTP layers it knows by DeepSeek-V3's own number of layers, 61.
    layers = range(first, first + model.config.num_nextn_predict_layers)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\." for layer in layers]
    mtp = MtpModel.from_pretrained(model)
    hidden = model.model(ids).last_hidden_state
    found = {"logits": model.lm_head(hidden)}
    for layer in range(model.config.num_nextn_predict_layers):
        # Each layer sees the token after the one that the layer before saw.
        length = ids.shape[1] - layer - 1
        hidden = mtp.forward_layer(
            layer, hidden[:, :length], torch.arange(length)[None], None, input_ids=ids[:, layer + 1 :]
        )
        found[f"mtp{layer}"] = mtp._project_to_logits(hidden)
    return found


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        ({}, {"world": 1, "tp": 1, "ep": 1, "etp": 1}),
        (PLAIN, {"world": 1, "tp": 1, "ep": 1, "etp": 1}),
        ({}, {"world": 4, "tp": 2, "ep": 2, "etp": 2}),
        (PLAIN, {"world": 4, "tp": 2, "ep": 2, "etp": 1}),
    ],
    ids=["whole", "whole-plain", "tp2-ep2-etp2", "tp2-ep2-etp1-plain"],
)
def test_T16_transformers_computes_what_megatron_did(
    changes: dict[str, Any], split: dict[str, int], tmp_path: Path
) -> None:
    expected = checkpoint(SHAPE | changes, tmp_path / "model")
    train(split | {"model": str(tmp_path / "model"), "store": str(tmp_path / "store"), "out": str(tmp_path)}, tmp_path)

    published = load_file(tmp_path / "weights" / "v00000001" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in published.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    by_megatron = load_file(tmp_path / "computed.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / "v00000001", dtype=torch.float32).eval()
    found = computed_by_transformers(model, by_megatron.pop("ids"))
    assert found.keys() == by_megatron.keys()
    for name, logits in found.items():
        theirs = by_megatron[name][:, : logits.shape[1]]
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)
