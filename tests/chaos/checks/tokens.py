"""Every generated token carries the version and the logprob it was drawn with (I7)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation, proof

#: Largest difference of a logprob from that of the law: those of an engine are float32.
TOLERANCE = 1e-4


def find_wrong_tokens(evidence: Evidence) -> Iterator[Violation]:
    """Told tokens whose logprob is not that of the version they claim; the first of each sample."""
    law = evidence.law
    for one in evidence.history.of("told") if law is not None else ():
        sample = one.facts["sample"]
        tokens = one.facts["tokens"]
        for position, (version, logprob) in enumerate(zip(one.facts["versions"], one.facts["logprobs"], strict=True)):
            if version < 0:  # not generated
                continue
            expected = law(version, tokens, position)
            if abs(expected - logprob) > TOLERANCE:
                what = f"token {position} of {sample} has logprob {logprob:.5f}"
                yield Violation(f"{what}, and version {version} draws it with {expected:.5f}", proof(one))
                break
