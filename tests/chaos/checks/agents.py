"""What an agent was answered in an episode that it ended is what the trainer gets."""

from collections.abc import Iterator
from itertools import groupby

from tests.chaos.checks.evidence import Evidence, Violation, proof
from tests.chaos.parts.law import ALPHABET


def find_other_answers(evidence: Evidence) -> Iterator[Violation]:
    """Answers of an episode whose end was acknowledged that are not among the turns that were trained."""
    if evidence.lost_any:
        return  # Redis forgot turns
    # The last one: a sample may start over after its end, when its version is abandoned.
    finished = {one.facts["sample"]: one for one in evidence.history.of("finished")}
    trained: dict[str, list[str]] = {}
    rewards: dict[str, float] = {}
    for one in evidence.history.of("told"):
        if one.facts["sample"] in finished:
            trained.setdefault(one.facts["sample"], []).extend(_turns(one.facts))
            rewards[one.facts["sample"]] = one.facts["reward"]
    for sample, turns in trained.items():
        end = finished[sample]
        # An agent does not see the stop that ends a turn.
        seen = {*turns, *(turn[:-1] for turn in turns)}
        if missing := [text for text in end.facts["answers"] if text not in seen]:
            yield Violation(f"{sample} was trained without the answer {missing[0]!r} of its agent", proof(end))
        elif rewards[sample] != end.facts["reward"]:
            yield Violation(f"{sample} was trained with another reward than its agent gave it", proof(end))


def _turns(facts: dict[str, list[int]]) -> list[str]:
    """Return the text of each generated turn; special tokens are not among it."""
    pairs = zip(facts["versions"], facts["tokens"], strict=True)
    runs = groupby(pairs, key=lambda pair: pair[0] >= 0)
    return ["".join(ALPHABET[token - 2] for _, token in run if token >= 2) for generated, run in runs if generated]
