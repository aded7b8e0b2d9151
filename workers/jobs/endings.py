"""How the jobs of this worker came to their end, for the share that dies of what the user gave (user_failures.py)."""

from penstock.config import Config
from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.job import Job, JobFailure
from penstock.protocol.scripts import Call
from penstock.protocol.user_failures import digit_of

#: Most characters of a name, and of last words.
MAX_NAME, MAX_WORDS = 200, 1000


class Endings:
    """Noted one by one, sent together with the worker's presence."""

    def __init__(self, config: Config) -> None:
        self._reward = config.reward.function
        self._datasets = {one.name for one in (*config.data.train, *config.data.eval)}
        self._digits: dict[str, str] = {}
        self._words: dict[str, str] = {}

    def note(self, job: Job, reason: str = "", words: str = "") -> None:
        """One job ended: ``reason`` and last ``words`` of its burial, or '' where it is complete."""
        # What a program asks for by itself is refused to it, and is not a reason to stop the producer.
        if job.lane == Lane.SCORE or (reason == JobFailure.REFUSED and job.dataset not in self._datasets):
            return
        kind = f"dataset {job.dataset} with reward {(job.reward or self._reward)[:MAX_NAME]}"
        if job.environment:
            kind += f" and environment {job.environment[:MAX_NAME]}"
        digit = digit_of(reason)
        self._digits[kind] = self._digits.get(kind, "") + digit
        if digit != "0":
            self._words[kind] = words[-MAX_WORDS:]

    def take(self, keys: Keys, window: int) -> Call[int] | None:
        """The verb that records what was noted since the last call; None where nothing was."""
        if not self._digits:
            return None
        kinds = [(kind, digits, self._words.get(kind, "")) for kind, digits in self._digits.items()]
        self._digits, self._words = {}, {}
        return scripts.ended(keys, kinds, window)
