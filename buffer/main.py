"""Run the buffer process: lead, ingest completed groups, cut batches on request, retire finished groups.

    samples (events) ──> ingest: payloads permanent ──> pools of the subscriptions ──ask──> cut ──> batches:SUB
                                                                                  └─ checkpoints ──> seal ──> sweep

| loop step | waits for | unblocked by |
|---|---|---|
| lead | the current leader's lease | the end of the lease, or `resign` |
| events | entries of stream `samples` | commit, ask, publish, checkpointed, rewind, subscribe |
| cut | groups, or groups that are due before the bound | more completions; shown in `waits` |
| all | a valid number or name in Redis | a correction by an operator |

The Lua functions' guards keep I2 and I5; memory is only a cache of keys (I4); decision and guard keep I6.
"""

import logging
import signal
import threading
import time
from types import FrameType

from penstock.buffer.cutter import Cutter
from penstock.buffer.filters import BUILT_IN, Filters
from penstock.buffer.housekeeping import Housekeeping
from penstock.buffer.limits import holdings
from penstock.buffer.metrics import BufferCollector
from penstock.buffer.payload_servers import PayloadServers
from penstock.buffer.state import State
from penstock.config import Config
from penstock.errors import ConfigError, LeadershipLost, ProtocolError, QueueUnavailable
from penstock.metrics.server import serve
from penstock.names import new_token
from penstock.payloads.servers import seeds
from penstock.protocol import scripts
from penstock.protocol.presence import Attendance
from penstock.protocol.scripts import Leadership, ensure_lanes
from penstock.protocol.waits import PublishedWaiting, Waiting
from penstock.records.codec import count_of, name_shown
from penstock.records.keys import Keys
from penstock.records.record import readable
from penstock.records.worker_causes import LeaseHeld, RecordUnreadable, ServerAway
from penstock.redis.commands import Client
from penstock.redis.connect import connect_blocking
from penstock.redis.control import PASSING, Control
from penstock.redis.refusals import KeysLost

log = logging.getLogger(__name__)

#: Counters checked for lost writes, and their names in log lines.
WATCHED = {
    "admitted": "admissions",
    "committed": "committed samples",
    "completed": "completed groups",
    "cut": "cut batches",
    "published": "publications",
}


class Rollback:
    """Detect acknowledged writes that Redis lost by a failover to a lagging replica, or a power loss.

    Counters only grow. Every buffer process, also on standby, remembers their largest observed values; a smaller value
    means that the difference was lost, and the first process to detect it counts and reports it. Writes lost since the
    last read, or repeated before the next one, are not detected: the figures are lower bounds.
    """

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        #: Counter -> largest observed value, plus the losses reported before.
        self.seen: dict[str, int] = {}

    def check(self) -> dict[str, int]:
        """Return the losses since the last call, by counter; count them in Redis and log them.

        Blocks for a round trip, two if anything was lost.
        """
        now = self._read()
        self.seen = {name: max(count, self.seen.get(name, count)) for name, count in now.items()}
        if self.seen == now:
            return {}
        lost = scripts.run(self._client, scripts.rolled_back(self._keys, self.seen))
        if lost:
            losses = ", ".join(f"{count} {WATCHED[name]}" for name, count in lost.items())
            log.error("Redis lost acknowledged writes, as after a failover or a power loss: at least %s", losses)
        return lost

    def _read(self) -> dict[str, int]:
        """Read the counters, each plus its reported losses; skip invalid ones, and log them once."""
        fields = [name for counter in WATCHED for name in (counter, f"rolled_back:{counter}")]
        values = self._client.hmget(self._keys.counters, fields)
        found = {name.encode(): b"0" if value is None else value for name, value in zip(fields, values, strict=True)}
        counts = dict(readable(found, _counter))
        reported = {name: f"rolled_back:{name}" for name in WATCHED}
        known = [name for name in WATCHED if {name, reported[name]} <= counts.keys()]
        return {name: counts[name] + counts[reported[name]] for name in known}


def _counter(field: bytes, value: bytes) -> tuple[str, int]:
    name = name_shown(field)
    return name, count_of(value, f"The counter {name}")


