"""Every generated token carries the version and the logprob it was drawn with (I7)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from tests.chaos.checks.evidence import Evidence, Law, Violation, proof

#: Largest difference of a logprob from that of the law: those of an engine are float32.
TOLERANCE = 1e-4
#: Versions behind the claimed one that may have drawn a token which is not proven to be of it.
LATER = 32


def find_wrong_tokens(evidence: Evidence) -> Iterator[Violation]:
    """Told tokens whose logprob is not that of the version they claim; the first of each sample.

    Of a sample that says so some carry an older version than drew them, for lack of proof: as many as it says may be
    of a newer one, and none of an older one.
    """
    law = evidence.law
    known = sorted({one.facts["version"] for one in evidence.history.of("load", "publish")})
    for one in evidence.history.of("told") if law is not None else ():
        sample, tokens, unproven = one.facts["sample"], one.facts["tokens"], one.facts.get("unproven", 0)
        for position, (version, logprob) in enumerate(zip(one.facts["versions"], one.facts["logprobs"], strict=True)):
            if version < 0 or _draws(law, version, tokens, position, logprob):  # not generated, or right
                continue
            newer = known[bisect_right(known, version) :][:LATER]
            if unproven and any(_draws(law, later, tokens, position, logprob) for later in newer):
                unproven -= 1
                continue
            expected = law(version, tokens, position)
            what = f"token {position} of {sample} has logprob {logprob:.5f}"
            yield Violation(f"{what}, and version {version} draws it with {expected:.5f}", proof(one))
            break


def _draws(law: Law, version: int, tokens: Sequence[int], position: int, logprob: float) -> bool:
    return abs(law(version, tokens, position) - logprob) <= TOLERANCE
