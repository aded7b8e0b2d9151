"""For how long ``publish()`` blocks a trainer: folders first, and the send first with folders behind, in turns.

One SGLang server for each shape, under load. A trainer publishes while answers are drawn; ``blocked_s`` is the median
wall time of ``publish``, waiting for engines included. ``tokens_lost`` is as in ``benchmarks.weights``: against legs
without updates, before and after.

    python -m benchmarks.publish --json FILE
    python -m benchmarks.publish --device cuda --shapes 1.5b --transport cuda_ipc --concurrency 512 \\
        --new-tokens 512 --groups 128 --json FILE
    python -m benchmarks.publish --device cuda --shapes 0.5b,1.5b --transport nccl --concurrency 256 \\
        --new-tokens 256 --groups 128 --engine-env CUDA_VISIBLE_DEVICES=1 --json FILE

What is there is written as each leg ends.
"""

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, redis_server, versions
from benchmarks.engine import default_python, running_engine
from benchmarks.engine_overhead import Load
from benchmarks.gpu_model import SHAPES
from benchmarks.options import pairs
from benchmarks.weights import Leg, load_model, run_leg
from penstock.redis.connect import connect

#: Folders first or not, in this order: what drifts touches both alike.
TURNS = (True, False, False, True)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, of trainer and server.")] = "cpu",
    shapes: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(SHAPES)}.")] = "tiny",
    transport: Annotated[str, typer.Option(help="gloo, cuda_ipc, nccl; disk: nothing is sent.")] = "gloo",
    policy: Annotated[str, typer.Option(help="in_place, abort or drain.")] = "in_place",
    publications: Annotated[int, typer.Option(help="Of each of the two, over two legs.")] = 20,
    groups: Annotated[int, typer.Option(help="Prompts of each leg, 8 answers each.")] = 96,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 64,
    prompt_tokens: Annotated[int, typer.Option()] = 32,
    new_tokens: Annotated[int, typer.Option(help="Mean length of an answer.")] = 64,
    engine_python: Annotated[str | None, typer.Option(help="Interpreter that has sglang; None: by device.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of sglang.launch_server; repeat.")] = None,
    engine_env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the server; repeat.")] = None,
) -> None:
    """For how long publishing blocks a trainer, with the folder first and with the send first."""
    load = Load(groups, concurrency, prompt_tokens, new_tokens)
    rows: list[dict[str, Any]] = []
    keys: dict[str, Any] = {"blocked_s": {}, "blocked_folder_first_s": {}, "send_s": {}, "tokens_lost": {}, "rate": {}}
    with ExitStack() as stack:
        url = stack.enter_context(redis_server())
        for shape in shapes.split(","):
            with running_engine(
                SHAPES[shape],
                device=device,
                python=engine_python or default_python(device),
                args={"max-running-requests": concurrency} | pairs(engine_arg),
                env=pairs(engine_env),
            ) as engine:
                model = load_model(engine.model, device)
                plain, seen = [], versions(connect(url), sglang=engine.sglang)

                def leg(one: Leg) -> dict[str, Any]:
                    return {"shape": shape} | run_leg(url, engine, model, load, one, device)  # noqa: B023

                leg(Leg("abort", "disk", 1))  # to warm up
                plain.append(leg(Leg(policy, "disk", 0)))
                for turn, is_first in enumerate(TURNS, 1):
                    rows.append(leg(Leg(policy, transport, publications // 2, is_first, turn)))
                    note(keys, rows, plain, shape)
                    report(keys, rows, load, seen).write(json_file)
                plain.append(leg(Leg(policy, "disk", 0, turn=len(TURNS) + 1)))
                note(keys, rows, plain, shape)
                report(keys, rows, load, seen).write(json_file)
    report(keys, rows, load, seen).show()


def note(keys: dict[str, Any], rows: list[dict[str, Any]], plain: list[dict[str, Any]], shape: str) -> None:
    """Put the figures of a shape, of the legs that are there, into ``keys``."""
    rate = sum(one["tokens"] for one in plain) / sum(one["seconds"] for one in plain)
    keys["rate"][shape] = rate
    for is_first, name in ((True, "blocked_folder_first_s"), (False, "blocked_s")):
        own = [row for row in rows if row["shape"] == shape and row["folder_first"] is is_first]
        for row in own:
            row["tokens_lost"] = (row["seconds"] * rate - row["tokens"]) / max(1, row["updates"])
            row["blocked_p50_s"] = statistics.median(row["blocked_s"])
        if own:
            keys[name][shape] = statistics.median(each for row in own for each in row["blocked_s"])
        if own and not is_first:
            keys["tokens_lost"][shape] = statistics.mean(row["tokens_lost"] for row in own)
            sent = [row["send_s"] for row in own if row["send_s"] is not None]
            keys["send_s"][shape] = statistics.mean(sent) if sent else None


def report(keys: dict[str, Any], rows: list[dict[str, Any]], load: Load, seen: dict[str, str]) -> Report:
    """The legs so far."""
    return Report(
        title=f"publish() under load, {load.concurrency} answers of about {load.new_tokens} tokens at once",
        columns={
            "shape": "shape",
            "transport": "transport",
            "folder_first": "folder first",
            "updates": "updates",
            "blocked_p50_s": "blocked s, p50",
            "send_s": "send s",
            "pause_s": "pause s",
            "tokens_lost": "tokens lost",
        },
        rows=rows,
        keys=keys,
        versions=seen,
        notes=["tokens lost: per update that met the engine, against legs without updates (before, after)."],
    )


if __name__ == "__main__":
    execute(main)