#: Longest blocking read of the event stream; delays lease renewals and shutdown.
BLOCK_MS = 100
#: Time for which single completions are gathered, and number of events that are read without waiting.
GATHER_S, GATHER = 0.01, 32
#: Most events per read.
EVENTS = 1024
#: Pause before the next attempt if a server does not answer; doubles.
PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0


class Buffer:
    """One buffer process; ``run`` blocks until ``stop``."""

    def __init__(self, config: Config) -> None:
        if config.redis.url is None:
            raise ConfigError("The buffer needs redis.url: the address of the run's Redis.")
        self._config = config
        self._keys = Keys(config.run)
        self._stopping = threading.Event()
        self._control = Control(config.redis.url, stopped=self._stopping.is_set)
        self._events: Client = connect_blocking(config.redis.url, BLOCK_MS / 1000)
        self._servers = PayloadServers(config.redis, self._control.client, self._keys)
        self._filters = Filters(
            [name for name in (*config.trainer.filter.functions, *config.buffer.filters) if name not in BUILT_IN]
        )
        self._token = new_token()
        self._lease_ms = int(config.buffer.lease_s * 1000)
        self._renew_at = 0.0
        self._pause_s = PAUSE_S
        self._reclaimer = f"buffer-{self._token}"
        self._waits: dict[str, Waiting] = {}
        #: Subscription -> time (monotonic) of its last cut.
        self._served: dict[str, float] = {}
        #: Checked whether this process leads or not.
        self.rollback = Rollback(self._control.client, self._keys)
        self._leads = False
        self.metrics = serve(config, "buffer", "", BufferCollector(config, lambda: self._leads))
        url = self.metrics.url if self.metrics else ""
        self._attendance = Attendance(self._control.client, self._keys, "buffer", metrics=url)

    @property
    def client(self) -> Client:
        return self._control.client

    def stop(self) -> None:
        """Make ``run`` return; safe in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Lead if no other buffer does, else stand by. Blocks until ``stop``."""
        try:
            self._control.do(lambda client: ensure_lanes(client, self._keys))
            while not self._stopping.is_set():
                self._stand_by()
            self._attendance.end()
        except QueueUnavailable as exc:
            if not self._stopping.is_set():
                raise
            log.warning("stopped while Redis was unreachable: %s", exc)
        self._control.close()
        self._events.close()
        self._servers.close()
        if self.metrics is not None:
            self.metrics.close()

    def _stand_by(self) -> None:
        """Try to acquire the leadership, and lead until it is lost."""
        waiting = self._waiting("buffer:standby")
        self._attendance.confirm()
        try:
            epoch = scripts.run(self.client, scripts.lead(self._keys, self._token, self._lease_ms))
            if not epoch:
                waiting.blocked_on(LeaseHeld("buffer"))
                # After a Redis restart the leader and its in-memory state may be gone.
                self.rollback.check()
                self._stopping.wait(min(1.0, self._lease_ms / 3000))
                return
            waiting.end()
            self._leads = True
            self._lead(Leadership(epoch, self._token))
        except LeadershipLost as exc:
            log.warning("%s", exc)
        except ProtocolError as exc:
            log.error("cutting stopped until the record is corrected: %s", exc)
            self._waiting("buffer:state").blocked_on(RecordUnreadable(str(exc)))
            self._pause()
        except PASSING as exc:
            # After a restart the state in Redis is authoritative: acquire the leadership and load again.
            if isinstance(exc, KeysLost):
                log.error("cutting stopped until the keys of Redis are restored: %s", exc)
                self._waiting("buffer:state").blocked_on(exc.cause)
            else:
                log.warning("a server does not answer (%s); the state will be reloaded when it does", exc)
                self._waiting("buffer:servers").blocked_on(ServerAway(str(exc)))
            self._pause()
            self._control.do(lambda client: client.ping())
        finally:
            self._leads = False

    def _pause(self) -> None:
        self._stopping.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _lead(self, lead: Leadership) -> None:
        """Lead until the lease is lost, Redis restarts, or ``stop``."""
        started = self._run_id()
        for call in seeds(self._keys, self._config.redis):
            scripts.run(self.client, call)

        def alive() -> None:
            self._renew(lead, started)
            self._attendance.confirm()

        train = self._config.data.train
        right_from = {one.name: one.curriculum.right_from for one in train if one.curriculum is not None}
        state = State(self.client, self._keys, self._servers, lead, alive, self._filters, right_from)
        cutter = Cutter(self.client, self._keys, lead, state)
        # Read the last event before loading: a completion in between is read twice instead of missed.
        last = self._last_event()
        self._renew_at = 0.0
        self.rollback.check()
        state.load()
        log.info("leading in epoch %d with %d groups", lead.epoch, len(state.groups))
        house = Housekeeping(
            self.client, self._keys, lead, state, self._servers, self._config,
            reclaimer=self._reclaimer, alive=alive, waiting=self._waiting,
        )  # fmt: skip
        while not self._stopping.is_set():
            alive()
            last, kinds = self._take_events(state, last)
            if kinds - {"ready"}:
                state.refresh()
            # Least recently served first, or the first member of a pool would take every group that completes alone.
            for sub in sorted(state.subs.values(), key=lambda sub: self._served.get(sub.name, 0.0)):
                self._cut_for(cutter, state, sub.name)
            self._pause_s = PAUSE_S
            self._waiting("buffer:servers").end()
            self._waiting("buffer:state").end()
            house.tend(last, checkpointed="checkpointed" in kinds)
        scripts.run(self.client, scripts.resign(self._keys, lead))

    def _renew(self, lead: Leadership, started: str) -> None:
        """Renew the leadership if due. Raises LeadershipLost."""
        if time.monotonic() < self._renew_at:
            return
        epoch = scripts.run(self.client, scripts.lead(self._keys, lead.token, self._lease_ms))
        if epoch != lead.epoch:
            raise LeadershipLost("The leadership expired or went to another buffer; the state will be reloaded.")
        if self._run_id() != started:
            raise LeadershipLost("Redis was restarted; the state will be reloaded.")
        self.rollback.check()
        self._renew_at = time.monotonic() + self._lease_ms / 3000

    def _run_id(self) -> str:
        return str(self.client.info("server")["run_id"])

    def _last_event(self) -> str:
        newest = self.client.xrevrange(self._keys.samples, count=1)
        return str(newest[0][0].decode()) if newest else "0-0"

    def _take_events(self, state: State, last: str) -> tuple[str, set[str]]:
        """Read new events, and ingest completed groups. Blocks briefly. Returns (last id, kinds of events)."""
        answer = self._events.xread({self._keys.samples: last}, count=EVENTS, block=BLOCK_MS)
        entries = answer[0][1] if answer else []
        if not entries:
            return last, set()
        if len(entries) < GATHER and all(fields.get(b"e") == b"ready" for _, fields in entries):
            # Gather groups that complete one by one: ingesting takes four round trips.
            self._stopping.wait(GATHER_S)
            entries += self._events.xrange(self._keys.samples, b"(" + entries[-1][0], count=EVENTS)
        jobs: list[str] = []
        kinds: set[str] = set()
        for _, fields in entries:
            kind, job = name_shown(fields.get(b"e", b"")), name_shown(fields.get(b"j", b""))
            kinds.add(kind)
            if kind == "ready":
                jobs.append(job)
            elif kind == "ended":
                state.forget([job])
        state.ingest(jobs)
        return entries[-1][0].decode(), kinds

    def _cut_for(self, cutter: Cutter, state: State, name: str) -> None:
        """Cut the batches that a subscription requested, until one has to wait."""
        waiting = self._waiting(f"buffer:{name}")
        if (sub := state.subs.get(name)) and sub.unreadable:
            waiting.blocked_on(RecordUnreadable(sub.unreadable))
            return
        while (sub := state.subs.get(name)) and sub.position.ask > sub.position.cut:
            if (cause := cutter.try_cut(sub)) is not None:
                waiting.blocked_on(cause, count=holdings(sub), needed=sub.definition.size)
                return
            self._served[name] = time.monotonic()
        waiting.end()

    def _waiting(self, who: str) -> Waiting:
        if who not in self._waits:
            self._waits[who] = PublishedWaiting(self.client, self._keys, who)
        return self._waits[who]


def main(config: Config) -> int:
    """Run one buffer until SIGTERM or SIGINT. Blocks."""
    buffer = Buffer(config)

    def stop(signum: int, frame: FrameType | None) -> None:
        buffer.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    buffer.run()
    return 0
