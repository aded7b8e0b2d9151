"""Measure an optimizer step of the reference trainer: seconds, tokens per second, and the share of the GPU's peak.

A batch of groups of 8 answers of uneven lengths, all of it one optimizer step. ``packed`` lays rows end to end,
``padded`` is the path of models that cannot be packed; both steps are made in turns. MFU: (6 times the parameters
without embeddings times the tokens, plus 12 times layers, hidden size and the sum of squared lengths / 2 for attention)
per second, over 989 TFLOP/s (dense bfloat16 of an H100 or H200).

    python -m benchmarks.trainer_step --json FILE
    python -m benchmarks.trainer_step --device cuda --shape 135m --tokens 50000 --max-tokens 16384 --json FILE
    python -m benchmarks.trainer_step --device cuda --shape 1.5b --tokens 65536 --max-tokens 16384 --no-padded
"""

import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import Report, execute, median, versions
from benchmarks.gpu_model import SHAPES
from benchmarks.options import Device, JsonFile, ShapeName
from benchmarks.random_model import Shape, make_model
from penstock.config import TrainerConfig
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.process import enable_tf32
from penstock.consumers.grpo.step import GRPO
from penstock.records.job import Job
from penstock.records.sample import Sample
from tests.batch_factory import make_batch

#: Dense bfloat16 of an H100 or H200, by their data sheet.
PEAK = 989e12
GROUP, PROMPT = 8, 40


def batch_of(shape: Shape, tokens: int, answer: int) -> Batch:
    """Return a batch of about ``tokens`` tokens, its answers uniform between half and three halves of ``answer``."""
    rng, samples, total = random.Random(0), list[Sample](), 0
    while total < tokens:
        prompt = [rng.randrange(2, shape.vocab) for _ in range(PROMPT)]
        job = Job(f"bench/0/{len(samples)}", GROUP, prompt_ids=prompt, sampling={"temperature": 1.0})
        for k in range(GROUP):
            length = rng.randrange(answer // 2, answer * 3 // 2)
            sample = Sample(job, k)
            sample.append(prompt)
            sample.prompt_length = PROMPT
            ids = [rng.randrange(2, shape.vocab) for _ in range(length)]
            sample.append(ids, version=5, logprobs=[-10.0] * length)
            sample.reward, sample.status, sample.finish_reason = rng.random(), "completed", "stop"
            samples.append(sample)
            total += len(sample.tokens)
    return make_batch(samples, train_version=5)


def flops(shape: Shape, lengths: list[int]) -> float:
    """Return the floating point operations of a step without recomputation, by the head's formula."""
    body = shape.num_parameters - shape.vocab * shape.hidden
    attention = 12 * shape.layers * shape.hidden * sum(length**2 for length in lengths) / 2
    return 6 * body * sum(lengths) + attention


def measure(learner: GRPO, batch: Batch, rounds: int) -> list[float]:
    """Return the seconds of steps, after one that is not counted. Blocks."""
    times = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        learner.step(batch)
        if learner.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return times[1:]


def learner_of(shape: Shape, device: str, max_tokens: int) -> GRPO:
    """Return a learner of a random model with float32 weights."""
    from transformers import AutoModelForCausalLM

    enable_tf32("auto", torch.device(device))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        make_model(Path(folder), shape)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    return GRPO(model, optimizer, TrainerConfig(lr=1e-6, correction="bypass", max_tokens=max_tokens))


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: ShapeName = "tiny",
    tokens: Annotated[int, typer.Option(help="Of the batch, prompts included.")] = 8192,
    answer: Annotated[int, typer.Option(help="Mean tokens of an answer.")] = 58,
    max_tokens: Annotated[int, typer.Option(help="Of a micro-batch.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Steps that are counted, of each kind.")] = 5,
    padded: Annotated[bool, typer.Option(help="Measure padded rows too.")] = True,
) -> None:
    """Seconds of an optimizer step of the reference trainer, with packed and with padded rows."""
    size = SHAPES[shape]
    learner, batch = learner_of(size, device, max_tokens), batch_of(size, tokens, answer)
    work, rows = flops(size, [row.length for row in batch.all_rows]), list[dict[str, Any]]()
    total = sum(row.length for row in batch.all_rows)
    for kind in ["packed", *(["padded"] if padded else [])]:
        learner.policy.is_packed = kind == "packed"
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = measure(learner, batch, rounds)
        step_s = median(times)
        memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
        rows.append(
            {
                "rows": kind, "step_s": step_s, "fastest_s": min(times), "slowest_s": max(times),
                "tokens_per_s": total / step_s, "mfu": work / step_s / PEAK if device == "cuda" else None,
                "memory_bytes": memory,
            }
        )  # fmt: skip
        typer.echo(str(rows[-1]), err=True)
    Report(
        title=f"trainer's step: {shape}, {total} tokens in {len(batch.all_rows)} rows, {device}",
        columns={
            "rows": "rows", "step_s": "s/step", "fastest_s": "fastest", "slowest_s": "slowest",
            "tokens_per_s": "tokens/s", "mfu": "MFU", "memory_bytes": "peak bytes",
        },
        rows=rows,
        keys={"trainer_step_s": rows[0]["step_s"], "mfu": rows[0]["mfu"]},
        versions=versions(),
    ).finish(json_file)  # fmt: skip


if __name__ == "__main__":
    execute(main)
