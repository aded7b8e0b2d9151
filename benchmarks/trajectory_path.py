"""Samples per second from an engine's JSON answers to tensors at the reader, against a plain loop and a peer.

Two writer processes and one reader process; answers of 2,560 tokens with the prompt, as JSON bytes in SGLang's form,
taken one by one as if they had just ended. Legs, alternated over several rounds in one run on one machine; the median
counts, of ratios that of the rounds' own:

    bare            parse, XADD of one sample's packed arrays per entry, the answers to 64 waited for together;
                    XREADGROUP of up to 64, decode to torch tensors, XACK and XDEL
    transferqueue   parse, put, get_meta, get_data, clear_samples at batches of 8, 64 and 512 samples
                    (peer_transfer_queue.py)
    penstock        the worker's own reading of an answer and fenced commit by its lease, a sample at a time -> buffer
                    process -> Trainer batches of 64 groups, commits (penstock_path.py)
    penstock, history  beside a recorder, which keeps a row of each sample, tokens included. It leaves CPU to the
                    others (nice), and goes on when the clock has stopped: how many groups it had recorded is told
    penstock W x S  the same with W writers and S subscriptions that read everything each, of --writers and
                    --subscriptions; samples/s counts a sample once, however many read it

Redis is one server of ours for bare and penstock, AOF with fsync every second; TransferQueue keeps all in memory.
Every leg ends when the last sample is a torch tensor in the reader's memory, and refuses a lost or doubled sample.

    python -m benchmarks.trajectory_path --json FILE
"""

import json
import math
import os
import subprocess
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import redis
import typer

from benchmarks import penstock_path
from benchmarks.answers import Answers, tag_of
from benchmarks.common import Report, execute, format_value, median, redis_server, run_together, spread, versions
from benchmarks.paired import interval
from penstock.redis.connect import connect

if TYPE_CHECKING:
    import torch

PEER_PYTHON = Path(".bench/bin/python")
PEER_TIMEOUT_S = 1200.0
#: Batch in samples -> samples of a round.
PEER_SAMPLES = {8: 2048, 64: 8192, 512: 8192}

GROUP = 8
#: Writers of all legs but the leg several.
WRITERS = 2
#: Entries in flight of each bare writer: as many samples as a writer of penstock leases at once.
AT_ONCE = GROUP * penstock_path.LEASED
#: int32 id, float32 logprob, uint8 mask.
TOKEN_BYTES = 9
#: Name, batch, writers, subscriptions.
Leg = tuple[str, int, int, int]

STREAM, READERS = "bare:groups", "readers"

#: What the table shows for each leg: column -> heading.
COLUMNS = {
    "leg": "leg",
    "writers": "writers",
    "subscriptions": "subs",
    "batch": "samples at once",
    "samples": "samples",
    "samples_per_s": "samples/s",
    "mb_per_s": "MB/s",
    "spread": "spread",
    "ratio": "penstock over it",
    "ratio_transferqueue_best": "it over the peer's best",
}


def bare_writer(barrier: Barrier, *, url: str, samples: range, tokens: int) -> tuple[float, float]:
    """Parse and XADD these samples, ``AT_ONCE`` before their answers are waited for; when it began, and CPU seconds."""
    client = redis.Redis.from_url(url)
    client.ping()
    answers = Answers(tokens)
    barrier.wait()
    began_s, cpu_s = time.monotonic(), time.process_time()
    pipe = client.pipeline(transaction=False)
    for tag in samples:
        arrays = answers.parse(answers.body(tag))
        pipe.xadd(STREAM, {"data": b"".join(array.tobytes() for array in arrays.values())})
        if len(pipe) == AT_ONCE:
            pipe.execute()
    pipe.execute()
    return began_s, time.process_time() - cpu_s


