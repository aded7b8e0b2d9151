"""One run of a workload under faults: everybody goes on after the last one, it comes to rest, and the checker judges.

    python -m tests.chaos.run --workload async --seed 7 --faults 30 [--kinds kill:*,net] [--source DIR]

Prints its result as one line of JSON; exits with 1 where a promise was not kept.
"""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.chaos import checker
from tests.chaos.cluster.audits import audit, differing, may_tell_lost
from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.collect import collect
from tests.chaos.cluster.rest import come_to_rest, goes_on
from tests.chaos.cluster.workloads import STEP_S, WORKLOADS
from tests.chaos.parts.trainer import BROKEN
from tests.chaos.places import ROOT
from tests.chaos.recording import history
from tests.chaos.recording.account import Account

#: Batches of a run without faults, and of any run before its first.
BATCHES = 12
#: Memory that a run is given where histories cost no disk.
FAST = Path("/dev/shm")
FAST_BYTES = 2 * 1024**3


@dataclass
class Result:
    """What came of a run."""

    workload: str
    seed: int
    #: Kind -> faults that were done, those of them that count, and seconds to the next batch after each.
    faults: dict[str, int] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    #: Kind -> why it was not done, the last time that it was not.
    missed: dict[str, str] = field(default_factory=dict)
    #: Property -> violations; ``liveness``, ``rest`` and ``audit`` among them.
    violations: dict[str, int] = field(default_factory=dict)
    #: What was found, in words.
    words: list[str] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    #: Ends of parts that no fault made: name and exit code.
    ends: list[tuple[str, int]] = field(default_factory=list)
    batches: int = 0
    wall_s: float = 0.0
    folder: str = ""

    def find(self, name: str, words: str) -> None:
        """Note a violation that is none of the checker's; '' is none."""
        if words:
            self.violations[name] = self.violations.get(name, 0) + 1
            self.words.append(f"{name}: {words}")


@dataclass(frozen=True)
class Asked:
    """What is to be run."""

    workload: str
    seed: int
    faults: int
    kinds: tuple[str, ...] = ()
    source: Path = ROOT
    redis_server: Path | None = None
    #: How long a step of a trainer takes.
    step_s: float = STEP_S
    #: No fault is begun when so many seconds are over since the first could be.
    seconds: float = float("inf")
    #: The log of a run before, whose faults are done again.
    replay: Path | None = None


def run(asked: Asked, folder: Path) -> Result:
    """Run it in ``folder``, where everything stays. Blocks for minutes."""
    began = time.monotonic()
    result = Result(asked.workload, asked.seed, folder=str(folder))
    cluster = Cluster(
        folder,
        WORKLOADS[asked.workload],
        source=asked.source,
        redis_server=asked.redis_server,
        seed=asked.seed,
        step_s=asked.step_s,
    )
    account = None
    with contextlib.ExitStack() as stack:
        try:
            account = _play(asked, cluster, result, stack)
        except TimeoutError as exc:
            result.find("liveness", str(exc))
        except redis.RedisError as exc:  # there is no account
            result.find("rest", f"Redis does not answer at the end: {exc}")
        result.batches = cluster.committed()
        result.ends = cluster.supervisor.unexpected()
    for name, code in result.ends:
        result.find("broken", f"{name} was handed what cannot be; its log says what" if code == BROKEN else "")
    if account is not None:
        _check(folder, account, result)
    result.wall_s = round(time.monotonic() - began, 1)
    return result


def _play(asked: Asked, cluster: Cluster, result: Result, stack: contextlib.ExitStack) -> Account:
    """From the start to the account. Raises TimeoutError."""
    if asked.faults or asked.replay:
        _under_faults(asked, cluster, result, stack)
    else:
        stack.enter_context(cluster)
        cluster.wait("the first batches", lambda: cluster.committed() >= BATCHES)
    result.find("liveness", goes_on(cluster))
    result.find("rest", come_to_rest(cluster))
    account = collect(cluster)
    assert cluster.watch is not None
    result.find("audit", cluster.watch.unbalanced)
    result.find("audit", differing(audit(cluster), lost_is_known=may_tell_lost(cluster)))
    return account


