"""Make the data and the first policy of the code example: a tiny model that writes tiny programs, ``times 123=`` to
``x*123``.

    python examples/code/prepare.py [--out DIR] [--seed N]

Writes ``train.jsonl`` and ``heldout.jsonl``, whose labels are tests (``inputs``, ``outputs`` of a function), and
``model/``: the policy of ``examples/digits`` in shape, warmed up on demonstrations whose operator is right with
probability 0.3. It knows how to write a program then, but seldom the right one. Takes about 20 s; what was made
already is kept.
"""

import argparse
import hashlib
import importlib.util
import json
import operator
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

#: Word of a prompt -> (what stands between x and the number, what it does).
OPERATORS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", operator.add), "minus": ("-", operator.sub), "times": ("*", operator.mul), "mod": ("%", operator.mod),
    "and": ("&", operator.and_), "or": ("|", operator.or_), "xor": ("^", operator.xor),
}  # fmt: skip
NUMBERS = range(100, 1000)
#: What a program is tried on: no two operators agree on both, whatever the number.
INPUTS = (1457, -86)
#: The program's first words, which stand before the answer.
PREFIX = "f = lambda x: "


@dataclass(frozen=True)
class Sizes:
    seed: int = 0
    num_train: int = 2000
    num_heldout: int = 64
    #: How often demonstrations have the right operator.
    share_right: float = 0.3
    steps: int = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(prepare(arguments.out, Sizes(seed=arguments.seed)))


def prepare(out: Path, sizes: Sizes) -> str:
    """Make what is missing under ``out``; returns one line that says what was done."""
    done = out / "prepared.json"
    wanted = {"sizes": repr(sizes), "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    if done.is_file() and json.loads(done.read_text()) == wanted:
        return f"{out}: already made"
    done.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    train, heldout = make_prompts(sizes)
    for name, prompts in (("train", train), ("heldout", heldout)):
        lines = (json.dumps({"prompt": prompt, "label": label_of(prompt)}) + "\n" for prompt in prompts)
        (out / f"{name}.jsonl").write_text("".join(lines))
    make_policy(out / "model", sizes)
    # Last, so that a half-made folder is made again.
    done.write_text(json.dumps(wanted) + "\n")
    return f"{out}: {len(train)} train and {len(heldout)} held-out prompts, and a first policy"


def make_prompts(sizes: Sizes) -> tuple[list[str], list[str]]:
    """Distinct prompts: to train on, and held out."""
    prompts = [f"{word:>5} {number}=" for word in OPERATORS for number in NUMBERS]
    random.Random(sizes.seed).shuffle(prompts)
    train = [prompt for prompt in prompts if not is_heldout(prompt)]
    heldout = [prompt for prompt in prompts if is_heldout(prompt)]
    return train[: sizes.num_train], heldout[: sizes.num_heldout]


def is_heldout(prompt: str) -> bool:
    """A tenth of all prompts, whatever the seed."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 10 == 0


def label_of(prompt: str) -> dict[str, object]:
    """The tests of a prompt's program."""
    word, number = prompt.rstrip("=").split()
    does = OPERATORS[word][1]
    outputs = [does(x, int(number)) for x in INPUTS]
    return {"inputs": [[x] for x in INPUTS], "outputs": outputs, "fn_name": "f", "prefix": PREFIX}


def demonstration(rng: random.Random, share_right: float) -> str:
    """A prompt that is not held out, with a program."""
    while is_heldout(prompt := f"{rng.choice(list(OPERATORS)):>5} {rng.choice(NUMBERS)}="):
        pass
    word, number = prompt.rstrip("=").split()
    others = [other for other in OPERATORS if other != word]
    sign = OPERATORS[word if rng.random() < share_right else rng.choice(others)][0]
    return f"{prompt}x{sign}{number}"


def make_policy(folder: Path, sizes: Sizes) -> None:
    """Warm a model up, and write it into ``folder``."""
    import torch

    torch.set_num_threads(1)
    digits = digits_prepare()
    settings = digits.Settings(seed=sizes.seed)
    tokenizer = digits.make_tokenizer()
    model = digits.make_model(settings, tokenizer)
    rng = random.Random(sizes.seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / sizes.steps)
    for _ in range(sizes.steps):
        rows = [demonstration(rng, sizes.share_right) for _ in range(settings.batch)]
        prompt_length = rows[0].index("=") + 1
        tokens = torch.tensor([[*tokenizer.encode(row), tokenizer.eos_token_id] for row in rows])
        logits = model(input_ids=tokens).logits[:, prompt_length - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, prompt_length:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    temporary = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def digits_prepare() -> ModuleType:
    """The script of the digits example, for the shape of its model and its tokenizer."""
    path = Path(__file__).parents[1] / "digits" / "prepare.py"
    spec = importlib.util.spec_from_file_location("digits_prepare", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