def bare_reader(barrier: Barrier, *, url: str, samples: int, tokens: int) -> tuple[float, list[int], dict[str, float]]:
    """Read up to ``AT_ONCE`` entries at a time, decode, acknowledge, delete; when the last was there, which, CPU s."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    client = redis.Redis.from_url(url, socket_timeout=30)
    client.xgroup_create(STREAM, READERS, id="0", mkstream=True)
    seen: list[int] = []
    barrier.wait()
    reader_s, redis_s = time.process_time(), penstock_path.cpu_s_of_redis(client)
    while len(seen) < samples:
        answer: Any = client.xreadgroup(READERS, "me", {STREAM: ">"}, count=AT_ONCE, block=10_000)
        entries = answer[0][1]
        tensors = [decode(fields[b"data"], tokens) for _, fields in entries]
        seen.extend(int(tag_of(ids)) for ids, *_ in tensors)
        names = [name for name, _ in entries]
        with client.pipeline(transaction=False) as pipe:
            pipe.xack(STREAM, READERS, *names)
            pipe.xdel(STREAM, *names)
            pipe.execute()
    ended_s = time.monotonic()
    used = {"reader": time.process_time() - reader_s, "redis": penstock_path.cpu_s_of_redis(client) - redis_s}
    return ended_s, seen, used


def decode(data: bytes, tokens: int) -> "list[torch.Tensor]":
    """The four arrays as tensors over the bytes that came, without a copy."""
    import torch

    ids = torch.frombuffer(data, dtype=torch.int32, count=tokens)
    logprobs = torch.frombuffer(data, dtype=torch.float32, count=tokens, offset=4 * tokens)
    mask = torch.frombuffer(data, dtype=torch.uint8, count=tokens, offset=8 * tokens)
    # A tensor of numbers of 4 bytes may begin at any byte here.
    return [ids, logprobs, mask, torch.frombuffer(data, dtype=torch.int32, offset=9 * tokens).view(-1, 3)]


def check_all(seen: list[int], count: int, who: str) -> None:
    """Refuse the figure of a leg that lost or doubled a sample."""
    if sorted(seen) != list(range(count)):
        raise SystemExit(
            f"{who} gave back {len(set(seen))} of {count} samples, {len(seen)} in all; its figure is void."
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One round of one leg."""

    leg: str
    #: Samples put and taken at once.
    batch: int
    samples: int
    samples_per_s: float
    writers: int = 1
    #: Readers that read everything each.
    subscriptions: int = 1
    #: Process -> CPU time, in us per sample, where it was taken.
    cpu_us: dict[str, float] = field(default_factory=dict)
    #: Groups that a recorder had recorded when the clock stopped.
    recorded: int = 0


def bare(url: str, groups: int, tokens: int) -> list[Figure]:
    """One round of the bare loop."""
    penstock_path.empty(url)
    samples = groups * GROUP
    share = samples // WRITERS
    writers = {
        f"writer{index}": (
            bare_writer,
            {"url": url, "tokens": tokens, "samples": range(index * share, (index + 1) * share)},
        )
        for index in range(WRITERS)
    }
    done = run_together(writers | {"reader": (bare_reader, {"url": url, "samples": samples, "tokens": tokens})})
    began_s = min(done[name][0] for name in writers)
    ended_s, seen, used = done["reader"]
    check_all(seen, samples, "The bare loop")
    used["writer"] = sum(done[name][1] for name in writers)
    cpu_us = {name: 1e6 * value / samples for name, value in used.items()}
    return [Figure("bare", AT_ONCE, samples, samples / (ended_s - began_s), WRITERS, cpu_us=cpu_us)]


def transfer_queue(tokens: int, peers: dict[str, str]) -> list[Figure]:
    """One round of the peer at every batch; writes its versions to ``peers``."""
    if not PEER_PYTHON.exists():
        raise SystemExit(f"{PEER_PYTHON} is missing: 'make bench' sets it up, or leave the leg out with --legs.")
    script = Path(__file__).with_name("peer_transfer_queue.py")
    legs = [f"--leg={batch}:{samples}" for batch, samples in PEER_SAMPLES.items()]
    legs.append(f"--writers={WRITERS}")
    try:
        done = subprocess.run(
            [str(PEER_PYTHON), str(script), f"--tokens={tokens}", *legs],
            capture_output=True,
            text=True,
            timeout=PEER_TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise SystemExit(
            f"TransferQueue did not end within {PEER_TIMEOUT_S:g} s: run on a quieter machine, or leave the leg out "
            "with --legs."
        ) from exc
    if done.returncode:
        raise SystemExit(f"TransferQueue failed, its leg has no figure:\n{(done.stderr or done.stdout)[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    peers.update(result["versions"])
    return [
        Figure("transferqueue", row["batch"], row["samples"], row["samples_per_s"], WRITERS) for row in result["rows"]
    ]


def through_penstock(
    url: str,
    groups: int,
    tokens: int,
    writers: int = WRITERS,
    subscriptions: int = 1,
    *,
    history: bool = False,
) -> list[Figure]:
    """One round through penstock."""
    done = penstock_path.run(url, groups, tokens, writers=writers, subscriptions=subscriptions, history=history)
    samples = groups * GROUP
    for seen in done.seen:
        check_all(seen, samples, "penstock")
    leg = "penstock, history" if history else "penstock"
    rate = samples / done.seconds
    return [Figure(leg, 1, samples, rate, writers, subscriptions, done.cpu_us, done.recorded)]


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    groups: Annotated[
        int, typer.Option(help="Groups of 8 samples per round; many, so that start and end weigh little.")
    ] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens of a sample, with its prompt of 64.")] = 2560,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.")] = 5,
    more_rounds: Annotated[int, typer.Option(help="Rounds that have the leg several.")] = 2,
    legs: Annotated[str, typer.Option(help="Which legs to run.")] = "bare,penstock,history,several,transferqueue",
    writers: Annotated[str, typer.Option(help="Numbers of writers of the leg several.")] = "1,2,4",
    subscriptions: Annotated[str, typer.Option(help="Numbers of subscriptions of the leg several.")] = "1,2",
) -> None:
    """Samples per second from an engine's JSON answers to trainer tensors, beside a plain loop and TransferQueue."""
    peers: dict[str, str] = {}
    figures: list[Figure] = []
    chosen = legs.split(",")
    several = [(int(w), int(s)) for s in subscriptions.split(",") for w in writers.split(",")]
    with redis_server() as url:
        for turn in range(rounds):
            # Those whose ratios are told stand side by side: the machine's own speed drifts.
            if "bare" in chosen:
                figures += bare(url, groups, tokens)
            if "penstock" in chosen:
                figures += through_penstock(url, groups, tokens)
            if "transferqueue" in chosen:
                figures += transfer_queue(tokens, peers)
            if "history" in chosen:
                figures += through_penstock(url, groups, tokens, history=True)
            if "several" in chosen and turn < more_rounds:
                for many, read in several:
                    if (many, read) != (WRITERS, 1):
                        figures += through_penstock(url, groups, tokens, many, read)
        seen_versions = versions(connect(url), **peers)
    report(figures, tokens, seen_versions).finish(json_file)


