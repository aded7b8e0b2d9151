"""Rewards: how many of each kind are computed a second, what the verifier pool and the jail add, and what hangs cost.

- *kinds*: rewards by name, one after the other: quick ones as the worker's loop calls them, slow ones and ``code`` by
  one of the worker's processes, which has computed one before.
- *pool*: a reward that takes no time, asked of a warm pool over Redis, one at a time; all of it is the pool's overhead.
- *jail*: an answer's program against one test, in each jail that holds here and in none, one at a time and in turns, so
  that what drifts weighs on all alike. One that does not hold is told of with its reason.
- *own process*: CPU time of worker and reward process per reward that takes no time, with and without
  ``reward.own_process``, for samples of 50 and 3,072 tokens; 64 rewards are under way at once.
- *hangs*: checks at a steady rate by a pool of ``--slots``, in legs without hangs and legs in which one check in ten
  hangs until its limit, in turns (A B, B A); the time of the others, from the question to the answer. Ratios are of the
  two legs of a pair, with their 95 % interval, and ``null`` is the same of neighbours of one leg.

    python -m benchmarks.rewards --json FILE [--checks 100 --hang-checks 120 --pairs 4]
"""

import asyncio
import json
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.bench_run import make_config, part
from benchmarks.common import Report, execute, percentile, redis_server, versions
from benchmarks.paired import interval, null_ratios, pair_ratios, turns
from penstock.config import Config, RewardConfig
from penstock.config.hooks import REMOTE, REWARDS
from penstock.errors import ConfigError, RewardError
from penstock.protocol.waits import Waiting
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.records.sample import Sample
from penstock.redis.connect import connect
from penstock.workers.rewards.allowed import allowed_rewards
from penstock.workers.rewards.jail.detect import check_jail
from penstock.workers.rewards.kinds.kind import Question
from penstock.workers.rewards.kinds.registry import kind_of
from penstock.workers.rewards.pool.client import Checks
from penstock.workers.rewards.processes import CheckProcesses
from penstock.workers.rewards.score import Rewards

COLUMNS = {"what": "what", "per_s": "rewards/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
MODULE = "benchmarks.rewards"
NOTHING, HANGING = f"{MODULE}:nothing", f"{MODULE}:hanging"

_TEXT = "We see that x + y = 34, and hence \\boxed{34}.\nAnswer: 34"
_FOUR = {"choices": ["12", "34", "56", "78"], "correct_letter": "B"}
_TESTS = json.dumps({"inputs": ["30 4"], "outputs": ["34"]})
_PROGRAM = "print(sum(map(int, input().split())))"
#: Reward -> what it is asked; the rest is asked the same.
_QUESTIONS = {
    "deepscaler": Question(f"<think>hm</think>{_TEXT}", "34"),
    "gpqa": Question("The answer is (B).", "B", "B", _FOUR),
    "code": Question(_PROGRAM, _TESTS),
    "ifbench": Question("No comma here.", metadata={"instruction_id_list": ["punctuation:no_comma"]}),
}
_QUESTION = Question(_TEXT, "34", "34")
_LIMIT_S = 5.0
_JAILS = ("none", "bwrap", "filters")
#: As ``make bubblewrap`` unpacks it.
_BUBBLEWRAP = Path(".bubblewrap/usr/bin").absolute()
#: Tokens of samples whose rewards' CPU time is measured, and how many are computed at once.
_LENGTHS, _AT_ONCE = (50, 3072), 64
_CALM, _HUNG = LEGS = ("no hangs", "with hangs")
#: One check in so many hangs.
_EVERY = 10


def nothing(sample: Sample) -> float:
    """The reward that takes no time."""
    return 1.0


def hanging(sample: Sample) -> float:
    """One that hangs where the answer says so, else takes no time."""
    while sample.text == "hang":
        time.sleep(60)
    return 1.0


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
    checks: Annotated[int, typer.Option(help="Checks of each row that needs a process.")] = 100,
    quick: Annotated[int, typer.Option(help="Checks of each quick row.")] = 2000,
    hang_checks: Annotated[int, typer.Option(help="Checks of each leg, without hangs or with them.")] = 120,
    pairs: Annotated[int, typer.Option(help="Pairs of such legs.", min=1)] = 4,
    rate: Annotated[float, typer.Option(help="Of these checks, so many a second.")] = 4.0,
    slots: Annotated[int, typer.Option(help="Verifiers of the pool that is asked them.")] = 8,
) -> None:
    """Rewards a second, what pool and jail add, and the time of checks beside those that hang."""
    if shutil.which("bwrap") is None:
        os.environ["PATH"] = f"{_BUBBLEWRAP}{os.pathsep}{os.environ['PATH']}"
    report = Report("Rewards: kinds by name, the verifier pool, the jail, and hangs", COLUMNS, versions=versions())
    report.rows += asyncio.run(_kinds(quick, checks))
    jails, report.notes = asyncio.run(_jails(checks))
    report.rows += [_row(f"jail {kind}", times) for kind, times in jails.items()]
    cpu = asyncio.run(_cpu(quick))
    with TemporaryDirectory(prefix="penstock-bench-") as folder, redis_server() as url:
        pool = asyncio.run(_pool(url, Path(folder), checks))
        legs = asyncio.run(_hangs(url, Path(folder), hang_checks, rate, slots, pairs))
    report.rows += [pool, *(_row(leg, [one for name, times in legs if name == leg for one in times]) for leg in LEGS)]
    medians = {kind: percentile(times, 50) * 1000 for kind, times in jails.items()}
    report.keys = {
        "pool_overhead_p50_ms": pool["p50_ms"],
        "jail_adds_p50_ms": {kind: p50 - medians["none"] for kind, p50 in medians.items() if kind != "none"},
        "cpu_ms_per_reward": cpu,
        **_ratios(legs),
    }
    report.notes.append(
        f"Hangs: {pairs} pairs of legs in turns, {rate:g} checks/s, {slots} slots, one in {_EVERY} hangs until its "
        f"limit of {_LIMIT_S:g} s. Ratios are means of the pairs, with 95 % intervals."
    )
    report.finish(json_file)


