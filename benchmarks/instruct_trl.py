"""Train the instruct example with TRL's GRPOTrainer, which generates by transformers: same prompts, reward and loss.

    python -m benchmarks.instruct_trl --out trl-0.jsonl --seed 0

Writes a row ``{step, score, kl, seconds}`` per evaluation of the held-out prompts; ``benchmarks.instruct`` compares
such rows with runs of penstock. Needs trl (tests/adapters/requirements.txt) and the data of the example's prepare.py.
"""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.instruct.rewards import follows

#: As in the example's gpu.yaml.
TEMPERATURE = 0.7
EXAMPLE = Path(__file__).parents[1] / "examples" / "instruct"


class Policy:
    """The policy that is trained: held-out answers, and log-probabilities of answers.

    Args:
        rows: rows per forward pass.
    """

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int, rows: int) -> None:
        self.model, self.tokenizer, self.max_new, self.rows = model, tokenizer, max_new_tokens, rows

    @torch.no_grad()
    def logprobs(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        """Return the log-probabilities, in nats, of the tokens of answers at TEMPERATURE."""
        found: list[list[float]] = []
        for at in range(0, len(prompts), self.rows):
            pairs = list(zip(prompts[at : at + self.rows], answers[at : at + self.rows], strict=True))
            texts = [torch.tensor(prompt + answer) for prompt, answer in pairs]
            ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(self.model.device)
            logits = (
                self.model(input_ids=ids, attention_mask=_mask(texts).to(ids.device)).logits[:, :-1].float()
                / TEMPERATURE
            )
            picked = logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
            for row, (prompt, answer) in zip(picked.tolist(), pairs, strict=True):
                found.append(row[len(prompt) - 1 : len(prompt) - 1 + len(answer)])
        return found

    def score(self, prompts: list[list[int]], answers: list[list[int]], labels: list[str]) -> list[float]:
        """Return the score of each answer, as the example's reward computes it."""
        ends = {self.tokenizer.eos_token_id}
        scores = []
        for answer, label, logprobs in zip(answers, labels, self.logprobs(prompts, answers), strict=True):
            is_ended = bool(answer) and answer[-1] in ends
            sample: Any = SimpleNamespace(
                logprobs=logprobs,
                generated=[1] * len(answer),
                text=self.tokenizer.decode(answer, skip_special_tokens=True),
                finish_reason="stop" if is_ended else "length",
                job=SimpleNamespace(label=label),
            )
            scores.append(follows(sample)["score"])
        return scores

    @torch.no_grad()
    def held_out(self, rows: list[dict[str, Any]], seed: int) -> float:
        """Return the mean score of an answer to each prompt, sampled at TEMPERATURE."""
        scores: list[float] = []
        was_training = self.model.training
        self.model.eval()
        with torch.random.fork_rng(devices=[self.model.device] if self.model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for at in range(0, len(rows), self.rows):
                some = rows[at : at + self.rows]
                prompts = [self.ids_of(row["prompt"]) for row in some]
                given = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
                given = given.to(self.model.device)
                ids = self.model.generate(**given, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0,
                                          max_new_tokens=self.max_new)  # fmt: skip
                answers = [self.ended(row) for row in ids[:, given["input_ids"].shape[1] :].tolist()]
                scores += self.score(prompts, answers, [row["label"] for row in some])
        self.model.train(was_training)
        return sum(scores) / len(scores)

    def ids_of(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of a prompt, from the chat template."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def ended(self, answer: list[int]) -> list[int]:
        """Return an answer up to its end token, without the padding behind it."""
        end = self.tokenizer.eos_token_id
        return answer[: answer.index(end) + 1] if end in answer else answer


def _mask(texts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.ones(len(one), dtype=torch.long) for one in texts], batch_first=True)


class Curve(TrainerCallback):
    """Evaluate before the first step, then every ``every`` steps, and write a row for each evaluation."""

    def __init__(self, policy: Policy, rows: list[dict[str, Any]], out: Path, every: int, seed: int) -> None:
        self.policy, self.rows, self.out, self.every, self.seed = policy, rows, out, every, seed
        self.began = time.monotonic()
        self.out.write_text("")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluate(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.evaluate(state)

    def evaluate(self, state: Any) -> None:
        """Evaluate the policy, and append the row."""
        paused = time.monotonic()
        score = self.policy.held_out(self.rows, self.seed + state.global_step)
        told = [row for row in state.log_history if "kl" in row]
        row = {
            "step": state.global_step,
            "score": score,
            "kl": told[-1]["kl"] if told else 0.0,
            "seconds": round(paused - self.began, 1),
        }
        self.began += time.monotonic() - paused  # the time of an evaluation does not count
        with self.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=EXAMPLE / "data", help="folder of prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="file for a row per evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=32, help="prompts per step")
    parser.add_argument("--n", type=int, default=16, help="answers per prompt")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--kl", type=float, default=0.01, help="weight of the KL term")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--micro", type=int, default=64, help="rows per forward pass")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--held-out", type=int, default=0, help="most held-out prompts; 0: all")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    has_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(arguments.data / "model", padding_side="left")
    # float32 weights under autocast, as penstock's trainer has them.
    model = AutoModelForCausalLM.from_pretrained(arguments.data / "model", dtype=torch.float32)
    policy = Policy(model, tokenizer, arguments.max_new_tokens, arguments.micro)

    def score(prompts: list[Any], completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        return policy.score([policy.ids_of(one) for one in prompts], completion_ids, label)

    config = GRPOConfig(
        output_dir=str(arguments.out.with_suffix("")),
        seed=arguments.seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=arguments.groups * arguments.n // arguments.micro,
        num_generations=arguments.n,
        max_completion_length=arguments.max_new_tokens,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        beta=arguments.kl,
        temperature=TEMPERATURE,
        bf16=has_gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not has_gpu,
    )
    rows = [json.loads(line) for line in (arguments.data / "heldout.jsonl").read_text().splitlines()]
    rows = rows[: arguments.held_out or None]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_json(str(arguments.data / "train.jsonl")),
        processing_class=tokenizer,
        callbacks=[Curve(policy, rows, arguments.out, arguments.evaluate_every, arguments.seed)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
