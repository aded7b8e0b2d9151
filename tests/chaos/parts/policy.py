"""The first policy of a run and its prompts, written without torch: a folder that penstock takes for a model."""

import json
import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.chaos.parts import law

#: The chat template: roles are letters, ``<`` ends a message.
CHAT = (
    "{% for one in messages %}{{ one.role[0] }}>{{ one.content }}<{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)


def write_policy(folder: Path, *, is_real: bool = False, is_cuda: bool = False) -> None:
    """Config, tokenizer of one token per character, and one tensor: the seed of the law.

    Args:
        is_real: a model of transformers in its stead, for a real engine.
        is_cuda: one with heads as wide as attention kernels of a GPU have them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(CHAT)
    if is_real:
        from tests.tiny_model import make_tiny_model

        make_tiny_model(folder, **({"hidden_size": 256} if is_cuda else {}))
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *law.ALPHABET])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = {
        "architectures": ["LawForCausalLM"], "model_type": "qwen2", "vocab_size": law.VOCABULARY,
        "pad_token_id": law.PAD, "eos_token_id": law.EOS, "bos_token_id": None, "max_position_embeddings": 4096,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"law": np.frombuffer(law.UNTRAINED, dtype=np.uint8)}, folder / "model.safetensors")


def write_data(path: Path, letter: str, seed: int, *, lines: int = 200) -> None:
    """Prompts that are all different, with their labels, and an answer for those who give them."""
    rng = random.Random(f"{letter}{seed}")
    rows = []
    for number in range(lines):
        other = rng.randrange(1000)
        said = {"prompt": f"{letter}{number}+{other}=", "label": str(number), "answer": str(number + other)}
        rows.append(json.dumps(said) + "\n")
    path.write_text("".join(rows))
