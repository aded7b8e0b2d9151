"""Reads the histories of a run and the account at its end, and says what of the promises was not kept.

    python -m tests.chaos.checker FOLDER [--account FILE]

Exits with 1 where anything was found. Knows the records, not penstock: it imports nothing of it.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.checks import PROPERTIES
from tests.chaos.checks.evidence import Evidence, Law, Violation
from tests.chaos.checks.leftovers import FEWEST_LOOKS
from tests.chaos.parts.law import Oracle
from tests.chaos.recording import account, history

#: Property -> operations without which it would hold whatever happened.
NEEDED = {
    "lost": ("admit", "commit"),
    "committed_twice": ("commit",),
    "lost_right": ("lease", "commit"),
    "forgotten_try": ("lease", "fail"),
    "over_admitted": ("subscribe", "admit", "cut", "publish"),
    "trained_twice": ("train",),
    "wrong_batch": ("cut", "train"),
    "over_bound": ("commit", "cut", "publish"),
    "wrong_tokens": ("told",),
    "reused_version": ("publish",),
    "abandoned_tokens": ("commit", "cut", "publish"),
    "wrong_train_version": ("cut", "deliver", "publish", "restore"),
    "early_discard": ("cut",),
    "wrong_cohort": ("admit", "commit", "cut"),
    "over_budget": ("sampling", "commit"),
    "wrong_denominator": ("commit", "cut", "counts"),
    "wrong_advantage": ("cut", "told"),
    "wrong_share": ("cut", "train"),
    "mixed_lanes": ("admit", "cut"),
    "early_start": ("admit", "lease", "publish"),
    "partial_commit": ("commit_batch",),
    "dead_lease": ("lease",),
}

#: Violations of one property that are printed; the rest is counted.
SHOWN = 20


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    #: Property -> its violations, for every property that could be looked at.
    violations: dict[str, list[Violation]]
    #: Property -> why nothing can be said of it.
    unchecked: dict[str, str]
    #: Kind of operation -> how many were recorded.
    operations: dict[str, int]

    @property
    def broken(self) -> list[str]:
        """Properties that do not hold."""
        return [name for name, found in self.violations.items() if found]


def check(recorded: history.History, end: account.Account, law: Law | None = None) -> Verdict:
    """Hold a history and an account against all properties.

    Args:
        law: with which log-probability a version draws a token; None: logprobs are not looked at.
    """
    evidence = Evidence(recorded, end, law)
    unchecked = _unchecked(evidence)
    found = {name: list(look(evidence)) for name, look in PROPERTIES.items() if name not in unchecked}
    return Verdict(found, unchecked, recorded.counts())


def _unchecked(evidence: Evidence) -> dict[str, str]:
    why = {}
    for name, ops in NEEDED.items():
        if missing := [op for op in ops if not evidence.history.of(op)]:
            why[name] = f"no {' and no '.join(missing)} was recorded"
    if evidence.law is None:
        why["wrong_tokens"] = "no law says how tokens are drawn"
    if not evidence.account.drawn:
        why["heard_twice"] = "no engine counted what it drew"
    if not evidence.account.keys:
        why["orphan"] = "the account names no keys"
    if len(evidence.account.memory) * 2 < FEWEST_LOOKS * 3:
        why["growth"] = f"fewer than {FEWEST_LOOKS} looks at the memory in the last two thirds of the run"
    return why


def law_of(recorded: history.History) -> Law | None:
    """The law that the engines of a run drew by, from the weights that they say they loaded; None where none says."""
    loads = [one.facts for one in recorded.of("load") if "law" in one.facts]
    return Oracle({facts["version"]: bytes.fromhex(facts["law"]) for facts in loads}) if loads else None


def words(verdict: Verdict) -> str:
    """The verdict as it is printed."""
    counts = ", ".join(f"{count} {op}" for op, count in verdict.operations.items())
    lines = [f"operations: {counts or 'none'}"]
    for name, found in verdict.violations.items():
        lines.append(f"{name}: {len(found) or 'none'}")
        lines += [f"    {one.what}  [{', '.join(one.proof) or 'the account'}]" for one in found[:SHOWN]]
    return "\n".join([*lines, *(f"{name}: not checked ({why})" for name, why in verdict.unchecked.items())])


def main(arguments: list[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.checker", description="Check the history of a run.")
    parser.add_argument("folder", type=Path, help="where the histories lie (*.jsonl)")
    parser.add_argument("--account", type=Path, help="the account at the end; FOLDER/account.json where not given")
    options = parser.parse_args(arguments)
    recorded = history.read(options.folder)
    if not recorded.counts():
        parser.error(f"{options.folder} holds no history: nothing would be checked.")
    end = account.load(options.account or options.folder / "account.json")
    verdict = check(recorded, end, law_of(recorded))
    print(words(verdict))
    return 1 if verdict.broken else 0


if __name__ == "__main__":
    sys.exit(main())
