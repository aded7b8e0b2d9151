"""What workers told of and what engines drew agree, by the count that engines keep themselves (I10)."""

from collections.abc import Iterator

from tests.chaos.checks.evidence import Evidence, Violation

#: Most tokens that a request draws: the context of the workloads.
CONTEXT = 512


def find_heard_twice(evidence: Evidence) -> Iterator[Violation]:
    """More tokens told of than engines drew; or fewer, by more than the lost requests that the run counts explain."""
    account = evidence.account
    heard = sum(tokens for name, tokens in account.tokens.items() if name.endswith(":heard"))
    if heard > account.drawn:
        yield Violation(f"{heard} tokens were told of, and engines drew {account.drawn}")
    if account.drawn > heard + account.unheard * CONTEXT and not account.forgotten:
        lost = f"{account.unheard} requests were lost"
        yield Violation(f"engines drew {account.drawn} tokens, {heard} were told of, and {lost} on the way")