async def _kinds(quick: int, checks: int) -> list[dict[str, Any]]:
    rows = []
    processes = CheckProcesses(1, cpu_s=5)
    for name in REWARDS:
        kind = kind_of(name)
        if name == REMOTE or kind is None:
            continue
        question = _QUESTIONS.get(name, _QUESTION)
        if kind.is_slow:
            times = await _timed(lambda name=name, question=question: processes.check(name, question), checks)  # type: ignore[misc]
        else:
            times = []
            for _ in range(quick):
                began = time.perf_counter()
                kind.judge(question)
                times.append(time.perf_counter() - began)
        rows.append(_row(name, times))
    await processes.close()
    return rows


async def _jails(checks: int) -> tuple[dict[str, list[float]], list[str]]:
    """Times in each jail that holds here, and in none, asked in turns; and why others do not hold."""
    asked, notes = {}, []
    for kind in _JAILS:
        config = RewardConfig.model_validate({"jail": {"kind": kind}, "code": {"python": _interpreter()}})
        try:
            check_jail(config)
        except ConfigError as exc:
            notes.append(f"No row of jail {kind}: {exc}")
            continue
        asked[kind] = CheckProcesses(1, cpu_s=5, config=config)
    times: dict[str, list[float]] = {kind: [] for kind in asked}
    for turn in range(checks + 1):
        for kind, processes in asked.items():
            began = time.perf_counter()
            await processes.check("code", _QUESTIONS["code"])
            if turn:
                times[kind].append(time.perf_counter() - began)
    for processes in asked.values():
        await processes.close()
    return times, notes


