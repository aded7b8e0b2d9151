"""Record the fates of samples before the leader deletes their groups.

    unrecorded ──> groups, records ──> payloads ──> rows ──> files of this epoch, synced ──> recorded ──> (leader) sweep
    dead ────────> rows of dead letters ─────────────┘

| loop step | waits for | unblocked by |
|---|---|---|
| record | another recorder's lease | release or expiry |
| payloads | an unreachable payload server | a response, or its declaration as lost |
| write | disk space | free space |
| hook | ``hooks.all_samples`` | return or timeout |

Only the deletion of groups waits for the recorder, and only up to ``history.backlog``. A kill at any time loses no row:
groups not acknowledged as recorded are written again under the same key.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from penstock.config import Config
from penstock.consumers.batch.fetch import PayloadReader, row_of_meta
from penstock.consumers.history.all_samples import AllSamples
from penstock.consumers.history.retired import Retired, read_retired, read_trained
from penstock.consumers.history.rows import Bytes, Trained, row_of_job, rows_of
from penstock.consumers.history.texts import Texts
from penstock.consumers.metrics.recorder import RecorderTally
from penstock.errors import ConfigError, DiskFull, ProtocolError, QueueUnavailable, RecordingLost
from penstock.history.part import newest_epoch
from penstock.history.row import WHOLE_JOB, Fate, SampleRow, Use
from penstock.history.writer import HistoryWriter
from penstock.metrics.server import serve
from penstock.names import new_token
from penstock.protocol import scripts
from penstock.protocol.presence import Attendance
from penstock.protocol.scripts import Recording, ensure_lanes
from penstock.protocol.waits import PublishedWaiting
from penstock.records.codec import count_shown, name_shown
from penstock.records.job import Job, tries_of
from penstock.records.keys import Keys
from penstock.records.sample_meta import SampleMeta
from penstock.records.worker_causes import LeaseHeld
from penstock.redis.commands import Client, Entry, is_full
from penstock.redis.control import Control
from penstock.system.disk import until_room
from penstock.system.run_folder import RunFolder

log = logging.getLogger(__name__)

#: Dead letters per read.
CHUNK = 32
#: Most characters of a dead letter's prompt and of its label.
MAX_TEXT = 1024 * 1024


class DeadLetters:
    """Read the stream of dead letters from its start; letters recorded earlier are written again."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._after = "-"

    def take(self) -> list[SampleRow]:
        """Return rows of new dead letters. Blocks for two round trips."""
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
    """Decode the attempts of a group; return '' if they are gone or invalid, so that the letter is still recorded."""
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
    """Decode a job; return None if it is unreadable, which may be the reason of the dead letter."""
    try:
        return Job.from_bytes(body)
    except ProtocolError:
        return None


#: Share of a core to use on contended CPUs while the backlog is at most ``FULL``.
SHARE, FULL = 0.05, 0.75
#: Share of runnable time spent waiting for a core above which CPUs count as contended.
CONTENDED = 0.1
#: Longest rest, in seconds.
MAX_REST_S = 5.0

#: Returns CPU seconds of this thread, and seconds in which it was runnable without a core.
Ran = Callable[[], tuple[float, float]]


def ran() -> tuple[float, float]:
    """Return CPU and waiting seconds of the calling thread; waiting times need Linux."""
    try:
        cpu_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return time.process_time(), 0.0
    return int(cpu_ns) / 1e9, int(waited_ns) / 1e9


class Pace:
    """Compute pauses after work, so that bursts of groups are recorded afterwards.

    Args:
        ran: returns CPU and waiting seconds of this thread.
    """

    def __init__(self, ran: Ran = ran) -> None:
        self._ran = ran
        self._last = ran()

    def rest_s(self) -> float:
        """Return the seconds to rest for the work since the last call, 0 to continue. Returns at once."""
        before, self._last = self._last, self._ran()
        cpu_s, waited_s = (now - then for now, then in zip(self._last, before, strict=True))
        if waited_s <= CONTENDED * (cpu_s + waited_s):
            return 0.0
        return max(0.0, min(MAX_REST_S, cpu_s * (1 / SHARE - 1)))


#: Duration of the recorder's lease in seconds; it is renewed three times as often.
LEASE_S = 15.0
#: Seconds between reads without a backlog; a read with a full chunk is followed by another at once.
POLL_S = 0.5
#: Groups per read, and per read after a rest; most samples and payload bytes of one commit of the files.
GROUPS, FEW_GROUPS, SAMPLES, PIECE_BYTES = 64, 8, 1024, 32 * 1024 * 1024
#: Largest payload in bytes that is recorded with answer and tokens.
MAX_KEPT_BYTES = 64 * 1024 * 1024
#: Longest time, in seconds, for a stopping recorder to finish its backlog.
DRAIN_S = 8.0

