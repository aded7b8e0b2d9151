"""Rewards: how many of each kind are computed a second, what the verifier pool and the jail add, and what hangs cost.

- *kinds*: rewards by name, one after the other: quick ones as the worker's loop calls them, slow ones and ``code`` by
  one of the worker's processes, which has computed one before.
- *pool*: a reward that takes no time, asked of a warm pool over Redis, one at a time; all of it is the pool's overhead.
- *jail*: an answer's program against one test, in each jail that holds here and in none, one at a time.
- *hangs*: checks at a steady rate by a pool of ``--slots``, without hangs and with one check in ten that hangs until
  its limit; the time of the others, from the question to the answer.

    python -m benchmarks.rewards --json FILE [--checks 100 --hang-checks 120]
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.bench_run import make_config, part
from benchmarks.common import Report, execute, percentile, redis_server, versions
from penstock.config import Config, RewardConfig
from penstock.config.code_names import REMOTE, REWARDS
from penstock.errors import ConfigError, RewardError
from penstock.protocol.keys import Keys
from penstock.protocol.records.job import Job
from penstock.protocol.records.sample import Sample
from penstock.protocol.waits import Waiting
from penstock.redis.connect import connect
from workers.rewards.allowed import allowed_rewards
from workers.rewards.jail.asking import check_jail
from workers.rewards.kinds.question import Question
from workers.rewards.kinds.registry import kind_of
from workers.rewards.pool.client import Checks
from workers.rewards.processes import CheckProcesses
from workers.rewards.score import Rewards

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
    hang_checks: Annotated[int, typer.Option(help="Checks with and without hangs, each.")] = 120,
    rate: Annotated[float, typer.Option(help="Of these, so many a second.")] = 4.0,
    slots: Annotated[int, typer.Option(help="Verifiers of the pool that is asked them.")] = 8,
) -> None:
    """Rewards a second, what pool and jail add, and the time of checks beside those that hang."""
    report = Report("Rewards: kinds by name, the verifier pool, the jail, and hangs", COLUMNS, versions=versions())
    report.rows += asyncio.run(_kinds(quick, checks))
    jails = asyncio.run(_jails(checks))
    report.rows += jails
    with TemporaryDirectory(prefix="penstock-bench-") as folder, redis_server() as url:
        pool = asyncio.run(_pool(url, Path(folder), checks))
        calm, hung = asyncio.run(_hangs(url, Path(folder), hang_checks, rate, slots))
    report.rows += [pool, calm, hung]
    none = next(row["p50_ms"] for row in jails if row["what"] == "jail none")
    report.keys = {
        "pool_overhead_p50_ms": pool["p50_ms"],
        "jail_adds_p50_ms": {
            row["what"].split()[-1]: row["p50_ms"] - none for row in jails if row["what"] != "jail none"
        },
        "hangs_p50_ratio": hung["p50_ms"] / calm["p50_ms"],
        "hangs_p99_ratio": hung["p99_ms"] / calm["p99_ms"],
    }
    report.notes = [f"Hangs: {rate:g} checks/s, {slots} slots, one in ten hangs until its limit of {_LIMIT_S:g} s."]
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


async def _jails(checks: int) -> list[dict[str, Any]]:
    """Each jail that holds here, and none."""
    rows = []
    for kind in ("none", "bwrap", "namespaces", "filters"):
        config = RewardConfig.model_validate({"jail": {"kind": kind}})
        try:
            check_jail(config)
        except ConfigError:
            continue
        processes = CheckProcesses(1, cpu_s=5, config=config)
        question = replace(_QUESTIONS["code"])
        rows.append(_row(f"jail {kind}", await _timed(lambda: processes.check("code", question), checks)))  # noqa: B023
        await processes.close()
    return rows


async def _pool(url: str, folder: Path, checks: int) -> dict[str, Any]:
    async with _asking(_config(url, folder, "pool", NOTHING, 2)) as rewards:
        return _row("pool", await _timed(lambda: rewards.score(_sample("")), checks))


async def _hangs(url: str, folder: Path, checks: int, rate: float, slots: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Times of checks without hangs, and of those that do not hang beside those that do."""
    rows = []
    async with _asking(_config(url, folder, "hangs", HANGING, slots)) as rewards:
        for what, every in (("no hangs", 0), ("with hangs", 10)):
            texts = ["hang" if every and index % every == 0 else "" for index in range(checks)]
            tasks = []
            for text in texts:
                tasks.append(asyncio.create_task(_took(rewards, text)))
                await asyncio.sleep(1 / rate)
            times = await asyncio.gather(*tasks)
            rows.append(_row(what, [took for took, text in zip(times, texts, strict=True) if not text]))
    return rows[0], rows[1]


def _config(url: str, folder: Path, run: str, reward: str, slots: int) -> Config:
    pool = {"kind": "rq", "workers": slots}
    return make_config(url, folder, run=run, reward={"function": reward, "timeout_s": _LIMIT_S, "pool": pool})


@asynccontextmanager
async def _asking(config: Config) -> AsyncIterator[Rewards]:
    """Rewards of a worker whose pool is warm."""
    assert config.redis.url is not None
    keys, client = Keys(config.run), connect(config.redis.url)
    with part(config, "verifiers", "--name", "pool"):
        asked = Checks(config, keys, "bench.1", Waiting(client, keys, "bench"))
        rewards = Rewards(config.reward, asked, allowed_rewards(config))
        task = asyncio.create_task(asked.run())
        try:
            await asyncio.gather(*(rewards.score(_sample("")) for _ in range(4 * config.reward.pool.workers)))
            yield rewards
        finally:
            task.cancel()
            await rewards.close()
    client.close()


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
