"""Weights as deltas: their bytes beside the whole, through restarts of workers and trainer, and the tokens they cost.

One SGLang server, a trainer on the same device: AdamW on float32 masters, a policy gradient on the batches that come,
random advantages. Leg ``versions``: so many versions by transport delta; a worker is killed three times, the trainer
begins anew once, and every copy that an engine was given is compared with what the trainer wrote, byte by byte. Leg
``tokens``: updates of a busy engine by disk and by delta, as in ``benchmarks.weights``, each after an optimizer step.
Leg ``format``, without an engine: bytes and CPU time of deltas of random weights, written and applied.

    python -m benchmarks.deltas --json FILE
    python -m benchmarks.deltas --legs format --folder /dev/shm --json FILE
    python -m benchmarks.deltas --device cuda --shape 1.5b --concurrency 512 --new-tokens 512 --groups 256 --json FILE

What is there is written as each leg ends, and after each version. Of a 1.5B model on a GPU a version takes about 6 s, 4
of them for its folder, while the engine loads the version before; a worker's restart 15 s, as its engine stays. So 50
versions with all restarts, which come in the first 20, take about 350 s; the five legs of tokens 150 s.
"""

import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.error import URLError

import torch
import typer

from benchmarks.bench_run import DATASET, admit, make_config, part
from benchmarks.common import Report, execute, patched, redis_server, versions
from benchmarks.copied import Copied, copied_by
from benchmarks.engine import RunningEngine
from benchmarks.engine_overhead import GROUP, Load, wait_for_worker
from benchmarks.gpu_model import SHAPES, fast_folder
from benchmarks.options import Concurrency, Device, EngineArgs, EngineEnv, EnginePython, JsonFile, served
from benchmarks.policy import Policy
from benchmarks.weights import Leg, load_model, met_busy_engine, run_leg
from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights import publisher
from penstock.consumers.weights.write import write_weights
from penstock.errors import WaitTimeout
from penstock.protocol.presence import read_workers
from penstock.records.job import Job
from penstock.redis.connect import connect
from penstock.redis.control import Control
from penstock.weights.delta_format import WeightsFolder, apply_delta, write_delta

#: Longest wait for an engine to have a version.
LOAD_TIMEOUT_S = 240.0
_COMPARED_BYTES = 16 * 1024 * 1024


