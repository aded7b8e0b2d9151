"""Make the data and the first policy of the tools example: questions that a tiny model can answer only with a tool, and
a game.

    python examples/tools/prepare.py [--out DIR] [--seed N]

Writes ``NAME.jsonl`` and ``NAME-heldout.jsonl`` for ``calculator``, ``game``, ``programs`` and ``search`` (``prompt``,
``label``; about a tenth is held out, by hash), ``index.txt``, the lines to search, and ``model/``: a Qwen2 of 362k
parameters with a token per byte. Its demonstrations call the tool, or play the game well, with probability 0.3, and
guess otherwise. Takes about two minutes; existing data made with the same settings is kept.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

#: Begins each answer of the model.
MODEL = "<model>"
#: Shortest form: names of the tools, then the messages. Calls have the syntax of SGLang's parser ``pythonic``.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}:{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<model>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}{% endfor %}"
    ")]{% endfor %}<eos>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
#: Numbers of a game, and the guesses by which bisection always finds one.
NUMBERS, GUESSES = 15, 4
#: Words of questions about programs, and their operators.
OPERATORS = {"power": "**", "quotient": "//", "rest": "%"}
RELATIONS = ("home", "work", "pet")
NAMES = 120


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    num_train: int = 1000
    num_heldout: int = 64
    #: Steps and batch size of the warm-up, its highest learning rate, and how often demonstrations are good.
    steps: int = 1000
    batch: int = 12
    lr: float = 2e-3
    share_good: float = 0.4
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    mlp: int = 256


@dataclass(frozen=True)
class Question:
    prompt: str
    label: str
    #: Name of the tool; '': the game.
    tool: str
    #: Messages after the prompt: a good demonstration, and one that guesses.
    good: list[Message]
    guess: list[Message]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(prepare(arguments.out, Settings(seed=arguments.seed)))


def prepare(out: Path, settings: Settings) -> str:
    """Make what is missing in ``out``; return one line that describes it."""
    wanted = asdict(settings) | {"script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    done = out / "prepared.json"
    if done.is_file() and json.loads(done.read_text()) == wanted:
        return f"{out}: already made"
    done.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    facts = make_facts(random.Random(settings.seed))
    write_atomically(out / "index.txt", "".join(f"{line}\n" for line in facts))
    for name, draw in tasks(facts).items():
        train, heldout = make_questions(draw, settings)
        write_jsonl(out / f"{name}.jsonl", train)
        write_jsonl(out / f"{name}-heldout.jsonl", heldout)
    make_policy(out / "model", settings, facts)
    # Last, so that an incomplete folder is made again.
    write_atomically(done, json.dumps(wanted) + "\n")
    return f"{out}: {', '.join(tasks(facts))}, and a first policy"


def tasks(facts: list[str]) -> dict[str, Callable[[random.Random], Question]]:
    """Return for each data set a function that draws a question."""
    return {
        "calculator": calculator,
        "game": game,
        "programs": program,
        "search": lambda rng: search(rng, facts),
    }


def calculator(rng: random.Random) -> Question:
    """Draw a product."""
    first, second = rng.randrange(10, 100), rng.randrange(10, 100)
    prompt = f"{first}*{second}"
    return with_tool(prompt, str(first * second), "calc", "x", prompt, str(rng.randrange(100, 10_000)))


def program(rng: random.Random) -> Question:
    """Draw a calculation that a program does."""
    word, first, second = rng.choice(list(OPERATORS)), rng.randrange(10, 100), rng.randrange(2, 10)
    label = {"power": first**second, "quotient": first // second, "rest": first % second}[word]
    code = f"print({first}{OPERATORS[word]}{second})"
    return with_tool(f"{word} {first} {second}", str(label), "run", "code", code, str(rng.randrange(10, 100)))


def search(rng: random.Random, facts: list[str]) -> Question:
    """Draw a question that one line of the index answers."""
    line = rng.choice(facts)
    asked, _, label = line.partition(": ")
    return with_tool(f"{asked}?", label, "find", "words", asked, word_of(rng), result=line)


def with_tool(
    prompt: str, label: str, tool: str, argument: str, value: str, guess: str, result: str | None = None
) -> Question:
    """Return a question with a demonstration that calls a tool, whose result is or contains the label."""
    call = {"type": "function", "function": {"name": tool, "arguments": {argument: value}}}
    good = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": label if result is None else result},
        {"role": "assistant", "content": label},
    ]
    return Question(prompt, label, tool, good, [{"role": "assistant", "content": guess}])


def game(rng: random.Random) -> Question:
    """Draw a box, and the number in it, which is to be found."""
    number = rng.randint(1, NUMBERS)
    good = play(number, lambda low, high: (low + high) // 2)
    guess = play(number, lambda *_: rng.randint(1, NUMBERS))
    return Question(f"box {rng.randrange(1000, 10_000)}", str(number), "", good, guess)


def play(number: int, choose: Callable[[int, int], int]) -> list[Message]:
    """Return the messages of a game: guesses, and what the environment answers.

    Args:
        choose: returns a guess, given the lowest and the highest number that are left.
    """
    messages: list[Message] = []
    low, high = 1, NUMBERS
    for left in reversed(range(GUESSES)):
        guess = choose(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number or not left:
            break
        is_lower = number < guess
        messages.append({"role": "user", "content": "lower" if is_lower else "higher"})
        low, high = (low, guess - 1) if is_lower else (guess + 1, high)
    return messages


def make_facts(rng: random.Random) -> list[str]:
    """Return the lines of the index: invented names, with three facts each."""
    words = list(dict.fromkeys(word_of(rng) for _ in range(10 * NAMES)))
    names, values = words[:NAMES], words[NAMES:]
    return [f"{name} {relation}: {rng.choice(values)}" for name in names for relation in RELATIONS]


def word_of(rng: random.Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2))


def is_heldout(question: Question) -> bool:
    """Return whether a question is held out: about a tenth of all, for every seed."""
    return hashlib.sha256(question.prompt.encode()).digest()[0] % 10 == 0


def make_questions(
    draw: Callable[[random.Random], Question], settings: Settings
) -> tuple[list[Question], list[Question]]:
    """Return distinct questions: to train on, and held out."""
    rng = random.Random(settings.seed)
    drawn = (draw(rng) for _ in range(40 * settings.num_heldout))
    found = list({(question.prompt, question.label): question for question in drawn}.values())
    train = [question for question in found if not is_heldout(question)]
    heldout = [question for question in found if is_heldout(question)]
    return train[: settings.num_train], heldout[: settings.num_heldout]


def write_jsonl(path: Path, questions: list[Question]) -> None:
    lines = (json.dumps({"prompt": one.prompt, "label": one.label}) + "\n" for one in questions)
    write_atomically(path, "".join(lines))


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def make_tokenizer():  # type: ignore[no-untyped-def]  # transformers and torch are loaded late: --help is instant
    """Return a tokenizer with one token per byte, and the chat template."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = ["<pad>", "<eos>", MODEL, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=[MODEL],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


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
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).float()


