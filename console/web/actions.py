"""Actions of the page on a run, if it was started with ``--actions``: the same as commands of the command line."""

from collections.abc import Sequence

from penstock.console.cli.target import Target
from penstock.errors import ConfigError
from penstock.names import LANES, Lane
from penstock.protocol import pauses, scripts
from penstock.protocol.records.job import JobState

#: Most jobs of one request.
MAX_JOBS = 1000
#: Recorded as the author of a pause.
BY = "a person at the page"


def requeue(target: Target, jobs: Sequence[str]) -> list[str]:
    """Requeue dead-lettered jobs with all their attempts; return those that were. Blocks for a round trip each."""
    model = next(iter(target.models()), "policy")
    return [one for one in _few(jobs) if scripts.run(target.client, scripts.requeue(target.keys, one, model))]


def purge(target: Target, jobs: Sequence[str]) -> list[str]:
    """Purge dead-lettered jobs; return those that were. Blocks for a round trip each."""
    subs = target.subs()
    calls = ((one, scripts.cancel(target.keys, one, subs, only=JobState.DEAD)) for one in _few(jobs))
    return [one for one, call in calls if scripts.run(target.client, call) == JobState.DEAD]


def close_lane(target: Target, lane: str, closed: bool) -> bool:
    """Pause or resume a lane; return False if it was so already. Blocks for a round trip."""
    if lane not in LANES:
        raise ConfigError(f"There is no lane {lane!r}: there are {', '.join(LANES)}.")
    if closed:
        return pauses.pause(target.client, target.keys, Lane(lane), BY)
    return pauses.resume(target.client, target.keys, Lane(lane))


def _few(jobs: Sequence[str]) -> Sequence[str]:
    if len(jobs) > MAX_JOBS:
        raise ConfigError(f"These are {len(jobs):,} jobs: name at most {MAX_JOBS:,} at once.")
    return jobs
