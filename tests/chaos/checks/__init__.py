"""What must hold of every run, one property each: from the evidence to the violations of it."""

from collections.abc import Callable, Iterator

from tests.chaos.checks.admission import find_over_admitted
from tests.chaos.checks.agents import find_other_answers
from tests.chaos.checks.bound import find_over_bound
from tests.chaos.checks.committed_twice import find_committed_twice
from tests.chaos.checks.evidence import Evidence, Violation
from tests.chaos.checks.heard_twice import find_heard_twice
from tests.chaos.checks.history_rows import find_unrecorded
from tests.chaos.checks.leftovers import find_dead_leases, find_growth, find_orphans
from tests.chaos.checks.losses import find_lost, find_misreported
from tests.chaos.checks.lost_rights import find_lost_rights
from tests.chaos.checks.rewarded_twice import find_rewarded_twice
from tests.chaos.checks.tokens import find_wrong_tokens
from tests.chaos.checks.trained_twice import find_trained_twice
from tests.chaos.checks.tries import find_forgotten_tries
from tests.chaos.checks.truth import TRUTH
from tests.chaos.checks.turns import find_turns_generated_again
from tests.chaos.checks.unexpected import find_unexpected
from tests.chaos.checks.versions import find_reused_versions
from tests.chaos.checks.wrong_batch import find_wrong_batch

#: Property -> how it is looked for. Each takes time in proportion to the number of records.
PROPERTIES: dict[str, Callable[[Evidence], Iterator[Violation]]] = {
    "lost": find_lost,
    "misreported": find_misreported,
    "unexpected": find_unexpected,
    "committed_twice": find_committed_twice,
    "rewarded_twice": find_rewarded_twice,
    "lost_right": find_lost_rights,
    "forgotten_try": find_forgotten_tries,
    "over_admitted": find_over_admitted,
    "trained_twice": find_trained_twice,
    "wrong_batch": find_wrong_batch,
    "over_bound": find_over_bound,
    "wrong_tokens": find_wrong_tokens,
    "heard_twice": find_heard_twice,
    "turn_again": find_turns_generated_again,
    "other_answers": find_other_answers,
    "reused_version": find_reused_versions,
    **TRUTH,
    "unrecorded": find_unrecorded,
    "dead_lease": find_dead_leases,
    "orphan": find_orphans,
    "growth": find_growth,
}