async def _cpu(count: int) -> dict[str, float]:
    """Milliseconds of CPU time per reward, of the worker and its reward process together."""
    found = {}
    for length in _LENGTHS:
        for own in (False, True):
            rewards = Rewards(RewardConfig(function=NOTHING, own_process=own))
            samples = [_drawn(index, length) for index in range(_AT_ONCE)]
            await asyncio.gather(*map(rewards.score, samples))
            began, rounds = _cpu_s(), max(1, count // _AT_ONCE)
            for _ in range(rounds):
                await asyncio.gather(*map(rewards.score, samples))
            used = _cpu_s() - began
            await rewards.close()
            found[f"{length} tokens, {'own process' if own else 'in the worker'}"] = 1000 * used / rounds / _AT_ONCE
    return found


def _cpu_s() -> float:
    """CPU seconds of this process and its descendants that run."""
    ticks, pids = 0, [str(os.getpid())]
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
        pids += [one for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]
    return ticks / os.sysconf("SC_CLK_TCK")


def _drawn(index: int, length: int) -> Sample:
    made = Sample(Job(f"bench/0/{index}", 1, prompt="x" * 200), 0, text="word " * length, prompt_length=20)
    made.append([17] * 20)
    made.append([at * 7919 % 150_000 for at in range(length)], version=3, logprobs=[-at / 7919 for at in range(length)])
    return made


def _interpreter() -> str | None:
    """One that any user may read, which ``filters`` needs; null (penstock's own) where there is no other."""
    return "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else None


async def _pool(url: str, folder: Path, checks: int) -> dict[str, Any]:
    async with _asking(_config(url, folder, "pool", NOTHING, 2)) as rewards:
        return _row("pool", await _timed(lambda: rewards.score(_sample("")), checks))


async def _hangs(
    url: str, folder: Path, checks: int, rate: float, slots: int, pairs: int
) -> list[tuple[str, list[float]]]:
    """Each leg in its turn, with the times of those of its checks that never hang: the same places in every leg."""
    legs = []
    async with _asking(_config(url, folder, "hangs", HANGING, slots)) as rewards:
        for leg in turns(LEGS, pairs):
            await _warm(rewards, slots)
            tasks = []
            for index in range(checks):
                text = "hang" if leg == _HUNG and index % _EVERY == 0 else ""
                tasks.append(asyncio.create_task(_took(rewards, text)))
                await asyncio.sleep(1 / rate)
            # A leg has ended when its last check has, those that hang included.
            times = await asyncio.gather(*tasks)
            legs.append((leg, [took for index, took in enumerate(times) if index % _EVERY]))
    return legs


def _ratios(legs: list[tuple[str, list[float]]]) -> dict[str, Any]:
    """With hangs over without, of the legs of a pair."""
    named, keys = [leg for leg, _ in legs], {"pairs": len(legs) // 2}
    for share in (50, 99):
        found = [percentile(times, share) for _, times in legs]
        ratio, null = interval(pair_ratios(found, named, _HUNG)), interval(null_ratios(found, named))
        values = {"ratio": ratio.ratio, "ratio_low": ratio.low, "ratio_high": ratio.high, "null": null.ratio}
        # JSON has no nan.
        keys |= {f"hangs_p{share}_{key}": None if math.isnan(one) else one for key, one in values.items()}  # type: ignore[misc]
    return keys


def _config(url: str, folder: Path, run: str, reward: str, slots: int) -> Config:
    pool = {"kind": "rq", "workers": slots}
    return make_config(url, folder, run=run, reward={"function": reward, "timeout_s": _LIMIT_S, "pool": pool})


@asynccontextmanager
async def _asking(config: Config) -> AsyncIterator[Rewards]:
    """Rewards of a worker whose pool is warm."""
    assert config.redis.url is not None
    keys, client = Keys(config.run), connect(config.redis.url)
    with part(config, "verifiers", "--name", "pool"):
        asked = Checks(config, keys, "bench.1", Waiting())
        rewards = Rewards(config.reward, asked, allowed_rewards(config))
        task = asyncio.create_task(asked.run())
        try:
            await _warm(rewards, config.reward.pool.workers)
            yield rewards
        finally:
            task.cancel()
            await rewards.close()
    client.close()


async def _warm(rewards: Rewards, slots: int) -> None:
    """Have every verifier of a pool check something."""
    await asyncio.gather(*(rewards.score(_sample("")) for _ in range(4 * slots)))


def _sample(text: str) -> Sample:
    made = Sample(Job("bench/0/0", 1), 0)
    made.text = text
    return made


async def _took(rewards: Rewards, text: str) -> float:
    began = time.perf_counter()
    try:
        await rewards.score(_sample(text))
    except RewardError:
        if text != "hang":
            raise
    return time.perf_counter() - began


async def _timed(ask: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Seconds of each of ``count`` questions, one after the other, the first left out."""
    await ask()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await ask()
        times.append(time.perf_counter() - began)
    return times


def _row(what: str, times: list[float]) -> dict[str, Any]:
    found = {"p50_ms": percentile(times, 50) * 1000, "p99_ms": percentile(times, 99) * 1000}
    return {"what": what, "per_s": len(times) / sum(times), **found}


if __name__ == "__main__":
    execute(main)
