"""The advantage of a sample comes from the rewards of its whole group, before the split over ranks (T11)."""

import math
from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.recording.history import Operation

#: Added to the deviation of a group's rewards.
EPSILON = 1e-6
#: Largest difference of an advantage, which is a float32, relative to 1 or to its size.
TOLERANCE = 1e-3


def find_wrong_advantages(evidence: Evidence) -> Iterator[Violation]:
    """Yield samples that a rank was handed with another reward, or another advantage, than their group gives them."""
    made: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for told in evidence.history.of("told"):
        if told.facts.get("advantage") is None:
            continue
        cut = evidence.cut_of(told)
        if cut is None:
            continue
        digest = told.facts["digest"]
        if digest not in made:
            made[digest] = _advantages(cut)
        job, _, k = told.facts["sample"].rpartition("/")
        if (job, int(k)) not in made[digest]:
            continue
        wanted = made[digest][job, int(k)]
        for name, found, right in zip(
            ("reward", "advantage"), (told.facts["reward"], told.facts["advantage"]), wanted, strict=True
        ):
            if abs(found - right) > TOLERANCE * max(1.0, abs(right)):
                what = f"sample {job}/{k} has {name} {found:.5f} in batch {told.facts['n']} of {told.facts['sub']}"
                yield Violation(f"{what}, and its group gives it {right:.5f}", proof(cut, told))


def _advantages(cut: Operation) -> dict[tuple[str, int], tuple[float, float]]:
    """Return reward and advantage (Shao et al. 2024, arXiv 2402.03300) of each sample of a batch."""
    groups: dict[str, dict[int, float]] = {}
    found = {}
    for job, k, _, about in cut.facts["scored"]:
        found[job, k] = about["reward"], 0.0
        if not about["masked"]:
            groups.setdefault(job, {})[k] = about["reward"]  # once, however many parts it has
    for job, members in groups.items():
        mean = sum(members.values()) / len(members)
        squares = sum((reward - mean) ** 2 for reward in members.values())
        deviation = math.sqrt(squares / max(1, len(members) - 1))
        found |= {(job, k): (reward, (reward - mean) / (deviation + EPSILON)) for k, reward in members.items()}
    return found
