"""A tiny policy for tests: Qwen2 shape, random weights, a tokenizer of one token per character. Seeded."""

from pathlib import Path
from typing import Any

from penstock.records.publication import Publication
from penstock.system.disk import file_xxh3

#: No space: tokenizers of the Qwen2 family write it as another character.
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz=+-<>?."
#: Spread of the weights: at 0.02 every seed draws nearly uniformly and no oracle could tell two of them apart.
SPREAD = 0.12


def make_tiny_model(folder: Path, seed: int = 0, **shape: Any) -> Path:
    """Write config, tokenizer and float32 weights to ``folder``; the same bytes for the same seed. Takes 0.1 s."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _write(folder, seed, Qwen2ForCausalLM, Qwen2Config(**_SHAPE | shape, num_hidden_layers=2))


def make_tiny_mixture(folder: Path, seed: int = 0) -> Path:
    """The same with 3 layers of 8 experts, 2 of which see a token (Qwen3 MoE shape)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_SHAPE,
        num_hidden_layers=3,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    return _write(folder, seed, Qwen3MoeForCausalLM, config)


def make_tiny_classifier(folder: Path, seed: int = 0) -> Path:
    """A reward model of the same shape: one number for a text, of its last token."""
    import numpy as np
    from safetensors.numpy import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(**_SHAPE | {"tie_word_embeddings": False}, num_hidden_layers=2, num_labels=1)
    _write(folder, seed, Qwen2ForSequenceClassification, config)
    # SGLang 0.5.20 gives the head a bias that transformers' has not, and leaves it as it was made where there is none.
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"score.bias": np.zeros(1, np.float32)}, path, metadata={"format": "pt"})
    return folder


_SHAPE: dict[str, Any] = {
    "vocab_size": 2 + len(ALPHABET),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": SPREAD,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "dtype": "float32",
}


def _write(folder: Path, seed: int, kind: Any, config: Any) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def publication_of(folder: Path, version: int, rev: int = 0) -> Publication:
    """Return the announcement of a model folder, whose index is written into the folder."""
    from safetensors import safe_open

    from penstock.weights.index import INDEX_FILE, TensorEntry, digest, index_bytes

    files = [path for path in sorted(folder.iterdir()) if path.name != INDEX_FILE]
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        entries = [
            TensorEntry(name, _TORCH[part.get_dtype()], tuple(part.get_shape()), "model.safetensors")
            for name, part in slices.items()
        ]
    index = index_bytes(
        entries, {path.name: file_xxh3(path) for path in files}, {path.name: path.stat().st_size for path in files}
    )
    (folder / INDEX_FILE).write_bytes(index)
    return Publication("policy", version, "disk", str(folder), rev=rev, index=digest(index))


_TORCH = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