_Piece = list[tuple[Retired, SampleMeta]]


class Recorder:
    """Run one recorder process."""

    def __init__(self, config: Config) -> None:
        if config.redis.url is None:
            raise ConfigError("The recorder needs redis.url: the address of the run's Redis.")
        self._config = config
        self._keys = Keys(config.run)
        self._folder = RunFolder(config.run_dir).history
        self._stopping = threading.Event()
        #: Time (monotonic) at which a stopping recorder abandons its backlog; None before a stop.
        self._end_at: float | None = None
        self._control = Control(config.redis.url, stopped=self._is_over)
        self._token = new_token()
        self._recording: Recording | None = None
        self._renew_at = 0.0
        self._waiting = PublishedWaiting(self._control.client, self._keys, "recorder")
        self._tally = RecorderTally()
        self.metrics = serve(config, "recorder", "", self._tally)
        url = self.metrics.url if self.metrics else ""
        self._attendance = Attendance(self._control.client, self._keys, "recorder", metrics=url)
        self._payloads = PayloadReader(config.redis, self._keys, self._waiting, stopped=self._tick)
        self._texts = Texts(config.model.path)
        self._dead_letters = DeadLetters(self._control.client, self._keys)
        self._all_samples = AllSamples(config)
        self._pace = Pace()
        #: Number of groups of the next read.
        self._groups = FEW_GROUPS
        self._writer: HistoryWriter | None = None

    def stop(self) -> None:
        """Make ``run`` return once the backlog is recorded, or after ``DRAIN_S``. Safe in a signal handler."""
        if self._end_at is None:
            self._end_at = time.monotonic() + DRAIN_S
        self._stopping.set()

    def run(self) -> None:
        """Record while holding the lease. Blocks until ``stop``. Raises HistoryError, and OSError of the files."""
        try:
            self._texts.load()
            self._control.do(lambda client: ensure_lanes(client, self._keys))
            while not self._stopping.is_set():
                self._stand_by()
            self._attendance.end()
        except (QueueUnavailable, DiskFull) as exc:
            if not self._stopping.is_set():
                raise
            log.warning("stopped before recording the backlog: %s", exc)
        finally:
            self._payloads.close()
            self._control.close()
            if self.metrics is not None:
                self.metrics.close()

    def _stand_by(self) -> None:
        """Wait for the lease, and record while holding it."""
        self._attendance.confirm()
        epoch = self._elect()
        if not epoch:
            self._waiting.blocked_on(LeaseHeld("recorder"))
            self._stopping.wait(min(1.0, LEASE_S / 3))
            return
        self._waiting.end()
        try:
            self._record(Recording(epoch, self._token))
        except RecordingLost as exc:
            log.warning("%s", exc)
        finally:
            self._recording = None

    def _elect(self) -> int:
        history = self._config.history
        return self._control.call(
            scripts.record(
                self._keys,
                self._token,
                lease_ms=int(1000 * LEASE_S),
                backlog=history.backlog,
                patience_ms=int(1000 * history.patience_s),
                # A recorder that renews its lease continues its own files.
                newest=newest_epoch(self._folder) if self._recording is None else 0,
            )
        )

    def _record(self, recording: Recording) -> None:
        """Record until the lease is lost, or until ``stop`` was called and the backlog is empty."""
        self._recording = recording
        self._renew_at = time.monotonic() + LEASE_S / 3
        self._writer = HistoryWriter(
            self._folder, recording.epoch, max_bytes=self._config.history.max_bytes, look_up=self._texts.pieces
        )
        # The files are new, so dead letters from earlier files are written again.
        self._dead_letters = DeadLetters(self._control.client, self._keys)
        log.info("recording in epoch %d to %s", recording.epoch, self._folder)
        try:
            while not self._is_over():
                self._renew()
                more, rest_s = self._turn(recording), self._rest_s()
                if not more and self._stopping.is_set():
                    break
                self._groups = FEW_GROUPS if rest_s and not self._stopping.is_set() else GROUPS
                self._rest(max(rest_s, 0.0 if more else POLL_S))
        finally:
            self._writer.close()
        self._control.call(scripts.stop_recording(self._keys, recording))

    def _rest_s(self) -> float:
        """Return the seconds to rest after this turn, 0 under pressure. Blocks for round trips before a rest."""
        rest_s = self._pace.rest_s()
        return 0.0 if rest_s and self._is_pressed() else rest_s

    def _is_pressed(self) -> bool:
        """Return whether the backlog must shrink because it or Redis is filling up. Blocks for round trips."""
        waiting = self._control.do(lambda client: client.zcard(self._keys.unrecorded))
        if waiting >= max(1.0, FULL * self._config.history.backlog):
            return True
        return waiting > 0 and is_full(self._control.do(lambda client: client.info("memory")))

    def _rest(self, seconds: float) -> None:
        """Sleep until the time is up, the backlog must shrink, or ``stop`` is called."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stopping.wait(min(left, POLL_S)):
            self._renew()
            if left > POLL_S and self._is_pressed():
                return

    def _turn(self, recording: Recording) -> bool:
        """Record the oldest entries; return whether more are waiting. Blocks for the disk. Raises RecordingLost."""
        dead = self._control.do(lambda _: self._dead_letters.take())
        self._write(dead, [])
        most = self._groups
        return self._record_groups(recording, most) == most or len(dead) == CHUNK

    def _record_groups(self, recording: Recording, most: int) -> int:
        """Record the oldest groups; return their number."""
        raw = self._control.do(lambda client: client.zrange(self._keys.unrecorded, 0, most - 1))
        jobs = [name_shown(job) for job in raw]
        if not jobs:
            return 0
        groups = self._control.do(lambda client: read_retired(client, self._keys, jobs))
        trained = self._control.do(lambda client: read_trained(client, self._keys, groups))
        kept = {group.job for group in groups if group.seq % self._config.history.keep_every == 0}
        self._write([row_of_job(group) for group in groups if not group.samples], [])
        for piece in _pieces(groups):
            self._write_piece(piece, kept, trained)
        self._control.call(scripts.recorded(self._keys, recording, raw))
        self._tally.groups += len(jobs)
        return len(jobs)

    def _write_piece(self, piece: _Piece, kept: set[str], trained: Trained) -> None:
        """Write the rows of some samples, with answers and tokens of kept samples."""
        found = self._fetch([one for one in piece if _is_kept(*one, kept)])
        rows: list[SampleRow] = []
        uses: list[Use] = []
        for group, meta in piece:
            texts = self._texts if _is_kept(group, meta, kept) else None
            for row, used in rows_of(group, meta, found.get(f"{group.job}/{meta.k}"), texts, trained):
                rows.append(row)
                uses += used
        self._write(rows, uses)

    def _fetch(self, wanted: _Piece) -> dict[str, Bytes | None]:
        """Return payloads by sample, without requesting known lost ones. Blocks."""
        rows = [row_of_meta(group.job, meta) for group, meta in wanted if meta.k not in group.lost]
        return self._payloads.read(self._keys, rows) if rows else {}

    def _write(self, rows: Sequence[SampleRow], uses: Sequence[Use]) -> None:
        """Write rows and uses durably. Blocks for disk space, with a reported wait."""
        assert self._writer is not None
        if not rows:
            return
        self._renew()
        began = time.monotonic()
        until_room(partial(self._writer.write, rows, uses), blocked_on=self._waiting.blocked_on, stopped=self._tick)
        self._tally.wrote(rows, time.monotonic() - began)
        self._renew()
        if not self._all_samples.call(rows, self._tick):
            self._tally.hook_failures += 1
        self._renew()

    def _tick(self) -> bool:
        """Renew the lease during a wait; return whether the wait must end."""
        self._renew()
        return self._is_over()

    def _is_over(self) -> bool:
        return self._end_at is not None and time.monotonic() >= self._end_at

    def _renew(self) -> None:
        """Renew the lease when it is due. Raises RecordingLost."""
        self._attendance.confirm()
        if self._recording is None or time.monotonic() < self._renew_at:
            return
        if self._elect() != self._recording.epoch:
            raise RecordingLost("The recorder's lease expired or was taken by another recorder; starting over.")
        self._renew_at = time.monotonic() + LEASE_S / 3


def _pieces(groups: Sequence[Retired]) -> Iterator[_Piece]:
    """Split samples into pieces of at most ``SAMPLES`` and ``PIECE_BYTES``, or one sample."""
    piece: _Piece = []
    size = 0
    for group in groups:
        for meta in group.samples:
            if piece and (len(piece) >= SAMPLES or size + meta.num_bytes > PIECE_BYTES):
                yield piece
                piece, size = [], 0
            piece.append((group, meta))
            size += meta.num_bytes
    if piece:
        yield piece


def _is_kept(group: Retired, meta: SampleMeta, kept: set[str]) -> bool:
    return group.job in kept and meta.num_bytes <= MAX_KEPT_BYTES
