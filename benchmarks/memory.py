"""GPU memory that an engine gives up for its trainer, and how long that takes: per tag, there and back.

One SGLang server with ``enable-memory-saver``, a real ``penstock worker`` on it that has run a load, and a trainer that
asks: ``offload_engines``, ``onload_engines``. Seconds are those of the call: idle wait, the work of the server itself,
for weights also the load of the newest publication, and the worker's word that it is done. Bytes are what the device
had free before and after (0 on a machine without a GPU, where the server goes through the motions).

    python -m benchmarks.memory --json FILE
    python -m benchmarks.memory --device cuda --shape 1.5b --json FILE
"""

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any

import torch
import typer

from benchmarks.bench_run import DATASET, admit, make_config, part
from benchmarks.common import Report, execute, median, redis_server, versions
from benchmarks.engine_overhead import GROUP, Load, wait_for_worker
from benchmarks.gpu_model import SHAPES, fast_folder
from benchmarks.options import Device, EngineArgs, EngineEnv, EnginePython, JsonFile, ShapeName, served
from benchmarks.weights import load_model
from penstock.consumers.trainer import Trainer
from penstock.records.job import Job
from penstock.redis.connect import connect
from penstock.redis.control import Control

#: What is offloaded together, and brought back together.
SETS: dict[str, list[str]] = {
    "kv_cache": ["kv_cache"],
    "cuda_graph": ["cuda_graph"],
    "weights": ["weights"],
    "all": ["weights", "cuda_graph", "kv_cache"],
}


def free_bytes(device: str) -> int:
    """Free memory of the first GPU, seen by all processes."""
    return int(torch.cuda.mem_get_info(0)[0]) if device == "cuda" else 0


def timed(work: Callable[[], None]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def there_and_back(trainer: Trainer, device: str, tags: list[str]) -> dict[str, float]:
    """Seconds and bytes of one offload and onload. Blocks."""
    before = free_bytes(device)
    offload_s = timed(lambda: trainer.offload_engines(tags))
    freed = free_bytes(device) - before
    onload_s = timed(lambda: trainer.onload_engines(tags))
    return {
        "freed_bytes": freed,
        "offload_s": offload_s,
        "onload_s": onload_s,
        "left_bytes": before - free_bytes(device),
    }


def draw(control: Control, trainer: Trainer, load: Load, first: int) -> int:
    """A load of jobs through engine, buffer and trainer; the next free index. Blocks."""
    jobs = [
        Job(f"{DATASET}/0/{first + i}", GROUP, prompt_ids=prompt, sampling=load.sampling)
        for i, prompt in enumerate(load.prompts(first, load.groups))
    ]
    admit(control, trainer.config, jobs, first)
    for _ in range(load.groups // trainer.config.trainer.batch_groups):
        batch = trainer.next(timeout=300)
        if any(row.num_generated != load.new_tokens for row in batch.all_rows):
            raise RuntimeError("an answer was cut short; the figure is void.")
        trainer.commit(batch)
    return first + load.groups


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: ShapeName = "tiny",
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 3,
    groups: Annotated[int, typer.Option(help="Prompts of the load between rounds, 8 answers each.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 32,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
) -> None:
    """Bytes and seconds of giving GPU memory up and taking it back."""
    load = Load(groups, groups * GROUP, 32, new_tokens)
    more = {"enable-memory-saver": True} if device == "cuda" else {}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in SETS}
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        engine = stack.enter_context(
            served(SHAPES[shape], device, load.concurrency, engine_python, engine_arg, engine_env, more)
        )
        weights = fast_folder(engine.folder / "weights")
        stack.callback(shutil.rmtree, weights, ignore_errors=True)
        config = make_config(
            url,
            engine.folder,
            run="memory",
            model={"path": str(engine.model)},
            engine={"url": engine.url},
            rollout={
                "n": GROUP,
                "max_context_tokens": 32 + new_tokens + 1,
                "sampling": {"max_new_tokens": new_tokens},
            },
            worker={"slots": groups * GROUP, "apply": "abort"},
            trainer={"batch_groups": groups, "weights_dir": str(weights)},
        )
        stack.enter_context(part(config, "buffer"))
        trainer = stack.enter_context(Trainer(config))
        stack.enter_context(part(config, "worker", "--name", "bench"))
        trainer.publish(load_model(engine.model, "cpu"))
        control = Control(url)
        wait_for_worker(control, trainer)
        admitted = draw(control, trainer, load, 0)
        for _ in range(rounds):
            for name, tags in SETS.items():
                measured[name].append(there_and_back(trainer, device, tags))
            # Nobody gives out tokens of weights that are not there.
            admitted = draw(control, trainer, load, admitted)
        seen = versions(connect(url), sglang=engine.sglang)
    report(measured, shape, device, seen).finish(json_file)


def report(measured: dict[str, list[dict[str, float]]], shape: str, device: str, seen: dict[str, str]) -> Report:
    rows: list[dict[str, Any]] = [
        {"tags": name, **{figure: median([one[figure] for one in rounds]) for figure in rounds[0]}}
        for name, rounds in measured.items()
    ]
    for row in rows:
        row["freed_gib"] = row["freed_bytes"] / 2**30
    return Report(
        title=f"memory given up by an engine of {SHAPES[shape].num_parameters / 1e6:.1f} M parameters on {device}",
        columns={
            "tags": "offloaded",
            "freed_gib": "freed GiB",
            "offload_s": "offload s",
            "onload_s": "onload s",
            "left_bytes": "not taken back",
        },
        rows=rows,
        keys={
            figure: {row["tags"]: row[figure] for row in rows} for figure in ("freed_bytes", "offload_s", "onload_s")
        },
        versions=seen,
        notes=["onload of weights includes the load of the newest publication; the load ran again after every round."],
    )


if __name__ == "__main__":
    execute(main)
