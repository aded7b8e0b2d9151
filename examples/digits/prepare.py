"""Make the data and the first policy of the digits example: sort five digits, ``38172=`` to ``12378``.

    python examples/digits/prepare.py [--out DIR] [--seed N] [--rounds N]

Writes ``train.jsonl`` and ``heldout.jsonl`` (``prompt``, ``label``; a tenth of all prompts is held out, by hash) and
``model/``, a Qwen2 of 362k parameters with a token per byte, warmed up until it is right sometimes: its
demonstrations sort up with probability 0.3, else down, so that it knows how to sort but seldom sorts up. With
``--rounds`` above 1 they are conversations, in which the prompt is repeated after each answer. Takes about 20 s for a
round; what was already made with the same settings is kept.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

DIGITS = 5
#: Most tokens of an answer: the digits, eos, and some room to be wrong in.
MAX_NEW_TOKENS = 9
#: Tokens of a prompt, and of its answer with eos.
PART = DIGITS + 1
#: Conversations are prompts and answers, one after the other.
CHAT_TEMPLATE = "{% for one in messages %}{{ one.content }}{{ '<eos>' if one.role == 'assistant' }}{% endfor %}"


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    num_train: int = 3000
    num_heldout: int = 128
    #: Steps and batch size of the warm-up, its highest learning rate, and how often demonstrations sort up.
    steps: int = 600
    batch: int = 64
    lr: float = 1e-3
    share_up: float = 0.3
    #: Answers of a demonstration to its prompt.
    rounds: int = 1
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    mlp: int = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="answers of a demonstration")
    arguments = parser.parse_args()
    print(prepare(arguments.out, Settings(seed=arguments.seed, rounds=arguments.rounds)))


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
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = make_prompts(settings)
    write_jsonl(out / "train.jsonl", train)
    write_jsonl(out / "heldout.jsonl", heldout)
    accuracy = make_policy(out / "model", settings, heldout)
    # Last, so that a half-made folder is made again.
    write_atomically(done, json.dumps({"settings": wanted, "accuracy": accuracy}, indent=1) + "\n")
    return (
        f"{out}: {len(train)} train and {len(heldout)} held-out prompts, first policy right on {accuracy:.3f} of these"
    )


def is_heldout(prompt: str) -> bool:
    """Return whether a prompt is held out: a tenth of all, with any seed."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 == 0


def all_prompts(rng: random.Random) -> Iterator[str]:
    numbers = list(range(10**DIGITS))
    rng.shuffle(numbers)
    return (f"{number:0{DIGITS}}=" for number in numbers)


def label_of(prompt: str) -> str:
    return "".join(sorted(prompt[:DIGITS]))


def make_prompts(settings: Settings) -> tuple[list[str], list[str]]:
    """Return distinct prompts: to train on, and held out."""
    prompts = list(all_prompts(random.Random(settings.seed)))
    train = [prompt for prompt in prompts if not is_heldout(prompt)]
    heldout = [prompt for prompt in prompts if is_heldout(prompt)]
    return train[: settings.num_train], heldout[: settings.num_heldout]


def write_jsonl(path: Path, prompts: list[str]) -> None:
    lines = (json.dumps({"prompt": prompt, "label": label_of(prompt)}) + "\n" for prompt in prompts)
    write_atomically(path, "".join(lines))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def make_tokenizer():  # type: ignore[no-untyped-def]  # transformers and torch are loaded late: --help is instant
    """Return a tokenizer with one token per byte, in the form of Qwen2's, as which it is loaded again.

    All bytes, not digits alone: a server warms up with a sentence of its own, and a prompt without any token kills it.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = ["<pad>", "<eos>", *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(settings: Settings, tokenizer):  # type: ignore[no-untyped-def]
    """Return an untrained Qwen2, float32, tied."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(settings.seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).float()


def make_policy(folder: Path, settings: Settings, heldout: list[str]) -> float:
    """Warm a model up, write it into ``folder``, and return its accuracy on held-out prompts."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()  # type: ignore[no-untyped-call]
    model = make_model(settings, tokenizer)  # type: ignore[no-untyped-call]
    warm_up(model, tokenizer, settings)  # type: ignore[no-untyped-call]
    score = accuracy(model, tokenizer, heldout)  # type: ignore[no-untyped-call]
    temporary = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    return score


def warm_up(model, tokenizer, settings: Settings) -> None:  # type: ignore[no-untyped-def]
    """Train with AdamW on demonstrations that sort up with probability ``share_up``, else down."""
    import torch

    rng = random.Random(settings.seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
    answered = [at for at in range(2 * PART * settings.rounds) if at % (2 * PART) >= PART]
    for _ in range(settings.steps):
        rows = [demonstration(rng, settings.share_up, settings.rounds) for _ in range(settings.batch)]
        tokens = torch.tensor([tokenizer.encode(row) for row in rows])
        logits = model(input_ids=tokens).logits[:, [at - 1 for at in answered]]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, answered].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def demonstration(rng: random.Random, share_up: float, rounds: int = 1) -> str:
    """Return a prompt that is not held out with an answer, ``rounds`` times."""
    while is_heldout(prompt := f"{rng.randrange(10**DIGITS):0{DIGITS}}="):
        pass
    answer = label_of(prompt)
    ups = (rng.random() < share_up for _ in range(rounds))
    return "".join(f"{prompt}{answer if up else answer[::-1]}<eos>" for up in ups)


def accuracy(model, tokenizer, prompts: list[str], draws: int = 4) -> float:  # type: ignore[no-untyped-def]
    """Return the share of right answers, eos included, sampled at temperature 1: greedily all would sort down."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([tokenizer.encode(prompt) for prompt in prompts]).repeat(draws, 1)
    with torch.no_grad():
        for _ in range(MAX_NEW_TOKENS):
            chances = model(input_ids=tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    answers = [tokenizer.decode(row[DIGITS + 1 :]).partition("<eos>") for row in tokens]
    right = [
        text == label_of(prompt) and bool(end) for prompt, (text, end, _) in zip(prompts * draws, answers, strict=True)
    ]
    return sum(right) / len(right)


if __name__ == "__main__":
    main()
