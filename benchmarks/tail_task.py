"""A task whose answers have a long tail of lengths: think in dots, then sort five digits.

``38172=`` is answered ``....12378``: a few dots (log-normal, median 4), then the digits. One prompt in eight ends in
``~`` instead: it is hard, and only an answer that thought for at least 20 dots counts. The first policy has learned to
draw 30 to 110 dots there. It sorts up with probability 0.3, else down, so that it knows how to sort but is seldom
right; what it has to learn is to sort up.

    python -m benchmarks.tail_task FOLDER

writes ``train.jsonl``, ``heldout.jsonl`` and ``model/`` into FOLDER; about 40 s on one core.
"""

import hashlib
import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.records.sample import Sample

DIGITS = 5
MAX_DOTS = 110
#: Dots, digits and eos.
MAX_NEW_TOKENS = MAX_DOTS + DIGITS + 1
MEDIAN_DOTS, SIGMA = 4.0, 0.6
#: Fewest dots of a long answer in the warm-up (and most of a short one), and those that a hard prompt asks for.
LONG_DOTS, ENOUGH_DOTS = 30, 20
#: Ends of prompts: {hard: character}.
MARKS = {False: "=", True: "~"}
SHARE_HARD = 1 / 8
#: Rows of a warm-up step: {hard: number}.
BATCH = {False: 28, True: 4}
TOKENS_PER_STEP = 600
SHARE_UP = 0.3
NUM_TRAIN, NUM_HELDOUT = 3000, 128
STEPS, LR = 1000, 2e-3
PAD, EOS = 0, 1
ALPHABET = "0123456789=~."


def score(sample: "Sample") -> float:
    """1 where the digits behind the dots are the label, and a hard prompt was thought about for long enough."""
    digits = sample.text.lstrip(".")
    dots = len(sample.text) - len(digits)
    hard = str(sample.job.prompt).endswith(MARKS[True])
    return float(digits == sample.job.label and (dots >= ENOUGH_DOTS or not hard))


def label_of(prompt: str) -> str:
    return "".join(sorted(prompt[:DIGITS]))


def is_heldout(prompt: str) -> bool:
    """A tenth of all prompts."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 == 0


def draw_dots(rng: random.Random, hard: bool) -> int:
    if hard:
        return rng.randint(LONG_DOTS, MAX_DOTS)
    return min(LONG_DOTS, int(MEDIAN_DOTS * math.exp(rng.gauss(0, SIGMA))))


def write_prompts(folder: Path, seed: int) -> None:
    """``prompt`` and ``label`` of distinct prompts, held-out ones apart."""
    rng = random.Random(seed)
    prompts = [f"{n:0{DIGITS}}{MARKS[rng.random() < SHARE_HARD]}" for n in rng.sample(range(10**DIGITS), 6000)]
    train = [prompt for prompt in prompts if not is_heldout(prompt)][:NUM_TRAIN]
    heldout = [prompt for prompt in prompts if is_heldout(prompt)][:NUM_HELDOUT]
    for name, some in (("train", train), ("heldout", heldout)):
        lines = (json.dumps({"prompt": prompt, "label": label_of(prompt)}) + "\n" for prompt in some)
        (folder / f"{name}.jsonl").write_text("".join(lines))


def make_policy(folder: Path, seed: int) -> None:
    """Warm up a Qwen2 of 0.3 M parameters on demonstrations and save it with its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _make_tokenizer()
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    make: Any = Qwen2ForCausalLM
    model = make(config)
    ids = {character: tokenizer.encode(character)[0] for character in ALPHABET}
    rng = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS, pct_start=0.05)
    for _ in range(STEPS):
        # Two parts, so that few rows are padded to the longest.
        parts = [[_demonstration(rng, hard) for _ in range(rows)] for hard, rows in BATCH.items()]
        loss = sum(_loss(model, [[*(ids[c] for c in row), EOS] for row in rows]) for rows in parts)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _loss(model: Any, rows: list[list[int]]) -> Any:
    """Negative log-likelihood of the answers, summed over tokens, per usual number of tokens of a step."""
    import torch

    longest = max(map(len, rows))
    tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    logits = model(input_ids=tokens).logits[:, DIGITS:-1]
    wanted = tokens[:, DIGITS + 1 :]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum")
    return loss / TOKENS_PER_STEP


def _make_tokenizer() -> Any:
    """One token per byte, as Qwen2's own class, for that is how a Qwen2 folder is loaded again."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *sorted(ByteLevel.alphabet())])}
    make: Any = Qwen2Tokenizer
    return make(vocab=vocabulary, merges=[], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>")


def _demonstration(rng: random.Random, hard: bool) -> str:
    while is_heldout(prompt := f"{rng.randrange(10**DIGITS):0{DIGITS}}{MARKS[hard]}"):
        pass
    answer = label_of(prompt)
    return prompt + "." * draw_dots(rng, hard) + (answer if rng.random() < SHARE_UP else answer[::-1])


def prepare(folder: Path, seed: int = 0) -> None:
    """Write everything; what is there already is kept."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder, seed)
    make_policy(folder / "model", seed)
    (folder / "done").touch()


if __name__ == "__main__":
    import typer

    typer.run(prepare)
