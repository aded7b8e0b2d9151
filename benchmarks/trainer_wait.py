"""What share of a step do trainer ranks wait for the next batch and for each other, while a worker generates?

dp 4 x 2 replicas are 8 processes; each takes its share of a batch of 64 groups x 8 samples x 2,560 tokens, lays it out
as padded arrays (in the thread that fetches ahead), agrees with the others, "trains" for a second, as a GPU would
while the host is idle, and commits. Meanwhile a worker reads an engine's answers and commits them as fast as it can, as
in ``trajectory_path``; it goes on behind the last step.

    share = seconds in next() and agree() / seconds of the steps, of the rank that waits longest; the first batch is not
            counted, because nothing was there to fetch it ahead of

``next_share`` is the part of it that is a wait for data, ``agree_share`` that for other ranks.
"""

import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import penstock_path
from benchmarks.bench_run import make_config, part
from benchmarks.common import Report, execute, median, redis_server, run_together, versions
from benchmarks.penstock_path import BATCH_GROUPS, GROUP, Share, load
from penstock.redis.connect import connect

TARGET = 0.02
COLUMNS = {
    "dp_rank": "dp rank",
    "replica": "replica",
    "next_ms_median": "next, ms median",
    "next_ms_max": "next, ms max",
    "next_share": "share of the step",
    "agree_ms_median": "agree, ms median",
    "agree_share": "share of the step",
}


def rank(
    barrier: Barrier,
    *,
    config_file: str,
    dp_rank: int,
    dp_size: int,
    replica: int,
    num_replicas: int,
    steps: int,
    step_s: float,
    prefetch: int,
) -> list[dict[str, float]]:
    """One process of the trainer; per step the seconds of each part of it."""
    from penstock.consumers.trainer import Trainer

    trainer = Trainer(
        load(config_file),
        dp_rank=dp_rank,
        dp_size=dp_size,
        replica=replica,
        num_replicas=num_replicas,
        prefetch=prefetch,
        prepare=lambda batch: batch.arrays(),
    )
    with trainer:
        if trainer.is_leader:
            import torch

            trainer.publish({"weight": torch.zeros(1)})
        barrier.wait()
        barrier.wait()
        return [_step(trainer, step, step_s) for step in range(steps + 1)][1:]


def _step(trainer: Any, step: int, step_s: float) -> dict[str, float]:
    began = time.monotonic()
    batch = trainer.next(timeout=60)
    taken = time.monotonic()
    trainer.agree(batch, step=step)
    agreed = time.monotonic()
    assert batch.prepared["tokens"].shape[0] == len(batch)
    time.sleep(step_s)
    trained = time.monotonic()
    trainer.commit(batch)
    ended = time.monotonic()
    return {"next_s": taken - began, "agree_s": agreed - taken, "commit_s": ended - trained, "step_s": ended - began}


def measure(url: str, *, dp: int, replicas: int, steps: int, step_s: float, tokens: int, prefetch: int) -> list[Any]:
    """Steps of every rank, in order of ranks. Blocks."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        (Path(name) / "model").mkdir()
        (Path(name) / "model" / "config.json").write_text("{}")
        config = make_config(url, Path(name), trainer={"batch_groups": BATCH_GROUPS, "batches_per_version": 1_000_000})
        config_file = Path(name) / "config.json"
        config_file.write_text(config.model_dump_json())
        common: dict[str, Any] = {"config_file": str(config_file)}
        # A worker that has nothing left to do would make room for the ranks.
        share = Share(0, 1, 2 * BATCH_GROUPS * (steps + 1 + prefetch))
        roles: dict[str, Any] = {"writer": (penstock_path.writer, {**common, "share": share, "tokens": tokens})}
        for i in range(dp * replicas):
            seat = {"dp_rank": i // replicas, "dp_size": dp, "replica": i % replicas, "num_replicas": replicas}
            roles[f"rank {i}"] = (rank, {**common, **seat, "steps": steps, "step_s": step_s, "prefetch": prefetch})
        with part(config, "buffer"):
            done = run_together(roles)
    return [done[f"rank {i}"] for i in range(dp * replicas)]


def main(
    steps: Annotated[int, typer.Option(help="Steps that are measured.")] = 20,
    step_s: Annotated[float, typer.Option(help="Seconds of a step.")] = 1.0,
    tokens: Annotated[int, typer.Option(help="Tokens of a sample.")] = 2560,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 4,
    replicas: Annotated[int, typer.Option(help="Replicas of each.")] = 2,
    prefetch: Annotated[int, typer.Option(help="Batches fetched ahead.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here too.")] = None,
) -> None:
    """Print what each rank spent in the next batch."""
    with redis_server() as url:
        ranks = measure(url, dp=dp, replicas=replicas, steps=steps, step_s=step_s, tokens=tokens, prefetch=prefetch)
        found = versions(connect(url))
    rows = [
        {
            "dp_rank": i // replicas,
            "replica": i % replicas,
            "next_ms_median": 1000 * median([one["next_s"] for one in of]),
            "next_ms_max": 1000 * max(one["next_s"] for one in of),
            "agree_ms_median": 1000 * median([one["agree_s"] for one in of]),
            "next_share": sum(one["next_s"] for one in of) / sum(one["step_s"] for one in of),
            "agree_share": sum(one["agree_s"] for one in of) / sum(one["step_s"] for one in of),
        }
        for i, of in enumerate(ranks)
    ]
    share = max(row["next_share"] + row["agree_share"] for row in rows)
    report = Report(
        title=f"Waiting for data: {BATCH_GROUPS} x {GROUP} samples of {tokens} tokens, steps of {step_s:g} s, dp {dp} "
        f"x {replicas} replicas",
        columns=COLUMNS,
        rows=rows,
        keys={
            "share": share,
            "next_share": max(row["next_share"] for row in rows),
            "agree_share": max(row["agree_share"] for row in rows),
            "target": TARGET,
            "steps": steps,
        },
        notes=[f"{'within' if share <= TARGET else 'ABOVE'} the target of {TARGET:.0%}; prefetch {prefetch}."],
        versions=found,
    )
    report.finish(json_file)


if __name__ == "__main__":
    execute(main)
