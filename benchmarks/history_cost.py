"""What a history costs a run: samples/s that a real engine draws beside a recorder, over those without one.

One SGLang server with random weights and answers of a fixed length (``ignore_eos``). Two legs, alternated over several
rounds, each a run of its own with a worker on that server, a buffer and a Trainer (as ``engine_overhead``):

    without   no recorder: nothing is kept of a sample that is trained
    history   beside ``penstock recorder``, which keeps a row of each sample, tokens included

The clock runs from the admission of a round's jobs to the tensors of their last batch; then the history is waited for:
a round counts only if it has a row of each sample. ``ratio``: median over the rounds of the one over the other.

    python -m benchmarks.history_cost --json FILE
    python -m benchmarks.history_cost --device cuda --hidden 896 --layers 24 --heads 14 --kv-heads 2 --mlp 4864 \\
        --vocab 151936 --dtype bfloat16 --concurrency 512 --new-tokens 512 --groups 256 --batch-groups 32
"""

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import Report, execute, median, redis_server, spread, versions
from benchmarks.engine import RunningEngine, default_python, running_engine
from benchmarks.engine_overhead import GROUP, Load, Penstock, pairs, running_penstock
from benchmarks.random_model import Shape
from penstock.history.reader import HistoryReader
from penstock.redis.connect import connect
from penstock.system.run_folder import RunFolder

RECORDED_TIMEOUT_S = 300.0
LEGS = ("without", "history")


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    engine_python: Annotated[str | None, typer.Option(help="Interpreter that has sglang; None: by device.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of sglang.launch_server; repeat.")] = None,
    engine_env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the server; repeat.")] = None,
    groups: Annotated[int, typer.Option(help="Prompts of a round, 8 answers each.")] = 48,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 64,
    prompt_tokens: Annotated[int, typer.Option()] = 32,
    new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each leg.")] = 5,
    batch_groups: Annotated[int, typer.Option(help="Groups of a batch.")] = 8,
    hidden: Annotated[int, typer.Option(help="Shape of the model, as in a Qwen2 config.")] = 256,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 768,
    vocab: int = 4096,
    dtype: str = "float32",
) -> None:
    """Samples/s beside a recorder over samples/s without one, of the same engine."""
    shape = Shape(hidden, layers, heads, kv_heads, mlp, vocab, max(4096, prompt_tokens + new_tokens + 8), dtype)
    load = Load(groups, concurrency, prompt_tokens, new_tokens)
    rates: dict[str, list[float]] = {leg: [] for leg in LEGS}
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        engine = stack.enter_context(
            running_engine(
                shape, device=device, python=engine_python or default_python(device),
                args={"max-running-requests": concurrency} | pairs(engine_arg), env=pairs(engine_env),
            )
        )  # fmt: skip
        for turn in range(rounds):
            # Neither leg is always the first.
            for leg in LEGS if turn % 2 == 0 else reversed(LEGS):
                rates[leg].append(samples_per_s(url, engine, load, batch_groups, f"{leg}{turn}", leg == "history"))
                typer.echo(f"round {turn + 1} of {rounds}, {leg}: {rates[leg][-1]:,.1f} samples/s", err=True)
        seen_versions = versions(connect(url), sglang=engine.sglang)
    report(rates, load, shape, seen_versions).finish(json_file)


def samples_per_s(url: str, engine: RunningEngine, load: Load, batch_groups: int, run: str, has_history: bool) -> float:
    """Of one round, in a run of its own that has warmed up. Blocks."""
    with running_penstock(url, engine, load, batch_groups, run=run, history=has_history) as penstock:
        penstock.round(load, batch_groups)
        rate = penstock.round(load, load.groups) / load.new_tokens
        if has_history:
            wait_for_rows(penstock)
    return rate


def wait_for_rows(penstock: Penstock) -> None:
    """Until the history has a row of each sample. Blocks. RuntimeError where it gave some up."""
    wanted, deadline = penstock.admitted * GROUP, time.monotonic() + RECORDED_TIMEOUT_S
    while (found := _rows(penstock)) < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"The history has {found} rows of {wanted} samples; the figure is void.")
        time.sleep(0.2)


def _rows(penstock: Penstock) -> int:
    with closing(HistoryReader(RunFolder(penstock.config.run_dir).history)) as reader:
        return reader.count()


def report(rates: dict[str, list[float]], load: Load, shape: Shape, seen_versions: dict[str, str]) -> Report:
    """Medians, and the ratio of the rounds that lay beside each other."""
    ratios = [kept / without for without, kept in zip(rates["without"], rates["history"], strict=True)]
    rows = [
        {"leg": leg, "samples_per_s": median(values), "spread": spread(values), "rounds": values}
        for leg, values in rates.items()
    ]
    return Report(
        title=f"cost of a history: {load.groups * GROUP} answers of {load.new_tokens} tokens, {load.concurrency} at "
        f"once, a model of {shape.num_parameters / 1e6:.1f} M parameters",
        columns={"leg": "leg", "samples_per_s": "samples/s", "spread": "spread"},
        rows=rows,
        keys={"ratio": median(ratios), "samples_per_s": median(rates["history"])},
        versions=seen_versions,
        notes=[f"Ratios of the rounds: {', '.join(f'{ratio:.3f}' for ratio in ratios)}."],
    )


if __name__ == "__main__":
    execute(main)
