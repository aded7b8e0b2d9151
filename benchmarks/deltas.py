"""Weights as deltas: their bytes beside the whole, through restarts of workers and trainer, and the tokens they cost.

One SGLang server, a trainer on the same device: AdamW on float32 masters, a policy gradient on the batches that come,
random advantages. Leg ``versions``: so many versions by transport delta; a worker is killed three times, the trainer
begins anew once, and every copy that an engine was given is compared with what the trainer wrote, byte by byte. Leg
``tokens``: updates of a busy engine by disk and by delta, as in ``benchmarks.weights``, each after an optimizer step.

    python -m benchmarks.deltas --json FILE
    python -m benchmarks.deltas --device cuda --shape 1.5b --concurrency 512 --new-tokens 512 --groups 256 --json FILE

What is there is written as each leg ends, and every few versions.
"""

import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.bench_run import DATASET, admit, make_config, part
from benchmarks.common import Report, execute, redis_server, versions
from benchmarks.engine import RunningEngine, default_python, running_engine
from benchmarks.engine_overhead import GROUP, Load, wait_for_worker
from benchmarks.gpu_model import SHAPES, fast_folder
from benchmarks.options import pairs
from benchmarks.weights import Leg, load_model, met_busy_engine, run_leg
from consumers.trainer import Trainer
from penstock.config import Config
from penstock.errors import WaitTimeout
from penstock.protocol.presence import read_workers
from penstock.protocol.records.job import Job
from penstock.redis.connect import connect
from penstock.redis.control import Control

#: Longest wait for an engine to have a version.
LOAD_TIMEOUT_S = 240.0
WRITE_EVERY = 10
_COMPARED_BYTES = 16 * 1024 * 1024
_FETCHED = re.compile(r"num_bytes=(\d+), is_whole=(\w+), deltas=(\d+), seconds=([\d.]+)")


class Policy:
    """A model that learns: what is published is rounded from float32 masters.

    Args:
        tokens: [B, L] of a batch for steps without one.
    """

    def __init__(self, model: Any, lr: float, tokens: Tensor) -> None:
        self.model = model
        self._tokens = tokens
        self._own = list(model.parameters())
        self._masters = [one.detach().float().clone() for one in self._own]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0.01, fused=self._masters[0].is_cuda)
        self._random = torch.Generator().manual_seed(0)

    def step(self, tokens: Tensor | None = None) -> None:
        """One optimizer step of a policy gradient whose advantages are random and sum to about 0."""
        tokens = (self._tokens if tokens is None else tokens).to(self._own[0].device)
        advantages = torch.randn(len(tokens), 1, generator=self._random).to(tokens.device)
        logits = self.model(tokens).logits[:, :-1].float()
        taken = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss: Any = (advantages * taken).mean()
        loss.backward()
        for master, own in zip(self._masters, self._own, strict=True):
            master.grad = None if own.grad is None else own.grad.float()
            own.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for master, own in zip(self._masters, self._own, strict=True):
                master.grad = None
                own.copy_(master)


