"""Make the data and the first policy of the vision example: say the colour of a square, wherever it stands.

    python examples/vision/prepare.py [--out DIR] [--seed N]

Writes ``train.jsonl`` and ``heldout.jsonl`` (``prompt``: messages that name an image below the folder; ``label``: such
as ``red``), ``images/``, and ``model/``, a Qwen2-VL of some 600k parameters with a token per byte, warmed up until it
is right sometimes: its demonstrations name the colour with probability 0.3, else the next one, so that it tells colours
apart but seldom says the right one. Takes about a minute; what was already made with the same settings is kept.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Pixels of an image's side: four places of 28 x 28, each of which becomes one token.
SIDE = 56
COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40)}
#: Most tokens of an answer: the longest colour, eos, and some room to be wrong in.
MAX_NEW_TOKENS = 9
TEXT = "colour?"
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + _IMAGE + "{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    num_train: int = 600
    num_heldout: int = 96
    #: Steps and batch size of the warm-up, its highest learning rate, and how often demonstrations are right.
    steps: int = 300
    batch: int = 32
    lr: float = 1e-3
    share_right: float = 0.3
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    mlp: int = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(prepare(arguments.out, Settings(seed=arguments.seed)))


def prepare(out: Path, settings: Settings) -> str:
    """Make what is missing under ``out``; returns one line that says what was done."""
    # With this script, for what it writes depends on it.
    wanted = asdict(settings) | {"script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    done = out / "prepared.json"
    if done.is_file():
        before = json.loads(done.read_text())
        if before["settings"] == wanted:
            return f"{out}: already made, held-out accuracy {before['accuracy']:.3f}"
        done.unlink()
    (out / "images").mkdir(parents=True, exist_ok=True)
    rng = random.Random(settings.seed)
    write_prompts(out, "train", settings.num_train, rng)
    heldout = write_prompts(out, "heldout", settings.num_heldout, rng)
    accuracy = make_policy(out / "model", settings, heldout)
    # Last, so that a half-made folder is made again.
    write_atomically(done, json.dumps({"settings": wanted, "accuracy": accuracy}, indent=1) + "\n")
    return (
        f"{out}: {settings.num_train} train and {len(heldout)} held-out prompts, first policy right on {accuracy:.3f} "
        "of these"
    )


def draw(rng: random.Random) -> tuple[Any, str]:
    """An image, which differs from all others by its noise, and its label."""
    import numpy as np
    from PIL import Image

    colour, place = rng.choice(list(COLOURS)), rng.randrange(4)
    noise = np.random.default_rng(rng.getrandbits(64))
    pixels = noise.integers(90, 150, (SIDE, SIDE, 3), dtype=np.uint8)
    half, top, left = SIDE // 2, place // 2 * (SIDE // 2), place % 2 * (SIDE // 2)
    y, x = top + rng.randrange(2, 9), left + rng.randrange(2, 9)
    pixels[y : y + half - 11, x : x + half - 11] = COLOURS[colour]
    return Image.fromarray(pixels), colour


def write_prompts(out: Path, name: str, count: int, rng: random.Random) -> list[tuple[Any, str]]:
    drawn = [draw(rng) for _ in range(count)]
    lines = []
    for number, (image, label) in enumerate(drawn):
        path = f"images/{name}-{number:04}.png"
        image.save(out / path)
        told = {"image": path, "sha256": hashlib.sha256((out / path).read_bytes()).hexdigest()}
        content = [{"type": "image", **told}, {"type": "text", "text": TEXT}]
        lines.append(json.dumps({"prompt": [{"role": "user", "content": content}], "label": label}) + "\n")
    write_atomically(out / f"{name}.jsonl", "".join(lines))
    return drawn


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def make_tokenizer():  # type: ignore[no-untyped-def]  # transformers and torch are loaded late: --help is instant
    """One token per byte, and those that stand for images, in the form that Qwen2's tokenizer has."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    special = ["<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    vocabulary = [*special, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=special[2:],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(settings: Settings, tokenizer):  # type: ignore[no-untyped-def]
    """An untrained Qwen2-VL, float32, tied."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(settings.seed)
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for key, token in names.items()}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": settings.hidden,
            "intermediate_size": settings.mlp,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.heads,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            **ends,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": settings.hidden,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "in_channels": 3,
            # The same by the name that SGLang looks for.
            "in_chans": 3,
        },
        tie_word_embeddings=True,
        **ids,
        **ends,
    )
    return Qwen2VLForConditionalGeneration(config).float()


def make_policy(folder: Path, settings: Settings, heldout: list[tuple[Any, str]]) -> float:
    """Warm a model up, write it into ``folder``, and return its accuracy on held-out prompts."""
    import torch
    from transformers import AutoImageProcessor, Qwen2VLImageProcessorPil
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()  # type: ignore[no-untyped-call]
    model = make_model(settings, tokenizer)  # type: ignore[no-untyped-call]
    temporary = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    # Sizes between the least and the most are left alone, where both sides are multiples of a token's 28 pixels.
    Qwen2VLImageProcessorPil(min_pixels=SIDE * SIDE, max_pixels=4 * SIDE * SIDE).save_pretrained(temporary)
    processor = AutoImageProcessor.from_pretrained(temporary)
    warm_up(model, tokenizer, processor, settings)  # type: ignore[no-untyped-call]
    score = accuracy(model, tokenizer, processor, heldout)  # type: ignore[no-untyped-call]
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    return score


def inputs_of(tokenizer, processor, images: list[Any], answers: list[list[int]]) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    """What the model is called with: prompts with four tokens in the place of each image, then the answers."""
    import torch

    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    prompt = tokenizer.encode(_IMAGE + TEXT + "=", add_special_tokens=False)
    at = prompt.index(place)
    prompt[at : at + 1] = [place] * 4
    tokens = torch.tensor([prompt + answer for answer in answers])
    return {"input_ids": tokens, "mm_token_type_ids": (tokens == place).int(), **processor(images, return_tensors="pt")}


def warm_up(model, tokenizer, processor, settings: Settings) -> None:  # type: ignore[no-untyped-def]
    """AdamW on demonstrations that name the colour with probability ``share_right``, else the next one."""
    import torch

    rng, names = random.Random(settings.seed + 1), list(COLOURS)
    after = dict(zip(names, [*names[1:], names[0]], strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
    for _ in range(settings.steps):
        images, labels = zip(*(draw(rng) for _ in range(settings.batch)), strict=True)
        said = [label if rng.random() < settings.share_right else after[label] for label in labels]
        answers = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
        size = max(map(len, answers))
        padded = [answer + [tokenizer.pad_token_id] * (size - len(answer)) for answer in answers]
        inputs = inputs_of(tokenizer, processor, list(images), padded)
        logits = model(**inputs).logits[:, -size - 1 : -1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), inputs["input_ids"][:, -size:].flatten(), ignore_index=tokenizer.pad_token_id
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def accuracy(model, tokenizer, processor, drawn: list[tuple[Any, str]]) -> float:  # type: ignore[no-untyped-def]
    """Share of right answers, eos included, drawn at temperature 1: greedy ones would name the more usual colour."""
    import torch

    generator = torch.Generator().manual_seed(0)
    answers: list[list[int]] = [[] for _ in drawn]
    with torch.no_grad():
        for _ in range(MAX_NEW_TOKENS):
            inputs = inputs_of(tokenizer, processor, [image for image, _ in drawn], answers)
            # The place of an image in an answer would be one without an image.
            logits = model(**inputs).logits[:, -1]
            logits[:, tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])] = -torch.inf
            chances = logits.softmax(-1)
            for answer, token in zip(answers, torch.multinomial(chances, 1, generator=generator), strict=True):
                answer.append(int(token))
    texts = [tokenizer.decode(answer).partition("<eos>") for answer in answers]
    right = [text == label and bool(end) for (_, label), (text, end, _) in zip(drawn, texts, strict=True)]
    return sum(right) / len(right)


if __name__ == "__main__":
    main()