class Line:
    """One run of versions by delta."""

    def __init__(self, control: Control, config: Config, policy: Policy, num_versions: int) -> None:
        self._control, self._config, self._policy, self._num_versions = control, config, policy, num_versions
        self._pool = ThreadPoolExecutor(1)
        self._compared: list[Future[int]] = []
        self._worker = ExitStack()
        self._pid = 0
        #: Of the worker's process, up to the version that was loaded last; seconds of a copy, version by version.
        self._copied, self._copy_s = Copied(), list[float]()
        self._whole_fetches = 0
        self.rows: list[dict[str, Any]] = []
        self.restarts = {"worker": 0, "trainer": 0}

    def run(self, load: Load, deadline: float) -> Iterator[dict[str, Any]]:
        """Publish, load, compare; yields the figures after each version. Blocks."""
        # All early: whatever the time allows, they were there.
        tenth = max(1, self._num_versions // 10)
        kills = {1 + tenth, 1 + 2 * tenth, 1 + 3 * tenth}
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
                if len(self.rows) == 1 + 4 * tenth and not self.restarts["trainer"]:
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
                self._publish(trainer)
                if len(self.rows) in kills:
                    # It is killed while it fetches, patches or has its engine load.
                    self._kill_worker()
                yield self.figures()
            self._loaded(trainer)
            yield self.figures()

    def _publish(self, trainer: Trainer) -> None:
        """The folder is written while the engine loads the version before; the announcement waits for that load."""
        deltas, waited_s = trainer.publisher.deltas, 0.0
        if deltas is None:
            raise RuntimeError("Nothing is put into a delta store.")
        store = deltas.put

        def when_loaded(*args: Any) -> Any:
            nonlocal waited_s
            at_s = time.monotonic()
            if self.rows:
                self._loaded(trainer)
            waited_s += time.monotonic() - at_s
            return store(*args)

        began_s = time.monotonic()
        with patched(deltas, put=when_loaded):
            version = trainer.publish(self._policy.model, step=len(self.rows))
        put = deltas.last
        assert put is not None
        self.rows.append(
            {
                "version": version,
                "delta_bytes": put.delta_bytes,
                "full_bytes": put.full_bytes,
                "is_anchor": put.is_anchor,
                "put_s": put.took_s,
                "publish_s": time.monotonic() - began_s - waited_s,
            }
        )

    def _loaded(self, trainer: Trainer) -> None:
        """Wait until the engine has the newest version, and have its copy compared."""
        version = self.rows[-1]["version"]
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while (copied := self._copied_at(trainer, version)) is None:
            if time.monotonic() > deadline:
                raise WaitTimeout(f"No engine had version {version} in time; the worker's log:\n{self._log()[-3000:]}")
            time.sleep(0.05)
        if num := copied.num - self._copied.num:
            self._copy_s.append((copied.took_s - self._copied.took_s) / num)
            self._whole_fetches += copied.num_whole - self._copied.num_whole
        self._copied = copied
        (copy,) = self._config.copies_dir.glob(f"v{version:08d}-*")
        self._compared.append(self._pool.submit(compare, trainer.weights_dir / f"v{version:08d}", copy))

    def _copied_at(self, trainer: Trainer, version: int) -> Copied | None:
        """What the worker that lives has counted, once its engine has a version."""
        for one in read_workers(self._control.client, trainer.keys):
            if one.version == version:
                with suppress(URLError):  # it is the one that was killed
                    return copied_by(one.metrics)
        return None

    def _start_worker(self) -> None:
        self._copied = Copied()
        self._pid = self._worker.enter_context(part(self._config, "worker", "--name", "bench"))

    def _stop_worker(self) -> None:
        try:
            self._worker.close()
        finally:
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
            "copy_s_p50": statistics.median(self._copy_s) if self._copy_s else None,
            "whole_fetches": self._whole_fetches,
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
    publisher.ANCHOR_EVERY = anchor_every
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
            metrics={"port": 0},
            trainer={
                "batch_groups": 1,
                "batches_per_version": 1,
                "transport": "delta",
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


@dataclass(slots=True)
class Deltas:
    """The figures as they come."""

    load: Load
    device: str
    json_file: Path | None
    legs: tuple[str, ...] = ("versions", "tokens")
    num_versions: int = 50
    anchor_every: int = 20
    lr: float = 1e-6
    #: Of each leg of tokens.
    updates: int = 3
    folder: Path | None = None
    report: Report = field(init=False)

    def measure(self, url: str, engine: RunningEngine, model: Any, shape: str, end_s: float = math.inf) -> None:
        """The legs that are wanted; written as each ends, and every few versions. Blocks.

        Args:
            end_s: leg ``versions`` ends by then with what it has, on the monotonic clock, and no leg of tokens is
                begun that would not end by then. WaitTimeout where some are left out.
        """
        policy = Policy(model, self.lr, torch.randint(2, 90, (8, 64), generator=torch.Generator().manual_seed(1)))
        self.report = Report(
            title=f"deltas of weights: a model of {SHAPES[shape].num_parameters / 1e6:.1f} M parameters in bfloat16, "
            f"AdamW with float32 masters at {self.lr:g}",
            columns={"version": "version", "delta_bytes": "delta bytes", "publish_s": "publish s", "put_s": "put s"},
            keys={"bytes_share": None, "tokens_lost": None, "restarts": None},
            versions=versions(connect(url), sglang=engine.sglang),
            more={"shape": shape, "lr": self.lr, "anchor_every": self.anchor_every},
            notes=[
                "bytes_share: of versions with a delta, that beside all bytes of tensors; anchors are apart.",
                "versions_bit_equal: files of the copy that the engine loaded, compared with the trainer's, all bytes.",
                "restarts: workers by SIGKILL after a publication; the trainer is a new Trainer in the same process.",
                "tokens_lost: per update, against legs without; an optimizer step before each update is in it.",
            ],
        )
        if "versions" in self.legs:
            self._versions(url, engine, policy, end_s)
        if "tokens" in self.legs:
            self._tokens(url, engine, policy, end_s)
        self.report.show()

    def _versions(self, url: str, engine: RunningEngine, policy: Policy, end_s: float) -> None:
        place = self.folder or fast_folder(engine.folder / "weights")
        full_bytes = sum(one.numel() * one.element_size() for one in policy.model.parameters())
        with line_config(url, engine, place, self.anchor_every, full_bytes) as config:
            line = Line(Control(url), config, policy, self.num_versions)
            for figures in line.run(self.load, end_s):
                self._write(figures, line.rows)
        # Every comparison has ended with the run of versions.
        self._write(line.figures(), line.rows)

    def _tokens(self, url: str, engine: RunningEngine, policy: Policy, end_s: float) -> None:
        longest_s = 0.0

        def leg(of: Load, transport: str, count: int, policy_name: str = "in_place") -> dict[str, Any]:
            nonlocal longest_s
            began_s = time.monotonic()
            if began_s + longest_s > end_s:
                raise WaitTimeout(f"There was no time for a leg of tokens by {transport}: give more by --budget-s.")
            chosen = Leg(policy_name, transport, count)
            row = run_leg(url, engine, policy.model, of, chosen, self.device, policy.step)
            longest_s = max(longest_s, time.monotonic() - began_s)
            return row

        leg(replace(self.load, groups=16), "disk", 1, "abort")  # to warm up
        plain, rows = [leg(self.load, "disk", 0)], []
        for way in ("disk", "delta"):
            rows.append(met_busy_engine(leg(self.load, way, self.updates)))
            self._write(figures_of_tokens(rows, plain))
        plain.append(leg(self.load, "disk", 0, "abort"))
        self._write(figures_of_tokens(rows, plain))

    def _write(self, figures: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> None:
        self.report.keys |= figures
        self.report.rows = self.report.rows if rows is None else rows
        self.report.write(self.json_file)


def figures_of_tokens(rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Of leg tokens; ``tokens_lost_ratio``: by delta over by disk."""
    lost = tokens_lost(rows, plain)
    return {
        "tokens_lost": lost,
        "tokens_lost_ratio": lost["delta"] / lost["disk"] if "delta" in lost and lost["disk"] > 0 else None,
        "updates": {row["transport"]: row["updates"] for row in rows},
        "pause_s": {row["transport"]: row["pause_s"] for row in rows},
        "leg_publish_s": {row["transport"]: row["publish_s"] for row in rows},
        "plain_rates": [one["tokens"] / one["seconds"] for one in plain],
    }


def changed(before: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """Return the tensor after a step that moves ``share`` of its elements: bfloat16 by one unit, float32 by 1e-6."""
    generator = torch.Generator().manual_seed(seed)
    moves = torch.rand(before.shape, generator=generator) < share
    signs = torch.randint(0, 2, before.shape, generator=generator) * 2 - 1
    if before.dtype == torch.bfloat16:
        return (before.view(torch.int16) + (moves * signs).to(torch.int16)).view(torch.bfloat16)
    return before + moves * signs * 1e-6


def measure_delta(folder: Path, dtype: torch.dtype, share: float, rounds: int) -> dict[str, Any]:
    """Return bytes and CPU seconds of one delta of 256 MiB: written, and applied. Blocks."""
    generator = torch.Generator().manual_seed(1)
    shape = (2048, 32 * 2**20 // dtype.itemsize // 2048)
    before = {f"w{n}": (torch.randn(shape, generator=generator) * 0.02).to(dtype) for n in range(8)}
    after = {name: changed(tensor, share, n) for n, (name, tensor) in enumerate(before.items())}
    (folder / "config.json").write_text("{}")
    weights = folder / "weights"
    old, new = (write_weights(model, folder, weights, n, keep=2) for n, model in enumerate((before, after), 1))
    gib = new.num_bytes / 2**30
    write_s, apply_s, num_bytes = list[float](), list[float](), 0
    for _ in range(rounds):
        base, target = (WeightsFolder(one.path, one.index_digest) for one in (old, new))
        began_s = time.process_time()
        num_bytes = write_delta(base, target, folder / "delta")
        write_s.append(time.process_time() - began_s)
        (folder / "into").mkdir()
        began_s = time.process_time()
        apply_delta(folder / "delta", base, folder / "into", new.index_digest)
        apply_s.append(time.process_time() - began_s)
        compare(new.path, folder / "into")
        shutil.rmtree(folder / "into")
        (folder / "delta").unlink()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "changed": share,
        "bytes_share": num_bytes / new.num_bytes,
        "write_cpu_s_per_gib": statistics.median(write_s) / gib,
        "apply_cpu_s_per_gib": statistics.median(apply_s) / gib,
    }


def measure_formats(json_file: Path | None, place: Path | None) -> None:
    """Measure the delta format without an engine. Blocks for a minute."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for share in (0.01, 0.03, 1.0):
            with tempfile.TemporaryDirectory(dir=place) as folder:
                rows.append(measure_delta(Path(folder), dtype, share, 5))
    Report(
        title="delta format: bytes over those of the tensors, CPU seconds of all threads per GiB of tensors",
        columns={
            "dtype": "dtype", "changed": "changed elements", "bytes_share": "bytes share",
            "write_cpu_s_per_gib": "write CPU s/GiB", "apply_cpu_s_per_gib": "apply CPU s/GiB",
        },
        rows=rows,
        versions=versions(),
        notes=["8 tensors of 32 MiB, normal with deviation 0.02; medians of 5; with hashes and writes of files."],
    ).finish(json_file)  # fmt: skip


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}; its weights are bfloat16.")] = "tiny",
    legs: Annotated[str, typer.Option(help="Comma-separated: versions, tokens; or format alone.")] = "versions,tokens",
    num_versions: Annotated[int, typer.Option("--versions", help="Versions of that leg.")] = 50,
    anchor_every: Annotated[int, typer.Option(help="One of so many versions is stored complete.")] = 20,
    lr: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-6,
    budget_s: Annotated[float, typer.Option(help="Leg versions ends within so much of the start.")] = 560.0,
    updates: Annotated[int, typer.Option(help="Updates of each leg of tokens.")] = 3,
    groups: Annotated[int, typer.Option(help="Prompts of each leg of tokens, 8 answers each.")] = 64,
    concurrency: Concurrency = 64,
    new_tokens: Annotated[int, typer.Option(help="Mean length of an answer, in leg tokens.")] = 64,
    folder: Annotated[Path | None, typer.Option(help="For weights and copies; None: memory, where it can be.")] = None,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
) -> None:
    """Bytes of deltas, versions through restarts, and the tokens that an update costs."""
    if legs == "format":
        measure_formats(json_file, folder)
        return
    end_s = time.monotonic() + budget_s
    load, wanted = Load(groups, concurrency, 32, new_tokens), tuple(legs.split(","))
    made = Deltas(load, device, json_file, wanted, num_versions, anchor_every, lr, updates, folder)
    shape_made = replace(SHAPES[shape], dtype="bfloat16")
    # The rest of the device is the trainer's.
    more = {"mem-fraction-static": 0.3} if device == "cuda" else {}
    with (
        redis_server() as url,
        served(shape_made, device, concurrency, engine_python, engine_arg, engine_env, more) as engine,
    ):
        made.measure(url, engine, load_model(engine.model, device), shape, end_s)


if __name__ == "__main__":
    execute(main)
