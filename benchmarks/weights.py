"""What an update of weights costs an engine under load: seconds without a token, and tokens that were not drawn.

One SGLang server. For each policy and transport: a real ``penstock worker`` and buffer, jobs for the whole leg admitted
at once, a trainer that consumes batches and publishes the model in between. Answers have half to one and a half times
``--new-tokens``, so that groups end one after the other and every update meets a busy engine. ``pause_s`` is what the
worker measures per update; ``tokens_lost`` is what the engine would have drawn in the time that the last commit of a
leg came later than in one without updates, per update: pauses, prefixes computed anew, slots that stood empty while
samples were drained, and what the trainer's writing takes from the worker on the same machine.

    python -m benchmarks.weights --json FILE
    python -m benchmarks.weights --device cuda --shape 1.5b --concurrency 512 --new-tokens 512 \\
        --transports disk,cuda_ipc --json FILE
"""

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import redis
import typer

from benchmarks.bench_run import DATASET, admit, make_config, part
from benchmarks.common import Report, execute, redis_server, versions
from benchmarks.engine import RunningEngine
from benchmarks.engine_overhead import GROUP, Load, wait_for_worker
from benchmarks.gpu_model import SHAPES, fast_folder
from benchmarks.options import (
    Concurrency,
    Device,
    EngineArgs,
    EngineEnv,
    EnginePython,
    JsonFile,
    MeanTokens,
    PromptTokens,
    ShapeName,
    served,
)
from penstock.consumers.trainer import Trainer
from penstock.errors import WaitTimeout
from penstock.records.job import Job
from penstock.redis.connect import connect
from penstock.redis.control import Control

POLICIES = ("in_place", "abort", "drain")
BATCH_TIMEOUT_S = 300.0
BATCHES = 4


@dataclass(frozen=True, slots=True)
class Leg:
    """One run: a policy, a transport, and how many updates come while it generates."""

    policy: str
    transport: str
    updates: int

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.transport}-{self.updates}".replace("_", "-")


def _unchanged() -> None:
    """Publish the same weights again."""


