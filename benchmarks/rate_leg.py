"""The penstock leg of ``engine_rate``: all parts of a run on an engine that is running already.

Started as a script, with the checkout to measure on PYTHONPATH; it imports nothing that only newer checkouts have.
Reads ``leg.json`` of its folder, creates ``serving`` when the worker serves, appends a line per batch to
``batches.jsonl``, and ends on SIGTERM.
"""

import json
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.bench_run import make_config, part
from benchmarks.engine_overhead import wait_for_worker
from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.redis.control import Control


def configure(settings: dict[str, Any], folder: Path) -> Config:
    """The run: one dataset per response length, weighted by how often the length occurs."""
    lengths = settings["lengths"]
    datasets = []
    for length in sorted(set(lengths)):
        file = folder / f"prompts-{length}.jsonl"
        file.write_text("".join(json.dumps({"prompt": one, "label": ""}) + "\n" for one in settings["prompts"]))
        sampling = {"max_new_tokens": length}
        datasets.append(
            {"name": f"l{length}", "path": str(file), "sampling": sampling, "weight": lengths.count(length)}
        )
    return make_config(
        settings["redis"],
        folder,
        run="rate",
        model={"path": settings["model"]},
        engine={"url": settings["engine"]},
        data={"train": datasets},
        rollout={
            "n": settings["group"],
            "sampling": {"max_new_tokens": max(lengths), "ignore_eos": True, "temperature": 1.0},
            "max_context_tokens": settings["context"],
        },
        reward={"function": "random"},
        staleness={"mode": "async", "bound": settings["bound"], "on_expiry": "wait"},
        worker={"slots": settings["slots"], "apply": settings["apply"], "drain_timeout_s": 0.0},
        trainer={
            "batch_groups": settings["batch_groups"],
            "batches_per_version": 1,
            "transport": settings["publish"] or "disk",
            "device": settings["device"] if settings["publish"] else "cpu",
            "weights_dir": str(weights_folder(folder)),
        },
    )


def weights_folder(folder: Path) -> Path:
    """A folder in memory (tmpfs) if the machine has one."""
    shared = Path("/dev/shm")
    return shared / folder.name if shared.is_dir() else folder / "weights"


def train(trainer: Trainer, model: Any, publishes: bool, out: Path) -> None:
    """Take batches for ever: tensors, commit, a tick or a publication, a checkpoint."""
    with out.open("a", buffering=1) as lines:
        while True:
            began_s = time.monotonic()
            batch = trainer.next()
            got_s = time.monotonic()
            tokens = int(batch.padded()["generated"].sum())
            trainer.commit(batch)
            committed_s = time.monotonic()
            if publishes:
                trainer.publish(model)
            else:
                trainer.tick()
            published_s = time.monotonic()
            trainer.state_dict()
            trainer.checkpointed()
            row = {
                "at_s": published_s,
                "tokens": tokens,
                "samples": len(batch),
                "staleness_max": batch.manifest.staleness_max,
                "wait_s": got_s - began_s,
                "publish_s": published_s - committed_s,
            }
            lines.write(json.dumps(row) + "\n")


def main() -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(sys.argv[1])
    settings = json.loads((folder / "leg.json").read_text())
    config = configure(settings, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype="auto", local_files_only=True)
    publishes = bool(settings["publish"])
    if publishes and settings["device"] == "cuda":
        model = model.to("cuda:0")
    with ExitStack() as stack:
        stack.enter_context(part(config, "buffer"))
        trainer = stack.enter_context(Trainer(config))
        trainer.publish(model)
        stack.enter_context(part(config, "producer"))
        stack.enter_context(part(config, "worker", "--name", "rate"))
        wait_for_worker(Control(settings["redis"]), trainer)
        (folder / "serving").touch()
        train(trainer, model, publishes, folder / "batches.jsonl")


def leave(signum: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does, so that the parts are ended too."""
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    main()
