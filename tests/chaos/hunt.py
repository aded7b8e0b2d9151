"""Hunts for seeded defects: runs a copy of the source with each in it, and says which faults brought it to light.

    python -m tests.chaos.hunt [NAME ...] [--seeds 1,2,3,4,5] [--jobs 2] [--clean] [--results FILE]

A line of JSON for each run, appended to FILE as well, where what stands already is not run again. Exits with 1 where a
defect was not found within its faults, or, with ``--clean``, where anything was found in the source as it is.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from tests.chaos import checker
from tests.chaos.checks import PROPERTIES
from tests.chaos.checks.evidence import Evidence, Violation
from tests.chaos.checks.truth import TRUTH
from tests.chaos.defects import DEFECTS, Defect, seed
from tests.chaos.places import ROOT
from tests.chaos.recording import account
from tests.chaos.recording.history import History, read_file

#: Longest run.
RUN_S = 900.0
#: Between two looks at whether it was found already.
LOOK_S = 4.0
#: Properties that a history breaks by itself, wherever it ends.
WITHOUT_ACCOUNT = TRUTH.keys() | {
    "lost_right", "forgotten_try", "over_admitted", "trained_twice", "wrong_batch", "wrong_tokens", "reused_version",
}  # fmt: skip
#: Lines of what a run that failed says that are kept.
KEPT_LINES = 12


@dataclass(frozen=True)
class Hunt:
    """What came of one run."""

    #: Defect; 'clean' for none.
    defect: str
    workload: str
    kinds: tuple[str, ...]
    seed: int
    #: Whether it was found, and within how many faults; of a clean run: whether anything was.
    found: bool
    #: Properties that were broken.
    by: tuple[str, ...]
    #: Faults that were done before the first proof was whole.
    faults: int
    wall_s: float
    words: tuple[str, ...] = ()


def hunt(defect: Defect, number: int, *, clean: bool = False, faults: int = 0) -> Hunt:
    """One run under the faults of a defect, on a copy of the source with it, or as it is. Blocks for minutes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hunt-", dir=_fast()) as name:
        folder = Path(name)
        source = ROOT if clean else seed(defect, folder / "source")
        wanted = frozenset() if clean else frozenset(defect.found_by)
        broken, words = _run(defect, number, faults or defect.faults, source, folder / "run", wanted)
        found = set(broken) if clean else set(broken) & wanted
        taken = _faults_until(folder / "run", found)
    return Hunt(
        "clean" if clean else defect.name, defect.workload, defect.kinds, number, bool(found), tuple(sorted(broken)),
        taken, round(time.monotonic() - began, 1), words[:2] if found and not clean else words,
    )  # fmt: skip


def _fast() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _run(
    defect: Defect, number: int, faults: int, source: Path, folder: Path, wanted: frozenset[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Properties that were broken, and what was said of it. A run that does not come to its end is not alive.

    It is ended as soon as one of ``wanted`` is broken.
    """
    command = [
        sys.executable, "-m", "tests.chaos.run", "--workload", defect.workload, "--seed", str(number),
        "--faults", str(faults), "--kinds", ",".join(defect.kinds), "--source", str(source), "--folder", str(folder),
    ]  # fmt: skip
    # In a group of its own, so that nothing of it is left where it does not end.
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + RUN_S
    while time.monotonic() < deadline:
        try:
            out, err = process.communicate(timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            if found := _broken_by_now(folder, wanted & WITHOUT_ACCOUNT):
                _end(process)
                return tuple(found), tuple(one.what for all_ in found.values() for one in all_)[:KEPT_LINES]
            continue
        if not out:
            return ("liveness",), tuple(err.splitlines()[-KEPT_LINES:])
        return tuple(json.loads(out)["violations"]), tuple(err.splitlines()[:KEPT_LINES])
    _end(process)
    return ("liveness",), (f"it did not end in {RUN_S:g} s",)


def _end(process: "subprocess.Popen[str]") -> None:
    """As by Ctrl-C, so that it ends its parts; by force where it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _broken_by_now(folder: Path, wanted: frozenset[str]) -> dict[str, list[Violation]]:
    """What the history of a run that goes on breaks already, of properties that need no account."""
    if not wanted or not (folder / "history").exists():
        return {}
    evidence = Evidence(recorded := _so_far(folder / "history"), account.Account(), checker.law_of(recorded))
    found = {name: list(PROPERTIES[name](evidence)) for name in wanted}
    return {name: violations for name, violations in found.items() if violations}


def _so_far(folder: Path) -> History:
    """The history up to now: what is written while it is read is left away, or one file would know more than others."""
    now = time.monotonic_ns()
    operations = [one for path in sorted(folder.glob("*.jsonl")) for one in read_file(path) if one.began <= now]
    for one in operations:
        if one.ended is not None and one.ended > now:
            one.ended, one.outcome, one.answer = None, "unknown", {}
    return History(operations)


def _faults_until(folder: Path, wanted: set[str]) -> int:
    """Faults that had begun when the first violation of these properties was proven; all where nothing tells when."""
    log = folder / "nemesis.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    acts = [json.loads(line)["mono"] for line in lines if '"act"' in line]
    at = min(_times(folder / "history", wanted), default=None)
    return len(acts) if at is None else sum(act <= at for act in acts)


def _times(folder: Path, wanted: set[str]) -> Iterator[int]:
    """When each violation was proven that operations prove."""
    if not folder.exists():
        return
    recorded, file = _so_far(folder), folder / "account.json"
    end = account.load(file) if file.exists() else account.Account()
    evidence = Evidence(recorded, end, checker.law_of(recorded))
    ended = {one.where: one.ended or one.began for op in recorded.counts() for one in recorded.of(op)}
    for name in wanted & (set(PROPERTIES) if file.exists() else WITHOUT_ACCOUNT):
        yield from (max(ended[where] for where in one.proof) for one in PROPERTIES[name](evidence) if one.proof)


def _asked(options: argparse.Namespace) -> list[tuple[Defect, int]]:
    """Runs that are still to be made."""
    made = set()
    if options.results and options.results.exists():
        for line in options.results.read_bytes().splitlines():
            one = orjson.loads(line)
            made.add((one["defect"], one["workload"], tuple(one["kinds"]), one["seed"]))
    chosen = [DEFECTS[name] for name in options.names or DEFECTS]
    if options.clean:  # each setting once
        chosen = list({(one.workload, one.kinds): one for one in chosen}.values())
    runs = [(one, number) for number in options.seeds for one in chosen]
    return [
        (one, number)
        for one, number in runs
        if ("clean" if options.clean else one.name, one.workload, one.kinds, number) not in made
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.hunt", description="Hunts for seeded defects.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all where none is given: {', '.join(DEFECTS)}")
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[1])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--faults", type=int, default=0, help="instead of those of the table")
    parser.add_argument("--clean", action="store_true", help="the source as it is: nothing may be found")
    parser.add_argument("--results", type=Path, help="file that each run's line is appended to")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - DEFECTS.keys():
        parser.error(f"there is no defect {', '.join(sorted(unknown))}")

    def one(run: tuple[Defect, int]) -> bool:
        made = hunt(*run, clean=options.clean, faults=options.faults)
        line = orjson.dumps(asdict(made))
        if options.results:
            with options.results.open("ab") as file:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        print(line.decode(), flush=True)
        return made.found != options.clean

    with ThreadPoolExecutor(options.jobs) as pool:
        return 0 if all(list(pool.map(one, _asked(options)))) else 1


if __name__ == "__main__":
    sys.exit(main())