class Line:
    """One run of versions by delta."""

    def __init__(self, control: Control, config: Config, policy: Policy, num_versions: int) -> None:
        self._control, self._config, self._policy, self._num_versions = control, config, policy, num_versions
        self._pool = ThreadPoolExecutor(1)
        self._compared: list[Future[int]] = []
        self._worker = ExitStack()
        self._pid = 0
        self._fetched: list[tuple[str, ...]] = []
        self.rows: list[dict[str, Any]] = []
        self.restarts = {"worker": 0, "trainer": 0}

    def run(self, load: Load, deadline: float) -> Iterator[dict[str, Any]]:
        """Publish, load, compare; yields the figures after each version. Blocks."""
        quarter = max(1, self._num_versions // 5)
        kills = {quarter, 2 * quarter, 4 * quarter}
        with ExitStack() as stack:
            stack.callback(self._pool.shutdown)
            stack.enter_context(part(self._config, "buffer"))
            trainer = stack.enter_context(Trainer(self._config))
            stack.callback(self._stop_worker)
            self._start_worker()
            self._publish(trainer)
            wait_for_worker(self._control, trainer)
            admit(self._control, self._config, _jobs(load, self._num_versions + 8), 0)
            while len(self.rows) < self._num_versions and time.monotonic() < deadline:
                if len(self.rows) == 3 * quarter and not self.restarts["trainer"]:
                    state = trainer.state_dict()
                    trainer.close()
                    trainer = stack.enter_context(Trainer(self._config))
                    trainer.load_state_dict(state)
                    self.restarts["trainer"] += 1
                    self._policy.step()
                else:
                    batch = trainer.next(timeout=LOAD_TIMEOUT_S)
                    self._policy.step(batch.padded(keys=["tokens"])["tokens"])
                    trainer.commit(batch)
                self._loaded(trainer)
                self._publish(trainer)
                if len(self.rows) in kills:
                    # It is killed while it fetches, patches or has its engine load.
                    self._kill_worker()
                yield self.figures()
            self._loaded(trainer)
            yield self.figures()

    def _publish(self, trainer: Trainer) -> None:
        began = time.monotonic()
        version = trainer.publish(self._policy.model, step=len(self.rows))
        put = trainer.publisher.deltas.last if trainer.publisher.deltas is not None else None
        if put is None:
            raise RuntimeError("Nothing was put into the store of deltas.")
        self.rows.append(
            {
                "version": version,
                "delta_bytes": put.delta_bytes,
                "full_bytes": put.full_bytes,
                "is_anchor": put.is_anchor,
                "put_s": put.seconds,
                "publish_s": time.monotonic() - began,
            }
        )

    def _loaded(self, trainer: Trainer) -> None:
        """Wait until the engine has the newest version, and have its copy compared."""
        version = self.rows[-1]["version"]
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while all(one.version != version for one in read_workers(self._control.client, trainer.keys)):
            if time.monotonic() > deadline:
                raise WaitTimeout(f"No engine had version {version} in time; the worker's log:\n{self._log()[-3000:]}")
            time.sleep(0.05)
        (copy,) = self._config.copies_dir.glob(f"v{version:08d}-*")
        self._compared.append(self._pool.submit(compare, trainer.weights_dir / f"v{version:08d}", copy))

    def _start_worker(self) -> None:
        self._pid = self._worker.enter_context(part(self._config, "worker", "--name", "bench"))

    def _stop_worker(self) -> None:
        try:
            self._worker.close()
        finally:
            self._fetched += _FETCHED.findall(self._log())
            self._pid = 0

    def _kill_worker(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        with suppress(RuntimeError):  # it says that the part has died
            self._stop_worker()
        self.restarts["worker"] += 1
        self._start_worker()

    def _log(self) -> str:
        return (self._config.run_dir / "worker.log").read_text(errors="replace")

    def figures(self) -> dict[str, Any]:
        """What is there; raises RuntimeError where a copy differed."""
        deltas = [row for row in self.rows if row["delta_bytes"]]
        fetched = self._fetched + (_FETCHED.findall(self._log()) if self._pid else [])
        shares = [row["delta_bytes"] / row["full_bytes"] for row in deltas]
        done = [one for one in self._compared if one.done()]
        return {
            "bytes_share": sum(row["delta_bytes"] for row in deltas) / sum(row["full_bytes"] for row in deltas)
            if deltas
            else None,
            "bytes_share_max": max(shares, default=None),
            "full_bytes": self.rows[0]["full_bytes"],
            "num_versions": len(self.rows),
            "num_anchors": sum(row["is_anchor"] for row in self.rows),
            "restarts": dict(self.restarts),
            "versions_bit_equal": len(done),
            "bytes_compared": sum(one.result() for one in done),
            "publish_s_p50": statistics.median(row["publish_s"] for row in self.rows),
            "put_s_p50": statistics.median(row["put_s"] for row in self.rows),
            "copy_s_p50": statistics.median([float(one[3]) for one in fetched]) if fetched else None,
            "whole_fetches": sum(one[1] == "True" for one in fetched),
        }


def compare(written: Path, copy: Path) -> int:
    """Bytes of all files of two folders, which are the same; raises RuntimeError where they are not. Blocks."""
    names = {file.name for file in written.iterdir()}
    if names != {file.name for file in copy.iterdir()}:
        raise RuntimeError(f"{copy} has other files than {written}.")
    total = 0
    for name in names:
        with (written / name).open("rb") as one, (copy / name).open("rb") as other:
            while (left := one.read(_COMPARED_BYTES)) or other.read(1):
                if left != other.read(len(left) or 1):
                    raise RuntimeError(f"{copy / name} is not {written / name}.")
                total += len(left)
    return total


def _jobs(load: Load, count: int) -> list[Job]:
    sampling = load.sampling | {"max_new_tokens": 32}
    return [
        Job(f"{DATASET}/0/{i}", GROUP, prompt_ids=prompt, sampling=sampling)
        for i, prompt in enumerate(load.prompts(0, count))
    ]


@contextmanager
def line_config(url: str, engine: RunningEngine, folder: Path, anchor_every: int, full_bytes: int) -> Iterator[Config]:
    """A run whose folders are gone afterwards."""
    weights = folder / "versions"
    try:
        yield make_config(
            url,
            engine.folder,
            run="versions",
            model={"path": str(engine.model)},
            engine={"url": engine.url},
            rollout={"n": GROUP, "max_context_tokens": 1024, "sampling": {"max_new_tokens": 32}},
            worker={
                "slots": 64,
                "heartbeat_s": 0.2,
                "lease_s": 5.0,
                "drain_timeout_s": 0.0,
                "copies_dir": str(weights / "copies"),
                "copies_bytes": 5 * full_bytes + 2**30,
            },
            staleness={"mode": "async", "bound": 128},
            trainer={
                "batch_groups": 1,
                "batches_per_version": 1,
                "transport": "delta",
                "anchor_every": anchor_every,
                "weights_dir": str(weights),
                "keep_versions": 3,
            },
        )
    finally:
        shutil.rmtree(weights, ignore_errors=True)


def tokens_lost(rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, float]:
    """Per update, by transport, against legs without updates before and after."""
    rate = sum(one["tokens"] for one in plain) / sum(one["seconds"] for one in plain)
    return {row["transport"]: (row["seconds"] * rate - row["tokens"]) / max(1, row["updates"]) for row in rows}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}; its weights are bfloat16.")] = "tiny",
    legs: Annotated[str, typer.Option(help="Comma-separated: versions, tokens.")] = "versions,tokens",
    num_versions: Annotated[int, typer.Option("--versions", help="Versions of that leg.")] = 50,
    anchor_every: Annotated[int, typer.Option(help="trainer.anchor_every.")] = 20,
    lr: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-6,
    seconds: Annotated[float, typer.Option(help="Most seconds of leg versions; it ends with what it has.")] = 300.0,
    updates: Annotated[int, typer.Option(help="Updates of each leg of tokens.")] = 3,
    groups: Annotated[int, typer.Option(help="Prompts of each leg of tokens, 8 answers each.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Mean length of an answer, in leg tokens.")] = 64,
    folder: Annotated[Path | None, typer.Option(help="For weights and copies; None: memory, where it can be.")] = None,
    engine_python: Annotated[str | None, typer.Option(help="Interpreter that has sglang; None: by device.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of sglang.launch_server; repeat.")] = None,
    engine_env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the server; repeat.")] = None,
) -> None:
    """Bytes of deltas, versions through restarts, and the tokens that an update costs."""
    load = Load(groups, concurrency, 32, new_tokens)
    wanted = legs.split(",")
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        python = engine_python or default_python(device)
        # The rest of the device is the trainer's.
        args = {"max-running-requests": concurrency} | ({"mem-fraction-static": 0.3} if device == "cuda" else {})
        made = replace(SHAPES[shape], dtype="bfloat16")
        engine = stack.enter_context(
            running_engine(made, device=device, python=python, args=args | pairs(engine_arg), env=pairs(engine_env))
        )
        model = load_model(engine.model, device)
        policy = Policy(model, lr, torch.randint(2, 90, (8, 64), generator=torch.Generator().manual_seed(1)))
        report = Report(
            title=f"deltas of weights: a model of {made.num_parameters / 1e6:.1f} M parameters in bfloat16, "
            f"AdamW with float32 masters at {lr:g}",
            columns={"version": "version", "delta_bytes": "delta bytes", "publish_s": "publish s", "put_s": "put s"},
            keys={"bytes_share": None, "tokens_lost": None, "restarts": None},
            versions=versions(connect(url), sglang=engine.sglang),
            more={"shape": shape, "lr": lr, "anchor_every": anchor_every},
            notes=[
                "bytes_share: of versions with a delta, that beside all bytes of tensors; anchors are apart.",
                "versions_bit_equal: files of the copy that the engine loaded, compared with the trainer's, all bytes.",
                "restarts: workers by SIGKILL after a publication; the trainer is a new Trainer in the same process.",
                "tokens_lost: per update, against legs without; an optimizer step before each update is in it.",
            ],
        )
        place = folder or fast_folder(engine.folder / "weights")
        full_bytes = sum(one.numel() * one.element_size() for one in model.parameters())
        if "versions" in wanted:
            with line_config(url, engine, place, anchor_every, full_bytes) as config:
                line = Line(Control(url), config, policy, num_versions)
                for figures in line.run(load, time.monotonic() + seconds):
                    report.rows, report.keys = line.rows, report.keys | figures
                    if len(line.rows) % WRITE_EVERY == 0:
                        _write(report, json_file)
            # Every comparison has ended with the run of versions.
            report.keys |= line.figures()
            _write(report, json_file)
        if "tokens" in wanted:
            report.keys |= _tokens(url, engine, policy, load, updates, device)
        report.finish(json_file)


def _tokens(url: str, engine: RunningEngine, policy: Policy, load: Load, updates: int, device: str) -> dict[str, Any]:
    def leg(of: Load, transport: str, count: int, policy_name: str = "in_place") -> dict[str, Any]:
        chosen = Leg(policy_name, transport, count)
        return run_leg(url, engine, policy.model, of, chosen, device, policy.step)

    leg(replace(load, groups=16), "disk", 1, "abort")  # to warm up
    plain = [leg(load, "disk", 0)]
    rows = [met_busy_engine(leg(load, way, updates)) for way in ("disk", "delta")]
    plain.append(leg(load, "disk", 0, "abort"))
    return {
        "tokens_lost": tokens_lost(rows, plain),
        "updates": {row["transport"]: row["updates"] for row in rows},
        "pause_s": {row["transport"]: row["pause_s"] for row in rows},
        "leg_publish_s": {row["transport"]: row["publish_s"] for row in rows},
        "plain_rates": [one["tokens"] / one["seconds"] for one in plain],
    }


def _write(report: Report, json_file: Path | None) -> None:
    if json_file is not None:
        report.finish(json_file)


if __name__ == "__main__":
    execute(main)
