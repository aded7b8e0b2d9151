"""The asynchronous loop on two GPUs: trainer on one, worker on the other, and a worker that dies in a transfer.

Real parts: Redis, buffer, producer, a worker that spawns its engine, and GRPO steps on a random model. Phases, each
of so many steps: weights by disk, then by process group (nccl; gloo on CPUs). In the second phase the worker and its
engine are killed -9 in the middle of a transfer: the trainer goes on within ``transfer_timeout_s`` by disk, another
worker takes over, and the loop ends with every batch trained once.

``trainer_wait_share``: seconds in ``next`` over seconds of the loop, from the third step of a phase on, the step of the
kill and of the new engine's start left out.

    python -m benchmarks.async_gpu --json FILE
    python -m benchmarks.async_gpu --device cuda --shape 0.5b --json FILE
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import redis
import torch
import typer

from benchmarks.bench_run import part
from benchmarks.common import Report, execute, redis_server, version_in, versions
from benchmarks.engine import ARGS, default_python, engine_env
from benchmarks.gpu_model import SHAPES, fast_folder
from benchmarks.options import Device, EngineArgs, EnginePython, JsonFile, ShapeName, pairs
from benchmarks.random_model import make_model
from benchmarks.weights import load_model
from penstock.config import Config
from penstock.config.load import save_resolved
from penstock.consumers.grpo.step import GRPO
from penstock.consumers.trainer import Trainer
from penstock.errors import WaitTimeout
from penstock.protocol.presence import read_workers
from penstock.redis.connect import connect
from penstock.redis.control import Control

START_TIMEOUT_S = 400.0
BATCH_TIMEOUT_S = 400.0
#: Steps at the beginning of a phase that are not counted.
WARM = 2


def parity(sample: Any) -> float:
    """A reward that differs within a group: random weights solve no task."""
    return float(sum(sample.tokens) % 2)


class Loop:
    """One phase of training; keeps a row per step."""

    def __init__(self, trainer: Trainer, learner: GRPO, rows: list[dict[str, Any]]) -> None:
        self.trainer = trainer
        self.learner = learner
        self.rows = rows

    def step(self, phase: str, *, counts: bool) -> None:
        """next, train, commit, publish. Blocks."""
        trainer = self.trainer
        began = time.monotonic()
        batch = trainer.next(timeout=BATCH_TIMEOUT_S)
        got = time.monotonic()
        self.learner.step(batch)
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize()
        trained = time.monotonic()
        trainer.commit(batch)
        trainer.publish(self.learner.model, step=len(self.rows) + 1)
        ended = time.monotonic()
        sent = trainer.publisher.last
        self.rows.append(
            {
                "phase": phase,
                "counts": counts,
                "batch": batch.n,
                "version": batch.train_version,
                "staleness_max": batch.manifest.staleness_max,
                "tokens": sum(row.num_generated for row in batch.all_rows),
                "wait_s": got - began,
                "step_s": trained - got,
                "publish_s": ended - trained,
                "sent_to": len(sent.workers) if sent else 0,
                "send_s": sent.send_s if sent else None,
                "failure": sent.failure if sent else "",
            }
        )


@contextmanager
def worker(config: Config, name: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """``penstock worker`` that may be killed."""
    resolved = config.run_dir / "worker.yaml"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    save_resolved(config, resolved)
    with (config.run_dir / f"{name}.log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "worker", "--config", str(resolved), "--name", name],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=90)


def await_state(control: Control, trainer: Trainer, name: str, states: set[str], logs: Path) -> None:
    """Until a worker shows one of ``states``; WaitTimeout with its log."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        workers = read_workers(control.client, trainer.keys)
        if any(worker.started_as == name and worker.state in states for worker in workers):
            return
        time.sleep(0.1)
    raise WaitTimeout(f"Worker {name} did not come: {(logs / f'{name}.log').read_text(errors='replace')[-3000:]}")


