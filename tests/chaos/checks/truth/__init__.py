"""Properties that follow from the rules T1 to T18 (docs/internals/truth.md), one module each, from a history alone."""

from collections.abc import Callable, Iterator

from tests.chaos.checks.evidence import Evidence, Violation
from tests.chaos.checks.truth.abandoned_tokens import find_abandoned_tokens
from tests.chaos.checks.truth.early_discard import find_early_discards
from tests.chaos.checks.truth.early_start import find_early_starts
from tests.chaos.checks.truth.mixed_lanes import find_mixed_lanes
from tests.chaos.checks.truth.over_budget import find_over_budget
from tests.chaos.checks.truth.partial_commit import find_partial_commits
from tests.chaos.checks.truth.train_version import find_wrong_train_versions
from tests.chaos.checks.truth.wrong_advantage import find_wrong_advantages
from tests.chaos.checks.truth.wrong_cohort import find_wrong_cohorts
from tests.chaos.checks.truth.wrong_denominator import find_wrong_denominators
from tests.chaos.checks.truth.wrong_share import find_wrong_shares

#: Property -> how it is looked for, in the order of the rules.
TRUTH: dict[str, Callable[[Evidence], Iterator[Violation]]] = {
    "abandoned_tokens": find_abandoned_tokens,
    "wrong_train_version": find_wrong_train_versions,
    "early_discard": find_early_discards,
    "wrong_cohort": find_wrong_cohorts,
    "over_budget": find_over_budget,
    "wrong_denominator": find_wrong_denominators,
    "wrong_advantage": find_wrong_advantages,
    "early_start": find_early_starts,
    "wrong_share": find_wrong_shares,
    "partial_commit": find_partial_commits,
    "mixed_lanes": find_mixed_lanes,
}
