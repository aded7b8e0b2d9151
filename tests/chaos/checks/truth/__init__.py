"""Properties that follow from the rules of docs/truth.md (T1 to T18), one module each; all of a history alone."""

from collections.abc import Callable, Iterator

from tests.chaos.checks.evidence import Evidence, Violation
from tests.chaos.checks.truth.early_start import find_early_starts
from tests.chaos.checks.truth.partial_commit import find_partial_commits

TRUTH: dict[str, Callable[[Evidence], Iterator[Violation]]] = {
    "early_start": find_early_starts,
    "partial_commit": find_partial_commits,
}
