"""Changes of a run that the command line and the page make."""

from collections.abc import Sequence

from penstock.console.cli.target import Target


def requeue(target: Target, jobs: Sequence[str]) -> list[str]:
    """Requeue dead-lettered jobs with all their attempts; return those that were. Blocks for a round trip each."""
    from penstock.protocol import scripts

    model = next(iter(target.models()), "policy")
    return [one for one in jobs if scripts.run(target.client, scripts.requeue(target.keys, one, model))]


def purge(target: Target, jobs: Sequence[str]) -> list[str]:
    """Purge dead-lettered jobs; return those that were. Blocks for a round trip each."""
    from penstock.protocol import scripts
    from penstock.records.job import JobState

    subs = target.subs()
    # A job that was requeued meanwhile is kept.
    calls = ((one, scripts.cancel(target.keys, one, subs, only=JobState.DEAD)) for one in jobs)
    return [one for one, call in calls if scripts.run(target.client, call) == JobState.DEAD]
