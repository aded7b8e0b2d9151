"""Rows of buried jobs: dead letters are read in the order in which they came, and stay where they are."""

from penstock.errors import ProtocolError
from penstock.history.row import WHOLE_JOB, Fate, SampleRow
from penstock.protocol.keys import Keys
from penstock.protocol.records.job import Job
from penstock.protocol.records.small_maps import count_shown, name_shown
from penstock.redis.commands import Client, Entry

#: Dead letters per look.
CHUNK = 32
#: Most characters of a prompt that is taken from a dead letter, and of its label.
MAX_TEXT = 1024 * 1024


class Burials:
    """Follows the stream of dead letters, from its beginning: what was written before is written again."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._after = "-"

    def take(self) -> list[SampleRow]:
        """Rows of the jobs that were buried since. Blocks for a round trip."""
        entries = self._client.xrange(self._keys.dead, self._after, "+", count=CHUNK)
        if entries:
            self._after = f"({entries[-1][0].decode()}"
        return [_row_of(entry) for entry in entries]


def _row_of(entry: Entry) -> SampleRow:
    _, fields = entry
    job = _job_of(fields.get(b"body", b""))
    return SampleRow(
        name_shown(fields.get(b"id", b"")),
        WHOLE_JOB,
        lane=job.lane if job else "",
        prompt=(job.prompt or "")[:MAX_TEXT] if job else "",
        label=job.label[:MAX_TEXT] if job else "",
        worker=name_shown(fields.get(b"worker", b"")),
        attempts=count_shown(fields.get(b"attempts")) or 0,
        crashes=count_shown(fields.get(b"crashes")) or 0,
        fate=Fate.BURIED,
        reason=name_shown(fields.get(b"reason", b""))[:200],
    )


def _job_of(body: bytes) -> Job | None:
    """None where that is what it was buried for: it cannot be read."""
    try:
        return Job.from_bytes(body)
    except ProtocolError:
        return None