def report(figures: list[Figure], tokens: int, seen_versions: dict[str, str]) -> Report:
    """Medians over the rounds; a ratio is the median of those of the rounds, whose legs lay beside each other."""
    rounds: dict[Leg, list[Figure]] = {}
    for figure in figures:
        rounds.setdefault((figure.leg, figure.batch, figure.writers, figure.subscriptions), []).append(figure)
    rates = {leg: [figure.samples_per_s for figure in of_leg] for leg, of_leg in rounds.items()}
    peers = {leg[1]: of_leg for leg, of_leg in rates.items() if leg[0] == "transferqueue"}
    best = [max(of_round) for of_round in zip(*(peers[batch] for batch in (8, 64) if batch in peers), strict=True)]
    plain = rates.get(("bare", AT_ONCE, WRITERS, 1), [])
    mine, kept = rates.get(("penstock", 1, WRITERS, 1), []), rates.get(("penstock, history", 1, WRITERS, 1), [])
    rows = [
        {
            "leg": leg[0],
            "batch": leg[1],
            "writers": leg[2],
            "subscriptions": leg[3],
            "samples": rounds[leg][0].samples,
            "samples_per_s": median(of_leg),
            "mb_per_s": median(of_leg) * tokens * TOKEN_BYTES / 1e6,
            "spread": spread(of_leg),
            "ratio": ratio_of_rounds(mine, of_leg),
            "ratio_transferqueue_best": ratio_of_rounds(of_leg, best) if leg[0].startswith("penstock") else None,
            "cpu_us": median_cpu(rounds[leg]),
            "rounds": of_leg,
        }
        for leg, of_leg in rates.items()
    ]
    notes = [
        f"CPU of {leg[0]} {leg[2]} x {leg[3]}, us per sample: {format_value(cpu_us)}; sum {sum(cpu_us.values()):.0f}."
        for leg, of_leg in rounds.items()
        if (cpu_us := median_cpu(of_leg))
    ]
    return Report(
        title=f"trajectory path: groups of {GROUP} x {tokens} tokens",
        columns=COLUMNS,
        rows=rows,
        keys={
            "samples_per_s": median(mine) if mine else None,
            **bounded_ratio("ratio_bare", mine, plain),
            "ratio_transferqueue_best": ratio_of_rounds(mine, best),
            **bounded_ratio("ratio_transferqueue_8", mine, peers.get(8, [])),
            **bounded_ratio("ratio_transferqueue_64", mine, peers.get(64, [])),
            "ratio_history": ratio_of_rounds(kept, mine),
        },
        versions=seen_versions,
        notes=[
            *notes,
            *recorded_of(figures),
            "TransferQueue's best is that of batches 8 and 64; 512 is shown beside them.",
        ],
    )


def recorded_of(figures: list[Figure]) -> list[str]:
    """How far the recorder had come when the clock stopped, in a sentence; none where there was no recorder."""
    kept = [figure for figure in figures if figure.leg == "penstock, history"]
    if not kept:
        return []
    done = median([figure.recorded for figure in kept])
    return [f"Of {kept[0].samples // GROUP:,} groups {done:,.0f} were recorded when the clock stopped."]


def ratio_of_rounds(rates: list[float], others: list[float]) -> float | None:
    """Median of the ratios of two legs, round by round; None where one of them did not run."""
    # The leg several has the first rounds only.
    return median([one / other for one, other in zip(rates, others, strict=False)]) if rates and others else None


def bounded_ratio(name: str, rates: list[float], others: list[float]) -> dict[str, float | None]:
    """Median of the ratios of the rounds, and the 95 % interval of their mean."""
    found = interval([one / other for one, other in zip(rates, others, strict=False)])
    bounds = {"low": found.low, "high": found.high}
    return {name: ratio_of_rounds(rates, others)} | {
        f"{name}_{end}": None if math.isnan(value) else value for end, value in bounds.items()
    }


def median_cpu(figures: list[Figure]) -> dict[str, float]:
    """Process -> median over the rounds of its CPU time, in us per sample."""
    return {process: median([figure.cpu_us[process] for figure in figures]) for process in figures[0].cpu_us}


if __name__ == "__main__":
    execute(main)
