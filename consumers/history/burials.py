"""Rows of dead-lettered jobs: read the stream of dead letters in order, without removing them."""

from penstock.errors import ProtocolError
from penstock.history.row import WHOLE_JOB, Fate, SampleRow
from penstock.protocol.keys import Keys
from penstock.protocol.records.job import Job
from penstock.protocol.records.small_maps import count_shown, name_shown
from penstock.protocol.records.tries import tries_of
from penstock.redis.commands import Client, Entry

#: Dead letters per read.
CHUNK = 32
#: Most characters of a dead letter's prompt, and of its label.
MAX_TEXT = 1024 * 1024


class Burials:
    """Follows the stream of dead letters from its beginning: letters recorded before are written again."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._after = "-"

    def take(self) -> list[SampleRow]:
        """Return rows of the jobs that were dead-lettered since. Blocks for two round trips."""
        entries = self._client.xrange(self._keys.dead, self._after, "+", count=CHUNK)
        if entries:
            self._after = f"({entries[-1][0].decode()}"
        jobs = [name_shown(fields.get(b"id", b"")) for _, fields in entries]
        pipe = self._client.pipeline(transaction=False)
        for job in jobs:
            pipe.hget(self._keys.group(job), "tr")
        tries = pipe.execute(raise_on_error=False) if jobs else []
        return [_row_of(entry, job, _tries(raw)) for entry, job, raw in zip(entries, jobs, tries, strict=True)]


def _tries(raw: object) -> str:
    """Return '' if the group is gone, or the field is invalid: the dead letter is recorded all the same."""
    try:
        text = raw.decode() if isinstance(raw, bytes) else ""
        tries_of(text, "a group")
    except (ProtocolError, UnicodeDecodeError):
        return ""
    return text


def _row_of(entry: Entry, name: str, tries: str) -> SampleRow:
    _, fields = entry
    job = _job_of(fields.get(b"body", b""))
    return SampleRow(
        name,
        WHOLE_JOB,
        lane=job.lane if job else "",
        prompt=(job.prompt or "")[:MAX_TEXT] if job else "",
        label=job.label[:MAX_TEXT] if job else "",
        worker=name_shown(fields.get(b"worker", b"")),
        attempts=count_shown(fields.get(b"attempts")) or 0,
        crashes=count_shown(fields.get(b"crashes")) or 0,
        tries=tries,
        fate=Fate.BURIED,
        reason=name_shown(fields.get(b"reason", b""))[:200],
    )


def _job_of(body: bytes) -> Job | None:
    """Return None if the job cannot be read, which may be why it is dead."""
    try:
        return Job.from_bytes(body)
    except ProtocolError:
        return None
