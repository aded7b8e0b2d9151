"""What the queue costs: tokens/s of an engine through penstock over tokens/s of a plain client of the same engine.

One SGLang server with random weights and answers of a fixed length (``ignore_eos``). Two legs, alternated over several
rounds, with the same prompts, concurrency and sampling, logprobs included:

    direct     one process of aiohttp, POST /generate, nothing kept
    penstock   jobs admitted -> ``penstock worker`` (engine.url) -> rewards, commits -> ``penstock buffer`` -> Trainer,
               until the last batch is a set of torch tensors

``ratio``: median over the rounds of penstock's tokens/s over those of the direct round beside it.

    python -m benchmarks.engine_overhead --json FILE
    python -m benchmarks.engine_overhead --device cuda --hidden 1536 --layers 28 --heads 12 --kv-heads 2 --mlp 8960 \\
        --vocab 151936 --dtype bfloat16 --concurrency 512 --new-tokens 512 --groups 256
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from benchmarks.bench_run import DATASET, admit, make_config, part
from benchmarks.common import Report, execute, median, redis_server, run_together, spread, versions
from benchmarks.direct_client import generate_all
from benchmarks.engine import RunningEngine
from benchmarks.options import Concurrency, Device, EngineArgs, EngineEnv, EnginePython, JsonFile, PromptTokens, served
from benchmarks.penstock_path import until_recording
from benchmarks.random_model import Shape
from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import WaitTimeout
from penstock.protocol.presence import WorkerState, read_workers
from penstock.records.job import Job
from penstock.redis.connect import connect
from penstock.redis.control import Control

GROUP = 8
START_TIMEOUT_S = 60.0
ROUND_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What every round asks for."""

    groups: int
    concurrency: int
    prompt_tokens: int
    new_tokens: int

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_new_tokens": self.new_tokens, "ignore_eos": True, "temperature": 1.0}

    def prompts(self, first: int, count: int) -> list[list[int]]:
        """Token ids of ``count`` prompts, no two alike."""
        size = self.prompt_tokens
        return [[2 + (index * 7919 + place * 104729) % 90 for place in range(size)] for index in _range(first, count)]


def _range(first: int, count: int) -> range:
    return range(first, first + count)


@dataclass(slots=True)
class Penstock:
    """A worker on the engine, a buffer, and a trainer that trains nothing."""

    config: Config
    control: Control
    trainer: Trainer
    #: Part -> its process.
    pids: dict[str, int]
    admitted: int = 0
    latency_s: list[float] = field(default_factory=list)

    def round(self, load: Load, groups: int) -> float:
        """Tokens per second from the admission of ``groups`` jobs to the tensors of their last batch. Blocks."""
        jobs = [
            Job(f"{DATASET}/0/{self.admitted + i}", GROUP, prompt_ids=prompt, sampling=load.sampling)
            for i, prompt in enumerate(load.prompts(self.admitted, groups))
        ]
        began_s = time.monotonic()
        admit(self.control, self.config, jobs, self.admitted)
        self.admitted += groups
        samples = tokens = 0
        while samples < groups * GROUP:
            batch = self.trainer.next(timeout=ROUND_TIMEOUT_S)
            tokens += int(batch.padded()["generated"].sum())
            samples += len(batch)
            self.trainer.commit(batch)
        ended_s = time.monotonic()
        self.trainer.state_dict()
        self.trainer.checkpointed()
        if tokens != groups * GROUP * load.new_tokens:
            raise RuntimeError(f"{tokens} tokens came of {groups * GROUP * load.new_tokens}; the figure is void.")
        return tokens / (ended_s - began_s)


@contextmanager
def running_penstock(
    url: str,
    engine: RunningEngine,
    load: Load,
    batch_groups: int,
    *,
    run: str = "bench",
    history: bool = False,
    model: Any = None,
    sections: Mapping[str, dict[str, Any]] | None = None,
    worker: Sequence[str] = ("penstock.cli",),
) -> Iterator[Penstock]:
    """Everything started, the engine's own weights published as version 1, the worker serving.

    Args:
        run: its name; each time another one.
        history: a recorder keeps a row of each sample.
        model: what is published; None: what the engine serves, in memory.
        sections: of the configuration, merged into those of the benchmark.
        worker: its command, see ``part``.
    """
    from transformers import AutoModelForCausalLM

    own: dict[str, dict[str, Any]] = {
        "model": {"path": str(engine.model)},
        "engine": {"url": engine.url},
        "rollout": {
            "n": GROUP,
            "max_context_tokens": load.prompt_tokens + load.new_tokens + 1,
            "sampling": {"max_new_tokens": load.new_tokens},
        },
        "worker": {"slots": load.concurrency},
        "trainer": {"batch_groups": batch_groups, "batches_per_version": 1_000_000},
    }
    given = sections or {}
    merged = {name: own.get(name, {}) | given.get(name, {}) for name in own.keys() | given.keys()}
    config = make_config(url, engine.folder, run=run, **merged)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(engine.model, local_files_only=True)
    with ExitStack() as stack:
        pids = {"buffer": stack.enter_context(part(config, "buffer"))}
        trainer = stack.enter_context(Trainer(config))
        trainer.publish(model)
        pids["worker"] = stack.enter_context(part(config, "worker", "--name", "bench", command=worker))
        if history:
            pids["recorder"] = stack.enter_context(part(config, "recorder"))
            until_recording(url, trainer.keys)
        control = Control(url)
        wait_for_worker(control, trainer)
        yield Penstock(config, control, trainer, pids)


