"""CPU time of a worker per sample, with an engine that answers at once.

A server in a process of its own answers each request with as many tokens as it asks for, with logprobs and versions
like SGLang's. Jobs are text prompts with 8 answers each; one worker generates, scores and commits them, and a trainer
reads them. The figure is the CPU time of the worker (user and system, all its processes) between the first job's
admission and the last sample's tensor, so that other load on the machine changes it little.

``--source NAME=DIR`` measures the penstock of another checkout too; the sources alternate over the rounds, and each
round starts every process anew.

    python -m benchmarks.worker_cpu --json FILE
    python -m benchmarks.worker_cpu --source before=../main --source after=. --rounds 5
"""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.bench_run import DATASET, admit
from benchmarks.common import Report, execute, median, redis_server, spread, versions
from benchmarks.engine import RunningEngine
from benchmarks.engine_overhead import GROUP, Load, Penstock, running_penstock
from benchmarks.options import JsonFile
from benchmarks.paired import interval
from benchmarks.penstock_path import cpu_s_of
from benchmarks.random_model import Shape, make_model
from penstock.records.job import Job
from penstock.redis.connect import connect

#: Length of an answer in tokens -> groups of one measurement: multiples of BATCH_GROUPS.
GROUPS = {52: 128, 448: 48, 3072: 12}
BATCH_GROUPS = 4
#: Measurements of each length in a round; the least counts, because other load on the machine only adds.
REPEATS = 4
PROMPT_TOKENS = 64
SLOTS = 256
ROUND_TIMEOUT_S = 300.0


@cache
def answer(length: int, version: str, prompt_tokens: int) -> bytes:
    """An answer of ``length`` tokens as JSON, in the form of SGLang's ``/generate``."""
    return json.dumps(_answer(length, version, prompt_tokens)).encode()


@cache
def events(length: int, version: str, prompt_tokens: int, index: int) -> bytes:
    """The two events of an answer in the stream of a batch: the first token, and the rest."""
    found = _answer(length, version, prompt_tokens)
    meta, entries = found["meta_info"], found["meta_info"]["output_token_logprobs"]
    begun = meta | {"finish_reason": None, "weight_versions": None, "completion_tokens": 1}
    parts = [
        {"output_ids": found["output_ids"][:1], "meta_info": begun | {"output_token_logprobs": entries[:1]}},
        {"output_ids": found["output_ids"][1:], "meta_info": meta | {"output_token_logprobs": entries[1:]}},
    ]
    return b"".join(b"data: " + json.dumps(one | {"text": "", "index": index}).encode() + b"\n\n" for one in parts)


def _answer(length: int, version: str, prompt_tokens: int) -> dict[str, Any]:
    ids = [2 + 7919 * at % 90 for at in range(length)]
    meta = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "length", "length": length},
        "prompt_tokens": prompt_tokens,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": length}],
        "total_retractions": 0,
        "completion_tokens": length,
        "cached_tokens": 0,
        "e2e_latency": 0.123456789,
        "output_token_logprobs": [[-0.5 - at % 97 / 13, token, None] for at, token in enumerate(ids)],
    }
    return {"text": "x" * length, "output_ids": ids, "meta_info": meta}


