"""Rewards of penstock's own that take a moment: each is computed in the worker, with a verifier pool too.

math_verify, whose checks may hang, has processes of its own (math_verifier.py).
"""

from collections.abc import Callable

from penstock.protocol.records.sample import Sample


def exact_match(sample: Sample) -> float:
    """1 where the answer is the label, white space around both left out; else 0."""
    return float(sample.text.strip() == sample.job.label.strip())


#: By the name that a configuration gives. Whoever adds one adds its name to ``REWARDS`` in
#: penstock/config/code_names.py, which a test compares with this table; all else goes by the two.
BUILT_IN: dict[str, Callable[[Sample], float]] = {"exact_match": exact_match}
