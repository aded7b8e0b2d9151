"""Record the outcomes of this worker's jobs, for the share that fails because of user code (user_failures.py)."""

from penstock.config import Config
from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.job import Job, JobFailure
from penstock.protocol.user_failures import digit_of
from penstock.redis.control import AsyncControl

#: Longest name and longest error text, in characters.
MAX_NAME, MAX_WORDS = 200, 1000


class Endings:
    """Collect outcomes; sent with the worker's presence, and at once when user code makes a job a dead letter.

    So the producer learns of each failure before the worker leases another job.
    """

    def __init__(self, config: Config) -> None:
        self._reward = "+".join(config.reward.names)
        self._group = config.reward.group or ""
        self._datasets = {one.name for one in (*config.data.train, *config.data.eval)}
        self._digits: dict[str, str] = {}
        self._words: dict[str, str] = {}

    def note(self, job: Job, reason: str = "", words: str = "") -> None:
        """Record the end of one job: the ``reason`` and last ``words`` of its dead letter, or '' if it is complete."""
        # A job that another program submitted and that is refused must not stop the producer.
        if job.lane == Lane.SCORE or (reason == JobFailure.REFUSED and job.dataset not in self._datasets):
            return
        kind = f"dataset {job.dataset} with reward {(job.reward or self._reward)[:MAX_NAME]}"
        if self._group and job.lane == Lane.TRAIN:
            kind += f" and {self._group[:MAX_NAME]} of its group"
        if job.environment:
            kind += f" and environment {job.environment[:MAX_NAME]}"
        digit = digit_of(reason)
        self._digits[kind] = self._digits.get(kind, "") + digit
        if digit != "0":
            self._words[kind] = words[-MAX_WORDS:]

    async def tell(self, control: AsyncControl, keys: Keys, window: int) -> None:
        """Write the outcomes recorded since the last call. Blocks for a round trip, unless there are none."""
        if not self._digits:
            return
        kinds = [(kind, digits, self._words.get(kind, "")) for kind, digits in self._digits.items()]
        self._digits, self._words = {}, {}
        await control.call(scripts.ended(keys, kinds, window))