def run_leg(
    url: str,
    engine: RunningEngine,
    model: Any,
    load: Load,
    leg: Leg,
    device: str,
    change: Callable[[], None] = _unchanged,
) -> dict[str, Any]:
    """Seconds and tokens from the admission to the last batch, and what the worker says of its updates. Blocks.

    ``change`` is called before each update, for weights that differ from the ones before.
    """
    batch_groups = max(1, load.groups // (BATCHES * (leg.updates + 1)))
    groups = batch_groups * BATCHES * (leg.updates + 1)
    weights = fast_folder(engine.folder / "weights") / leg.name
    config = make_config(
        url,
        engine.folder,
        run=leg.name,
        model={"path": str(engine.model)},
        engine={"url": engine.url},
        rollout={
            "n": GROUP,
            "max_context_tokens": load.prompt_tokens + 2 * load.new_tokens + 1,
            "sampling": {"max_new_tokens": load.new_tokens},
        },
        worker={
            "slots": load.concurrency,
            "apply": leg.policy,
            "drain_timeout_s": 0.0,
            "copies_dir": str(weights / "copies"),
        },
        staleness={"mode": "async", "bound": 64},
        trainer={
            "batch_groups": batch_groups,
            "batches_per_version": BATCHES if leg.updates else 1_000_000,
            "transport": leg.transport,
            "device": device,
            "weights_dir": str(weights),
            "keep_versions": 2,
        },
    )
    try:
        with ExitStack() as stack:
            stack.enter_context(part(config, "buffer"))
            trainer = stack.enter_context(Trainer(config))
            stack.enter_context(part(config, "worker", "--name", "bench"))
            trainer.publish(model)
            control = Control(url)
            wait_for_worker(control, trainer)
            return _measure(control, trainer, model, load, leg, groups, change)
    finally:
        shutil.rmtree(weights, ignore_errors=True)


def _measure(
    control: Control, trainer: Trainer, model: Any, load: Load, leg: Leg, groups: int, change: Callable[[], None]
) -> dict[str, Any]:
    keys, config = trainer.keys, trainer.config
    before = _counters(control, keys.counters)
    lengths = [answer_length(load, i) for i in range(groups)]
    jobs = [
        Job(f"{DATASET}/0/{i}", GROUP, prompt_ids=prompt, sampling={**load.sampling, "max_new_tokens": lengths[i]})
        for i, prompt in enumerate(load.prompts(0, groups))
    ]
    began_s = time.monotonic()
    watch = LastCommit(control.url, keys.counters, groups)
    admit(control, config, jobs, 0)
    samples = tokens = published = 0
    blocked_s: list[float] = []
    failures, sent_s = [], []
    while samples < groups * GROUP:
        batch = trainer.next(timeout=BATCH_TIMEOUT_S)
        tokens += sum(row.num_generated for row in batch.all_rows)
        samples += len(batch)
        trainer.commit(batch)
        if leg.updates and batch.n % BATCHES == 0 and published < leg.updates:
            published += 1
            change()
            at = time.monotonic()
            trainer.publish(model)
            blocked_s.append(time.monotonic() - at)
            sent = trainer.publisher.last
            if sent is not None:
                sent_s.append(sent.send_s)
                failures += [sent.failure] if sent.failure or not sent.workers else []
    ended_s = watch.wait()
    if tokens != GROUP * sum(lengths):
        raise RuntimeError(f"{tokens} tokens came of {GROUP * sum(lengths)}; the figure is void.")
    if failures:
        raise RuntimeError(f"{len(failures)} of {leg.updates} updates by {leg.transport} went by disk: {failures[0]!r}")
    after = _counters(control, keys.counters)
    updates = after["weight_updates"] - before["weight_updates"]
    pause_s = (after["weight_pause_us"] - before["weight_pause_us"]) / 1e6 / max(1, updates)
    typer.echo(
        f"{leg.name}: {tokens:,} tokens in {ended_s - began_s:.1f} s, {updates} updates, {pause_s:.3f} s pause each",
        err=True,
    )
    return {
        "policy": leg.policy,
        "transport": leg.transport,
        "updates": updates,
        "seconds": ended_s - began_s,
        "tokens": tokens,
        "pause_s": pause_s,
        "publish_s": sum(blocked_s) / max(1, leg.updates),
        "send_s": sum(sent_s) / len(sent_s) if sent_s else None,
    }


def met_busy_engine(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a leg, if one of its updates came while answers were drawn."""
    if not row["updates"]:
        raise RuntimeError(f"No update of {row['policy']} by {row['transport']} met a busy engine: raise --groups.")
    return row


def answer_length(load: Load, index: int) -> int:
    """Tokens of the answers to a prompt: half to one and a half times the mean, the same in every leg."""
    return max(1, load.new_tokens * (50 + index * 7919 % 101) // 100)


class LastCommit:
    """Watches for the commit of the last of ``groups`` groups: the trainer may be busy publishing then."""

    def __init__(self, url: str, key: str, groups: int) -> None:
        self._at = 0.0
        self._thread = threading.Thread(target=self._watch, args=(url, key, groups), daemon=True)
        self._thread.start()

    def _watch(self, url: str, key: str, groups: int) -> None:
        with redis.Redis.from_url(url) as client:
            while int(client.hget(key, "completed") or 0) < groups:
                time.sleep(0.01)
        self._at = time.monotonic()

    def wait(self) -> float:
        """When it was, on the monotonic clock. Blocks."""
        self._thread.join(BATCH_TIMEOUT_S)
        if not self._at:
            raise WaitTimeout(f"The last group was not committed in {BATCH_TIMEOUT_S:g} s.")
        return self._at


def _counters(control: Control, key: str) -> dict[str, int]:
    found = {name.decode(): int(value) for name, value in control.client.hgetall(key).items()}
    return {name: found.get(name, 0) for name in ("weight_updates", "weight_pause_us")}


def load_model(folder: Path, device: str) -> Any:
    """The model that is served, on the trainer's device."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model.to(device)


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shape: ShapeName = "tiny",
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(POLICIES),
    transports: Annotated[
        str | None, typer.Option(help="Comma-separated; default: disk,gloo or disk,cuda_ipc.")
    ] = None,
    updates: Annotated[int, typer.Option(help="Updates of each leg.")] = 3,
    groups: Annotated[int, typer.Option(help="Prompts of each leg, 8 answers each.")] = 64,
    concurrency: Concurrency = 64,
    prompt_tokens: PromptTokens = 32,
    new_tokens: MeanTokens = 64,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
) -> None:
    """Seconds and tokens that an update of weights costs, by policy and transport."""
    load = Load(groups, concurrency, prompt_tokens, new_tokens)
    ways = (transports or ("disk,gloo" if device == "cpu" else "disk,cuda_ipc")).split(",")
    legs = [Leg(policy, way, updates) for way in ways for policy in policies.split(",")]
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        engine = stack.enter_context(served(SHAPES[shape], device, concurrency, engine_python, engine_arg, engine_env))
        model = load_model(engine.model, device)
        # To warm up: an engine this little busy is done before its update comes.
        run_leg(url, engine, model, Load(16, concurrency, prompt_tokens, new_tokens), Leg("abort", "disk", 1), device)
        plain = run_leg(url, engine, model, load, Leg("in_place", "disk", 0), device)
        rows = [met_busy_engine(run_leg(url, engine, model, load, leg, device)) for leg in legs]
        after = run_leg(url, engine, model, load, Leg("abort", "disk", 0), device)
        seen = versions(connect(url), sglang=engine.sglang)
    report(rows, [plain, after], load, shape, seen).finish(json_file)


def report(
    rows: list[dict[str, Any]], plain: list[dict[str, Any]], load: Load, shape: str, seen: dict[str, str]
) -> Report:
    """Each leg against those without updates, before and after."""
    rate = sum(one["tokens"] for one in plain) / sum(one["seconds"] for one in plain)
    for row in rows:
        row["tokens_per_s"] = row["tokens"] / row["seconds"]
        row["tokens_lost"] = (row["seconds"] * rate - row["tokens"]) / max(1, row["updates"])
        row["tokens_in_pause"] = row["pause_s"] * rate
    keys: dict[str, Any] = {"tokens_per_s": rate, "plain_rates": [one["tokens"] / one["seconds"] for one in plain]}
    for figure in ("pause_s", "tokens_lost"):
        keys[figure] = {f"{row['policy']}/{row['transport']}": row[figure] for row in rows}
    return Report(
        title=f"updates of weights: a model of {SHAPES[shape].num_parameters / 1e6:.1f} M parameters, "
        f"{load.concurrency} answers of about {load.new_tokens} tokens at once, {rate:,.0f} tokens/s without updates",
        columns={
            "policy": "policy",
            "transport": "transport",
            "updates": "updates",
            "pause_s": "pause s",
            "tokens_in_pause": "tokens in pause",
            "tokens_lost": "tokens lost",
            "publish_s": "publish s",
            "send_s": "send s",
            "tokens_per_s": "tokens/s",
        },
        rows=rows,
        keys=keys,
        versions=seen,
        notes=[
            "tokens lost: against legs without updates (before, after); where legs are short their noise is in it.",
            "updates: those that met a busy engine; a worker that is behind takes the newest of several at once.",
        ],
    )


if __name__ == "__main__":
    execute(main)