def serve(pipe: Any) -> None:
    """Serve at a free port, which is sent through ``pipe``, until the process is terminated."""
    import asyncio

    import uvloop
    from aiohttp import web

    version = "default"

    async def info(_: web.Request) -> web.Response:
        shown = {"version": "0.5.20", "disable_overlap_schedule": True, "weight_version": version}
        shown |= {"incremental_streaming_output": True, "stream_interval": 1}
        return web.json_response(shown | {"model_path": "/model", "tp_size": 1, "dp_size": 1, "loads": []})

    async def load(request: web.Request) -> web.Response:
        nonlocal version
        version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    async def done(_: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if isinstance(body["rid"], list):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for index, (ids, sampling) in enumerate(zip(body["input_ids"], body["sampling_params"], strict=True)):
                await response.write(events(sampling["max_new_tokens"], version, len(ids), index))
            await response.write(b"data: [DONE]\n\n")
            return response
        data = answer(body["sampling_params"]["max_new_tokens"], version, len(body["input_ids"]))
        return web.Response(body=data, content_type="application/json")

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get(path, info) for path in ("/health", "/server_info", "/model_info", "/v1/loads")])
        app.add_routes([web.post("/update_weights_from_disk", load), web.post("/generate", generate)])
        app.add_routes([web.post("/{rest:.*}", done)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(run())


@contextlib.contextmanager
def instant_engine() -> Iterator[RunningEngine]:
    """Run the server, beside the folder of a small model."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        make_model(folder / "model", Shape(hidden=64, layers=1, mlp=64, vocab=128))
        process = context.Process(target=serve, args=(child,), daemon=True)
        process.start()
        child.close()
        try:
            yield RunningEngine(f"http://127.0.0.1:{parent.recv()}", folder / "model", folder, "none")
        finally:
            process.terminate()
            process.join(timeout=30)


def cpu_per_sample(penstock: Penstock, length: int, groups: int) -> float:
    """CPU seconds of the worker per sample, for ``groups`` groups of answers of ``length`` tokens. Blocks."""
    first = penstock.admitted
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
    jobs = [
        Job(f"{DATASET}/0/{index}", GROUP, prompt=f"{index:0{PROMPT_TOKENS}d}", sampling=sampling)
        for index in range(first, first + groups)
    ]
    before_s = cpu_s_of(penstock.pids["worker"])
    admit(penstock.control, penstock.config, jobs, first)
    penstock.admitted += groups
    samples = tokens = 0
    while samples < groups * GROUP:
        batch = penstock.trainer.next(timeout=ROUND_TIMEOUT_S)
        tokens += int(batch.padded()["generated"].sum())
        samples += len(batch)
        penstock.trainer.commit(batch)
    spent_s = cpu_s_of(penstock.pids["worker"]) - before_s
    penstock.trainer.state_dict()
    penstock.trainer.checkpointed()
    if tokens != samples * length:
        raise RuntimeError(f"{tokens} tokens arrived of {samples * length}; the figure is void.")
    return spent_s / samples


def leg(reward: str) -> dict[int, float]:
    """Length -> CPU seconds per sample, in a new run. Blocks."""
    load = Load(0, SLOTS, PROMPT_TOKENS, max(GROUPS))
    with redis_server() as url, instant_engine() as engine:
        sections = {"reward": {"function": reward}}
        with running_penstock(url, engine, load, BATCH_GROUPS, sections=sections) as penstock:
            for length in GROUPS:
                cpu_per_sample(penstock, length, BATCH_GROUPS)
            return {
                length: min(cpu_per_sample(penstock, length, groups) for _ in range(REPEATS))
                for length, groups in GROUPS.items()
            }


def leg_of(directory: Path, reward: str) -> dict[int, float]:
    """As ``leg``, in a process that imports penstock from a checkout."""
    paths = [str(directory.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).absolute()), "--leg", "--reward", reward],
        cwd=directory,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"The leg of {directory} failed:\n{done.stderr[-3000:]}")
    return {int(length): spent_s for length, spent_s in json.loads(done.stdout.splitlines()[-1]).items()}


def main(
    json_file: JsonFile = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each source.")] = 3,
    source: Annotated[list[str] | None, typer.Option(help="NAME=DIR of a checkout; repeat.")] = None,
    reward: Annotated[str, typer.Option(help="One that reads the answer, or random, which does not.")] = "exact_match",
    as_leg: Annotated[bool, typer.Option("--leg", help="Measure once and print the figures as JSON.")] = False,
) -> None:
    """CPU time of a worker per sample and per 1,000 tokens."""
    if as_leg:
        print(json.dumps(leg(reward)))
        return
    sources = dict(one.split("=", 1) for one in source or ["penstock=."])
    spent: dict[str, list[dict[int, float]]] = {name: [] for name in sources}
    for turn in range(rounds):
        for name in sources if turn % 2 == 0 else reversed(sources):
            spent[name].append(leg_of(Path(sources[name]), reward))
            typer.echo(f"round {turn + 1} of {rounds}, {name}: {spent[name][-1]}", err=True)
    report(spent, reward).finish(json_file)


def report(spent: dict[str, list[dict[int, float]]], reward: str) -> Report:
    """One row per source and length; the ratio to the first source is that of the rounds that lay beside each other."""
    first = next(iter(spent))
    rows = [
        {
            "source": name,
            "tokens": length,
            "ms_per_sample": 1000 * median([one[length] for one in rounds]),
            "ms_per_1000_tokens": 1e6 * median([one[length] for one in rounds]) / length,
            "spread": spread([one[length] for one in rounds]),
            "ratio": str(interval([a[length] / b[length] for a, b in zip(rounds, spent[first], strict=True)])),
            "rounds": [one[length] for one in rounds],
        }
        for name, rounds in spent.items()
        for length in GROUPS
    ]
    with redis_server() as url:
        seen = versions(connect(url))
    return Report(
        title=f"CPU time of a worker: groups of {GROUP}, prompts of {PROMPT_TOKENS} tokens, reward {reward}",
        columns={
            "source": "source", "tokens": "tokens", "ms_per_sample": "ms/sample",
            "ms_per_1000_tokens": "ms/1,000 tokens", "spread": "spread", "ratio": f"over {first} [95 %]",
        },
        rows=rows,
        keys={
            key: {name: {one["tokens"]: one[key] for one in rows if one["source"] == name} for name in spent}
            for key in ("ms_per_sample", "ratio")
        },
        versions=seen,
    )  # fmt: skip


if __name__ == "__main__":
    execute(main)