def kill_in_transfer(control: Control, trainer: Trainer, process: "subprocess.Popen[bytes]", after_s: float) -> None:
    """kill -9 the worker as soon as the next transfer has been decided; its keeper kills the engine."""
    stream = trainer.keys.transfers(trainer.model_name)
    newest = control.client.xrevrange(stream, count=1)
    seen = newest[0][0] if newest else b"0-0"
    url = trainer.config.redis.url
    assert url is not None

    def watch() -> None:
        client = redis.Redis.from_url(url)
        while not client.xread({stream: seen}, block=1000):
            pass
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def configure(
    url: str, folder: Path, *, device: str, transport: str, python: str, args: dict[str, Any], options: dict[str, int]
) -> Config:
    """The run; GPU 0 is the trainer's, GPU 1 the engine's."""
    env = engine_env(device, python, {"CUDA_VISIBLE_DEVICES": "1"} if device == "cuda" else {})
    values = {
        "run": "async",
        "directory": str(folder),
        "redis": {"url": url},
        "model": {"path": str(folder / "model")},
        "data": {"train": [{"name": "random", "path": str(folder / "train.jsonl")}]},
        "rollout": {
            "n": 8,
            "sampling": {"max_new_tokens": options["new_tokens"], "ignore_eos": True, "temperature": 1.0},
            "max_context_tokens": 64 + options["new_tokens"],
        },
        "staleness": {"mode": "async", "bound": options["bound"]},
        "engine": {"python": python, "args": ARGS[device] | args, "env": env, "load_timeout_s": 120.0},
        "worker": {"slots": options["slots"], "apply": "in_place", "lease_s": 6.0},
        "reward": {"function": "benchmarks.async_gpu:parity"},
        "trainer": {
            "batch_groups": options["groups"],
            "steps": 1000,
            "lr": 1e-6,
            "max_tokens": options["max_tokens"],
            "transport": transport,
            "transfer_timeout_s": float(options["timeout"]),
            "bucket_bytes": options["bucket_mib"] * 2**20,
            "device": device,
            "weights_dir": str(fast_folder(folder / "weights")),
        },
    }
    return Config.model_validate(values)


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: ShapeName = "tiny",
    steps: Annotated[int, typer.Option(help="Steps of each phase.")] = 6,
    bound: Annotated[int, typer.Option(help="Most versions between drawing and training.")] = 4,
    groups: Annotated[int, typer.Option(help="Prompts of a batch, 8 answers each.")] = 4,
    slots: Annotated[int, typer.Option(help="Samples generated at once.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Length of every answer.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.")] = 4096,
    bucket_mib: Annotated[int, typer.Option(help="Size of a bucket that is sent.")] = 256,
    timeout: Annotated[int, typer.Option(help="trainer.transfer_timeout_s.")] = 20,
    kill_after_s: Annotated[float, typer.Option(help="From the decision on a transfer to kill -9.")] = 0.02,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
) -> None:
    """Share of the trainer's time that it waits, with weights by disk and by process group."""
    python = engine_python or default_python(device)
    options = {
        "new_tokens": new_tokens, "bound": bound, "slots": slots, "groups": groups, "max_tokens": max_tokens,
        "timeout": timeout, "bucket_mib": bucket_mib,
    }  # fmt: skip
    collective = "nccl" if device == "cuda" else "gloo"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        make_model(folder / "model", SHAPES[shape])
        prompts = [{"prompt": f"{i * 7919 % 100003:05d}=", "label": ""} for i in range(4096)]
        (folder / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
        url = stack.enter_context(redis_server())

        def make(transport: str) -> Config:
            args = {"max-running-requests": slots} | pairs(engine_arg)
            return configure(url, folder, device=device, transport=transport, python=python, args=args, options=options)

        config = make("disk")
        stack.callback(shutil.rmtree, fast_folder(folder / "weights"), ignore_errors=True)
        stack.enter_context(part(config, "buffer"))
        stack.enter_context(part(config, "producer"))
        model = load_model(config_model(config), "cuda:0" if device == "cuda" else "cpu")
        learner = GRPO(model, torch.optim.AdamW(model.parameters(), lr=1e-6), config.trainer)
        control = Control(url)
        with worker(make(collective), "first") as first:
            with Trainer(config) as trainer:
                trainer.publish(model)
                await_state(control, trainer, "first", {"serving"}, config.run_dir)
                loop = Loop(trainer, learner, rows)
                for index in range(steps):
                    loop.step("disk", counts=index >= WARM)
                state = trainer.state_dict()
                trainer.checkpointed()
            with Trainer(make(collective)) as trainer:
                trainer.load_state_dict(state)
                trainer.publish(model)
                loop = Loop(trainer, learner, rows)
                for index in range(steps):
                    loop.step(collective, counts=index >= WARM)
                kill_in_transfer(control, trainer, first, kill_after_s)
                loop.step("kill", counts=False)
                first.wait(timeout=60)
                with worker(make(collective), "second"):
                    await_state(control, trainer, "second", {"serving"}, config.run_dir)
                    for index in range(steps):
                        loop.step(f"{collective} again", counts=index >= WARM)
        seen = versions(connect(url), sglang=version_in(Path(python), "sglang") or "unknown")
    report(rows, shape, options, seen).finish(json_file)


def config_model(config: Config) -> Path:
    return Path(config.model.path)


def report(rows: list[dict[str, Any]], shape: str, options: dict[str, int], seen: dict[str, str]) -> Report:
    """Per phase, and what must hold: every batch once, nothing staler than the bound, the kill survived by disk."""
    batches = [row["batch"] for row in rows]
    if batches != sorted(set(batches)):
        raise RuntimeError(f"batches came out of order or twice: {batches}")
    killed = next(row for row in rows if row["phase"] == "kill")
    table = []
    for phase in dict.fromkeys(row["phase"] for row in rows):
        counted = [row for row in rows if row["phase"] == phase and (row["counts"] or phase == "kill")]
        seconds = sum(row["wait_s"] + row["step_s"] + row["publish_s"] for row in counted)
        sent = [row["send_s"] for row in counted if row["send_s"] is not None]
        table.append(
            {
                "phase": phase,
                "steps": len(counted),
                "wait_share": sum(row["wait_s"] for row in counted) / seconds,
                "wait_s": sum(row["wait_s"] for row in counted) / len(counted),
                "step_s": sum(row["step_s"] for row in counted) / len(counted),
                "publish_s": sum(row["publish_s"] for row in counted) / len(counted),
                "send_s": sum(sent) / len(sent) if sent else None,
                "by_disk": sum(bool(row["failure"]) or not row["sent_to"] for row in counted),
                "staleness_max": max(row["staleness_max"] for row in counted),
            }
        )
    counted = [row for row in rows if row["counts"]]
    seconds = sum(row["wait_s"] + row["step_s"] + row["publish_s"] for row in counted)
    return Report(
        title=f"async loop: trainer on one device, worker on another, {SHAPES[shape].num_parameters / 1e6:.1f} M "
        f"parameters, {options['groups'] * 8} answers of {options['new_tokens']} tokens a batch",
        columns={
            "phase": "phase",
            "steps": "steps",
            "wait_share": "wait share",
            "wait_s": "wait s",
            "step_s": "step s",
            "publish_s": "publish s",
            "send_s": "send s",
            "by_disk": "by disk",
            "staleness_max": "staleness max",
        },
        rows=table,
        keys={
            "trainer_wait_share": sum(row["wait_s"] for row in counted) / seconds,
            "mode": "async",
            "bound": options["bound"],
            "staleness_max": max(row["staleness_max"] for row in rows),
            "kill_failure": killed["failure"],
            "kill_publish_s": killed["publish_s"],
        },
        more={"steps": rows},
        versions=seen,
        notes=[
            f"killed in a transfer: {killed['failure'] or 'after it'}; that publication took "
            f"{killed['publish_s']:.1f} s."
        ],
    )


if __name__ == "__main__":
    execute(main)
