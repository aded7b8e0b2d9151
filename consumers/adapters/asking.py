"""Prompts that come one by one, answered in whatever order the workers finish: for servers in a trainer's own shape.

    submit ─> a job each ─> workers ─> poll: batches of one group, as they are cut ─> commit ─> answers

``Requests`` hands out a whole call at once; here a call may begin while others are under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.consumers.adapters.prompts import Request
from penstock.consumers.adapters.requests import Requests, groups_of
from penstock.consumers.adapters.rows import RowArrays
from penstock.consumers.batch.batch import Batch
from penstock.errors import ConfigError, PenstockError, ProtocolError, WaitTimeout


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request."""

    job: str
    #: k ascending; none where it failed.
    rows: list[RowArrays]
    #: Why there is none.
    error: PenstockError | None = None


class Asking(Requests):
    """``Requests`` whose prompts are under way side by side. Not thread-safe; take no ``answer`` beside ``submit``."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        #: Job -> what was asked, and the newest version then.
        self._live: dict[str, tuple[Request, int]] = {}

    @property
    def num_live(self) -> int:
        """Requests without an answer."""
        return len(self._live)

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Admit all; their jobs, in order. Blocks while Redis is full.

        Every answer will be of the newest version, or of a later one (T12).
        """
        version = self.version
        self._busy = True
        jobs = self.prompts.admit(requests, float("inf"))
        self._live |= {job: (request, version) for job, request in zip(jobs, requests, strict=True)}
        return jobs

    def submit_now(self, request: Request) -> str | None:
        """Admit one as ``submit`` does; its job, or None where Redis has no room, which ``poll`` makes."""
        version = self.version
        self._busy = True
        admitted = self.prompts.admit_now([request])
        if admitted is None:
            return None
        self._live[admitted[0]] = request, version
        return admitted[0]

    def poll(self, timeout_s: float) -> list[Answer]:
        """Answers that have come, none after ``timeout_s`` seconds; none at once where nothing was asked.

        What its workers gave up is among them, with the reason. Raises OwnershipLost.
        """
        if not self._live:
            return []
        subscriber = self.session.subscriber
        n = subscriber.cursor + 1
        subscriber.ask(subscriber.cursor + len(self._live))
        try:
            delivery = subscriber.read(n, timeout_s)
        except WaitTimeout:
            return self._buried()
        batch = self.session.reader.read(delivery)
        batch.trained = self.lane == "train"
        answers = [self._answer(batch, job) for job in dict.fromkeys(row.job for row in batch.all_rows)]
        self._done(batch)
        if not self._live:
            self._end()
        return [answer for answer in answers if answer is not None]

    def abort(self) -> list[str]:
        """Take back every request without an answer; their jobs. Blocks for a round trip each."""
        jobs = list(self._live)
        self._live.clear()
        self._clean(jobs)
        self._end()
        return jobs

    def _answer(self, batch: Batch, job: str) -> Answer | None:
        """None for a job that was taken back."""
        if job not in self._live:
            return None
        request, version = self._live.pop(job)
        try:
            groups = groups_of(batch, {job: request.n}, version)
            if self.lane == "train":
                self._check_temperatures(groups, {job: request})
        except (ConfigError, ProtocolError) as exc:
            return Answer(job, [], exc)
        return Answer(job, groups[job])

    def _buried(self) -> list[Answer]:
        gone = []
        for job in self.prompts.buried(list(self._live)):
            del self._live[job]
            try:
                self.prompts.check_buried([job])
            except ProtocolError as exc:
                gone.append(Answer(job, [], exc))
        return gone

    def _end(self) -> None:
        self._busy = False
        self.session.subscriber.waiting.end()