def wait_for_worker(control: Control, trainer: Trainer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        workers = read_workers(control.client, trainer.keys)
        if any(worker.state == WorkerState.SERVING for worker in workers):
            return
        if time.monotonic() > deadline:
            log = (trainer.config.run_dir / "worker.log").read_text(errors="replace")
            raise WaitTimeout(f"The worker did not serve within {START_TIMEOUT_S:g} s; its log:\n{log[-2000:]}")
        time.sleep(0.1)


def direct(engine: RunningEngine, load: Load, first: int, groups: int) -> float:
    """Tokens per second of the plain client. Blocks."""
    arguments = {
        "url": engine.url,
        "prompts": load.prompts(first, groups),
        "n": GROUP,
        "sampling": load.sampling,
        "concurrency": load.concurrency,
    }
    done = run_together({"client": (generate_all, arguments)})["client"]
    return float(done["tokens"] / done["seconds"])


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
    groups: Annotated[
        int, typer.Option(help="Prompts of a round, 8 answers each; many, so that start and end weigh little.")
    ] = 48,
    concurrency: Concurrency = 64,
    prompt_tokens: PromptTokens = 32,
    new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each leg.")] = 3,
    batch_groups: Annotated[int, typer.Option(help="Groups of a batch.")] = 8,
    hidden: Annotated[int, typer.Option(help="Shape of the model, as in a Qwen2 config.")] = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 768,
    vocab: int = 4096,
    dtype: str = "float32",
) -> None:
    """Tokens/s through penstock over tokens/s of a plain client of the same engine."""
    shape = Shape(hidden, layers, heads, kv_heads, mlp, vocab, max(4096, prompt_tokens + new_tokens + 8), dtype)
    load = Load(groups, concurrency, prompt_tokens, new_tokens)
    rates: dict[str, list[float]] = {"direct": [], "penstock": []}
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        engine = stack.enter_context(served(shape, device, concurrency, engine_python, engine_arg, engine_env))
        penstock = stack.enter_context(running_penstock(url, engine, load, batch_groups))
        direct(engine, load, 0, batch_groups)
        penstock.round(load, batch_groups)
        for turn in range(rounds):
            # Neither leg is always the first.
            for leg in rates if turn % 2 == 0 else reversed(rates):
                if leg == "direct":
                    rates[leg].append(direct(engine, load, penstock.admitted, groups))
                else:
                    rates[leg].append(penstock.round(load, groups))
                typer.echo(f"round {turn + 1} of {rounds}, {leg}: {rates[leg][-1]:,.0f} tokens/s", err=True)
        seen_versions = versions(connect(url), sglang=engine.sglang)
    report(rates, load, shape, seen_versions).finish(json_file)


def report(rates: dict[str, list[float]], load: Load, shape: Shape, seen_versions: dict[str, str]) -> Report:
    """Medians and the ratio of the rounds that lay beside each other."""
    ratios = [ours / plain for plain, ours in zip(rates["direct"], rates["penstock"], strict=True)]
    rows = [
        {"leg": leg, "tokens_per_s": median(values), "spread": spread(values), "rounds": values}
        for leg, values in rates.items()
    ]
    samples = load.groups * GROUP
    return Report(
        title=f"engine overhead: {samples} answers of {load.new_tokens} tokens, {load.concurrency} at once, a model of "
        f"{shape.num_parameters / 1e6:.1f} M parameters",
        columns={"leg": "leg", "tokens_per_s": "tokens/s", "spread": "spread"},
        rows=rows,
        keys={
            "ratio": median(ratios),
            "tokens_per_s": median(rates["penstock"]),
            "direct_tokens_per_s": median(rates["direct"]),
        },
        versions=seen_versions,
        notes=[f"Ratios of the rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)}."],
    )


if __name__ == "__main__":
    execute(main)
