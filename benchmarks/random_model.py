"""A Qwen2 with random weights and a word tokenizer, of any shape: there is something to serve without a download."""

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model; with answers of a fixed length, random weights give honest throughput."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 768
    vocab: int = 4096
    context: int = 4096
    dtype: str = "float32"

    @property
    def num_parameters(self) -> int:
        """Parameters with tied embeddings, norms and biases left out."""
        attention = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        return int(self.layers * (attention + 3 * self.hidden * self.mlp) + self.vocab * self.hidden)


def make_model(folder: Path, shape: Shape, *, seed: int = 0, spread: float = 0.02) -> None:
    """Write config, weights and tokenizer to ``folder``. Takes seconds, or a minute for billions of parameters.

    Args:
        spread: deviation of the weights; at 0.02 every seed draws nearly uniformly.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.set_default_dtype(dtype)
    # Half a billion numbers in bfloat16 take a processor a minute.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
        model.save_pretrained(folder)
        del model
    finally:
        torch.set_default_dtype(torch.float32)
    _make_tokenizer(shape.vocab, folder)


def _make_tokenizer(vocab: int, folder: Path) -> None:
    """One token per character, and names for the rest of the vocabulary.

    A character, because a Qwen2 folder is read as Qwen2's own tokenizer, whose pieces these are when there are no
    merges, whatever the folder says.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(character for character in string.printable if character.isprintable())]
    names = {word: index for index, word in enumerate([*words, *(f"<{i}>" for i in range(len(words), vocab))])}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