def _under_faults(asked: Asked, cluster: Cluster, result: Result, stack: contextlib.ExitStack) -> None:
    """Start the run on ground that can be broken, and break it."""
    from tests.chaos.nemesis.battleground import battleground
    from tests.chaos.nemesis.kinds import chosen
    from tests.chaos.nemesis.nemesis import Nemesis
    from tests.chaos.nemesis.schedule import Log, Replay, Schedule

    spared = cluster.workload.spared
    kinds = {name: kind for name, kind in chosen(asked.kinds).items() if name.partition(":")[0] not in spared}
    ground = stack.enter_context(battleground(cluster, kinds))
    cluster.wait("the first batches", lambda: cluster.committed() >= BATCHES // 4)
    acts = Replay(asked.replay) if asked.replay else Schedule(asked.seed, kinds)
    log = Log(cluster.folder / "nemesis.jsonl", {"workload": asked.workload, "seed": asked.seed})
    nemesis = Nemesis(ground, acts, kinds, log, recovery_s=cluster.patience_s)
    try:
        _note(nemesis.run(asked.faults, asked.seconds), result)
        for words in nemesis.found:
            result.find("fault", words)
    finally:
        nemesis.close()


def _note(faults: Sequence[Any], result: Result) -> None:
    recovery: dict[str, list[float]] = defaultdict(list)
    for one in faults:
        kind = one.strike.kind
        if one.strike.error:
            result.missed[kind] = one.strike.error[:200]
            continue
        result.faults[kind] = result.faults.get(kind, 0) + 1
        if one.counts:
            result.counted[kind] = result.counted.get(kind, 0) + 1
            if one.recovery_s is not None:
                recovery[kind].append(round(one.recovery_s, 3))
    result.recovery_s = dict(recovery)


def _check(folder: Path, account: Account, result: Result) -> None:
    recorded = history.read(folder / "history")
    verdict = checker.check(recorded, account, checker.law_of(recorded))
    for name in verdict.broken:
        result.violations[name] = len(verdict.violations[name])
        shown = verdict.violations[name][: checker.SHOWN]
        result.words += [f"{name}: {one.what} [{', '.join(one.proof) or 'the account'}]" for one in shown]
    result.unchecked = verdict.unchecked
    result.operations = verdict.operations


@contextlib.contextmanager
def working_folder(given: Path | None) -> Iterator[Path]:
    """The folder that was given, or one that is removed unless something was found in it."""
    if given is not None:
        yield given
        return
    fast = FAST.is_dir() and shutil.disk_usage(FAST).free > FAST_BYTES
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=FAST if fast else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description="One run under faults.")
    parser.add_argument("--workload", required=True, choices=sorted(WORKLOADS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument(
        "--kinds", default="", help="kinds of faults, or families, with commas; all where none is given"
    )
    parser.add_argument("--source", type=Path, default=ROOT, help="a checkout whose parts are run")
    parser.add_argument("--folder", type=Path, help="for everything; it stays")
    parser.add_argument("--redis-server", type=Path, help="the binary")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="how long a step of a trainer takes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no fault is begun after so many")
    parser.add_argument("--replay", type=Path, help="do the faults of this log again")
    options = parser.parse_args(arguments)
    kinds = tuple(filter(None, options.kinds.split(",")))
    asked = Asked(
        options.workload,
        options.seed,
        options.faults,
        kinds,
        options.source,
        options.redis_server,
        options.step_s,
        options.seconds,
        options.replay,
    )
    with working_folder(options.folder) as folder:
        result = run(asked, folder)
        if result.violations and options.folder is None:
            folder = keep(folder)
            result.folder = str(folder)
    print(json.dumps(asdict(result)))
    for line in result.words:
        print(line, file=sys.stderr)
    return 1 if result.violations else 0


def keep(folder: Path) -> Path:
    """The same folder under a name that nobody removes."""
    kept = folder.with_name(f"{folder.name}-kept")
    folder.rename(kept)
    return kept


if __name__ == "__main__":
    sys.exit(main())