def make_policy(folder: Path, settings: Settings, facts: list[str]) -> None:
    """Warm a model up, and write it into ``folder``."""
    tokenizer = make_tokenizer()  # type: ignore[no-untyped-call]
    model = make_model(settings, tokenizer)  # type: ignore[no-untyped-call]
    warm_up(model, tokenizer, settings, facts)  # type: ignore[no-untyped-call]
    temporary = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)


def warm_up(model, tokenizer, settings: Settings, facts: list[str]) -> None:  # type: ignore[no-untyped-def]
    """Train on demonstrations, with loss on the model's answers alone."""
    import torch

    torch.set_num_threads(1)
    rng, draws = random.Random(settings.seed + 1), list(tasks(facts).values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
    for _ in range(settings.steps):
        rows = [demonstration(rng, draw, settings.share_good) for draw in draws for _ in range(settings.batch)]
        encoded = sorted((tokenizer.encode(row) for row in rows), key=len)
        optimizer.zero_grad()
        # Those of like length together: most are short.
        for at in range(0, len(encoded), settings.batch):
            tokens, targets = padded(encoded[at : at + settings.batch], tokenizer)  # type: ignore[no-untyped-call]
            logits = model(input_ids=tokens).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
            (loss / len(encoded)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def demonstration(rng: random.Random, draw: Callable[[random.Random], Question], share_good: float) -> str:
    """Return the text of a conversation about a question that is not held out."""
    while is_heldout(question := draw(rng)):
        pass
    return rendered(question, question.good if rng.random() < share_good else question.guess)


def rendered(question: Question, messages: list[Message]) -> str:
    """Render a question and what follows it, as the chat template does."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [{"type": "function", "function": {"name": question.tool}}] if question.tool else None
    conversation = [{"role": "user", "content": question.prompt}, *messages]
    texts, _ = render_jinja_template([conversation], tools=tools, chat_template=TEMPLATE)
    return texts[0]


def padded(rows: list[list[int]], tokenizer):  # type: ignore[no-untyped-def]
    """Return tokens, and as targets those that the model is to generate: its answers, each with its end."""
    import torch

    begin, end = tokenizer.convert_tokens_to_ids(MODEL), tokenizer.eos_token_id
    tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    targets = torch.full_like(tokens, -100)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        is_answer = False
        for at, token in enumerate(row):
            if is_answer:
                targets[number, at] = token
            is_answer = (is_answer or token == begin) and token != end
    return tokens, targets


if __name__ == "__main__":
    main()
