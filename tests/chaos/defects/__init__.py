"""Defects to be found: patches on a copy of the source, each with what must find it, and within how many faults.

    python -m tests.chaos.defects              lists them
    python -m tests.chaos.defects NAME DIR     makes a copy of the source with the defect in it

Nothing in penstock knows of them. A patch that does not apply any more is written anew: what it takes away is still
what must never be taken away.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.places import ROOT

PATCHES = Path(__file__).parent
#: What a copy holds: the parts, and what names them as a distribution.
COPIED = ("console", "producer", "workers", "buffer", "consumers", "penstock", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Defect:
    """One promise taken away."""

    name: str
    what: str
    #: Properties of the checker, or what a run finds beside it (run.py): any of them finds it.
    found_by: tuple[str, ...]
    workload: str
    #: Kinds of faults under which it shows.
    kinds: tuple[str, ...]
    #: Faults within which it must be found.
    faults: int

    @property
    def patch(self) -> Path:
        return PATCHES / f"{self.name}.patch"


DEFECTS = {
    one.name: one
    for one in (
        Defect(
            "commit_without_fence", "a worker that lost its lease commits all the same",
            ("lost_right", "committed_twice"), "slow", ("stop:worker",), 10,
        ),
        Defect(
            "acknowledged_before_write", "a sample is committed before its payload is written",
            ("audit", "misreported"), "async", ("kill:worker",), 10,
        ),
        Defect(
            "cut_without_epoch", "a buffer that was deposed goes on and cuts batches",
            ("lost_right", "wrong_batch"), "async", ("stop:leader",), 10,
        ),
        Defect(
            "reclaim_keeps_token", "a job that is taken from a worker is leased again under the same token",
            ("lost_right",), "async", ("kill:worker",), 5,
        ),
        Defect(
            "version_reused", "a restored trainer publishes under numbers that name other weights",
            ("reused_version",), "async", ("kill:trainer",), 5,
        ),
        Defect(
            "folder_of_the_source", "a folder that comes late holds what the weights have become meanwhile",
            ("reused_version",), "sends", ("kill:worker",), 5,
        ),
        Defect(
            "forgotten_number_reused", "numbers are counted from what Redis knows alone, which forgot some",
            ("reused_version",), "sends", ("redis:aof_cut",), 10,
        ),
        Defect(
            "payload_deleted_early", "payloads go one batch before a checkpoint is past them",
            ("audit", "misreported"), "async", ("kill:trainer",), 5,
        ),
        Defect(
            "event_lost", "nobody tells of a group that completes after its job was tried again",
            ("over_admitted", "liveness"), "sync", ("kill:worker",), 10,
        ),
        Defect(
            "gate_counts_twice", "a publication frees the places of earlier batches once more",
            ("over_admitted",), "async", ("kill:worker",), 5,
        ),
        Defect(
            "retry_forgets_attempt", "a job that failed has all its tries again",
            ("forgotten_try", "liveness"), "failing", ("kill:worker",), 5,
        ),
        Defect(
            "rank_trains_another", "a rank behind the first trains the batch before, after a restart",
            ("wrong_batch", "trained_twice", "unexpected"), "ranks", ("kill:trainer",), 5,
        ),
        Defect(
            "boundary_off_by_one", "the first token of a version is said to be of the one before",
            ("wrong_tokens",), "slow", ("kill:worker",), 5,
        ),
        Defect(
            "prefix_takes_new_version", "tokens of a prefix are said to be of the version that goes on from it",
            ("wrong_tokens",), "slow", ("kill:worker",), 10,
        ),
        Defect(
            "drop_unbooked", "tokens of a group that is dropped stand in no account",
            ("audit",), "filters", ("kill:worker",), 5,
        ),
        Defect(
            "told_is_added", "what is told of a sample is added to what was told of it before",
            ("audit", "heard_twice"), "slow", ("kill:worker",), 5,
        ),
        Defect(
            "abandoned_kept", "groups with tokens of an abandoned version are trained",
            ("abandoned_tokens",), "reuse", ("kill:trainer",), 10,
        ),
        Defect(
            "train_version_behind", "a manifest names the version before the one that the trainer holds",
            ("wrong_train_version",), "async", ("kill:worker",), 5,
        ),
        Defect(
            "due_groups_given_up", "a batch is cut without the groups that are due, which are given up later",
            ("early_discard",), "wait", ("kill:worker",), 40,
        ),
        Defect(
            "cohort_not_awaited", "new weights are loaded before the cohort under the old ones has ended",
            ("wrong_cohort",), "one_step", ("kill:worker",), 30,
        ),
        Defect(
            "resume_keeps_budget", "a resumed sample has its whole budget again",
            ("over_budget",), "leases", ("kill:worker",), 5,
        ),
        Defect(
            "denominator_of_a_rank", "a rank divides its loss by the counts of its own samples",
            ("wrong_denominator",), "ranks", ("kill:worker",), 5,
        ),
        Defect(
            "advantage_of_a_rank", "a rank compares the rewards of its own samples alone",
            ("wrong_advantage",), "ranks", ("kill:worker",), 5,
        ),
        Defect(
            "split_by_process", "each rank deals out the shares of a batch by a seed of its own",
            ("wrong_share",), "ranks", ("kill:worker",), 5,
        ),
        Defect(
            "lanes_ignored", "a subscription takes groups of every lane",
            ("mixed_lanes",), "lanes", ("kill:worker",), 5,
        ),
        Defect(
            "lease_ignores_admission", "a job is leased for an engine without the version of its admission",
            ("early_start",), "late", ("kill:worker",), 5,
        ),
        Defect(
            "first_rank_commits", "the first rank that commits a batch moves the cursor",
            ("partial_commit",), "ranks", ("kill:worker",), 5,
        ),
        Defect(
            "recorded_before_rows", "a group is said to be in the history before its rows are written",
            ("unrecorded",), "history", ("kill:recorders",), 40,
        ),
    )
}  # fmt: skip


#: Rule of docs/internals/truth.md -> the defects that break it. Rules of the loss and of sampling alone need no run
#: to be broken.
RULES = {
    "T1": ("version_reused", "forgotten_number_reused", "abandoned_kept"),
    "T2": ("train_version_behind",),
    "T3": ("gate_counts_twice", "event_lost"),
    "T4": ("due_groups_given_up",),
    "T5": ("cohort_not_awaited",),
    "T6": ("boundary_off_by_one", "prefix_takes_new_version"),
    "T8": ("resume_keeps_budget",),
    "T10": ("denominator_of_a_rank",),
    "T11": ("advantage_of_a_rank",),
    "T12": ("lease_ignores_admission",),
    "T14": ("split_by_process", "rank_trains_another"),
    "T15": ("first_rank_commits",),
    "T16": ("folder_of_the_source",),
    "T18": ("lanes_ignored",),
}


def copy_source(into: Path, source: Path = ROOT) -> Path:
    """The tracked files of the parts of ``source`` in a new folder ``into``; returns it."""
    listed = subprocess.run(
        ["git", "-C", str(source), "ls-files", "-z", "--", *COPIED], capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target, follow_symlinks=False)
    return into


def seed(defect: Defect, into: Path, source: Path = ROOT) -> Path:
    """A copy of ``source`` in ``into`` with the defect in it; returns it. Raises CalledProcessError."""
    copy_source(into, source)
    # As a folder of its own, whatever repository it lies in.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(into.parent.absolute())}
    subprocess.run(["git", "apply", str(defect.patch)], cwd=into, env=alone, check=True, capture_output=True, text=True)
    return into


def main(arguments: list[str]) -> int:
    """The command line; its exit status."""
    if len(arguments) == 2:
        print(seed(DEFECTS[arguments[0]], Path(arguments[1])))
        return 0
    for one in DEFECTS.values():
        rule = next((f"{rule}, " for rule, names in RULES.items() if one.name in names), "")
        print(f"{one.name}: {rule}{one.what}; {' or '.join(one.found_by)} within {one.faults} faults of {one.workload}")
    return 0
