"""For how long ``publish()`` blocks a trainer: the send first with folders behind, and folders first, in turns.

Legs ``first`` and ``behind`` of ``benchmarks.timeline``, one SGLang server for each shape, which is never idle.
``blocked_s`` is the median wall time of ``publish``, waiting for engines included; ``tokens_lost`` the mean of what a
publication with its folder behind cost, folder included, against the rate before it.

    python -m benchmarks.publish --json FILE
    python -m benchmarks.publish --device cuda --shapes 1.5b --transport cuda_ipc --concurrency 512 \\
        --new-tokens 512 --engine-arg mem-fraction-static=0.3 --json FILE
    python -m benchmarks.publish --device cuda --shapes 0.5b,1.5b --transport nccl --concurrency 256 \\
        --new-tokens 256 --engine-env CUDA_VISIBLE_DEVICES=1 --json FILE

What is there is written after each publication. Of a 1.5B model on a GPU one takes 6 to 7 s: 21 with the folder behind
and 7 folder first 165 s, and their start 30 s beside the engine's; of a 0.5B model 4 s and 120 s.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Report, execute, redis_server
from benchmarks.engine_overhead import Load
from benchmarks.gpu_model import SHAPES
from benchmarks.options import (
    Concurrency,
    Device,
    EngineArgs,
    EngineEnv,
    EnginePython,
    FixedTokens,
    JsonFile,
    PromptTokens,
    served,
)
from benchmarks.timeline import Timeline, row_of
from benchmarks.weights import load_model

#: Leg of the timeline -> key of its figure.
BLOCKED = {"behind": "blocked_s", "first": "blocked_folder_first_s"}
#: Legs of a round: three with the folder behind for one with it first.
ROUND = ("behind", "first", "behind", "behind")
LOST = ("tokens_lost", "tokens_lost_low", "tokens_lost_high", "tokens_lost_in_pause")


@dataclass(slots=True)
class Publishing:
    """The figures as they come, of one shape after the other; a shape may have several timelines."""

    load: Load
    transport: str
    json_file: Path | None
    timelines: list[Timeline] = field(default_factory=list)
    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {name: {} for name in (*BLOCKED.values(), "send_s", *LOST, "rate")}
    )

    def timeline(self, device: str, publications: int) -> Timeline:
        """So many publications with their folders behind, or a few more, and a third as many folder first."""
        rounds = -(-publications // ROUND.count("behind"))
        return Timeline(self.load, self.transport, device, None, rounds, legs=ROUND, told=self.take)

    def take(self, timeline: Timeline) -> None:
        """Take what a timeline has seen so far into the figures, and write them."""
        shape = timeline.shape
        if not any(one is timeline for one in self.timelines):
            self.timelines.append(timeline)
        seen = [event for one in self.timelines if one.shape == shape for event in one.events]
        for leg, key in BLOCKED.items():
            events = [event for event in seen if event.leg == leg and event.counts]
            if not events:
                continue
            row = row_of(leg, events, sum(event.leg == leg for event in seen))
            row |= {"shape": shape, "transport": self.transport, "folder_first": leg == "first"}
            row["blocked"] = [event.blocked_s for event in events]
            self.rows[shape, leg] = row
            self.keys[key][shape] = row["blocked_s"]
            if leg == "behind":
                self.keys["rate"][shape], self.keys["send_s"][shape] = row["rate"], row["send_s"]
                for name in LOST:
                    self.keys[name][shape] = row[name.removeprefix("tokens_")]
        self.report(timeline.seen).write(self.json_file)

    def report(self, seen: dict[str, str]) -> Report:
        """The legs so far."""
        return Report(
            title=f"publish() under load, {self.load.concurrency} answers of {self.load.new_tokens} tokens at once",
            columns={
                "shape": "shape",
                "transport": "transport",
                "folder_first": "folder first",
                "events": "publications",
                "failed": "by disk",
                "blocked_s": "blocked s, p50",
                "send_s": "send s",
                "pause_s": "pause s",
                "lost": "tokens lost",
                "lost_in_pause": "in the pause",
            },
            rows=list(self.rows.values()),
            keys=dict(self.keys),
            versions=seen,
            notes=["tokens lost: mean of a publication, its folder included, against the second before it."],
        )


def main(
    json_file: JsonFile = None,
    device: Device = "cpu",
    shapes: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(SHAPES)}.")] = "tiny",
    transport: Annotated[str, typer.Option(help="gloo, cuda_ipc, nccl; disk: nothing is sent.")] = "gloo",
    publications: Annotated[int, typer.Option(help="With the folder behind; a third as many with it first.")] = 20,
    budget_s: Annotated[float, typer.Option(help="It ends within so much of its start.")] = 540.0,
    concurrency: Concurrency = 64,
    prompt_tokens: PromptTokens = 32,
    new_tokens: FixedTokens = 64,
    engine_python: EnginePython = None,
    engine_arg: EngineArgs = None,
    engine_env: EngineEnv = None,
) -> None:
    """For how long publishing blocks a trainer, with the folder first and with the send first."""
    end_s = time.monotonic() + budget_s
    load = Load(0, concurrency, prompt_tokens, new_tokens)
    made = Publishing(load, transport, json_file)
    with redis_server() as url:
        for shape in shapes.split(","):
            timeline = made.timeline(device, publications)
            with served(SHAPES[shape], device, concurrency, engine_python, engine_arg, engine_env) as engine:
                timeline.measure(url, engine, load_model(engine.model, device), shape, end_s)
    made.report(timeline.seen).show()


if __name__ == "__main__":
    execute(main)
