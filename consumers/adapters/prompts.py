"""Admit, watch and cancel prompts that a trainer chooses itself, as jobs of a run.

Jobs are named ``NAME/0/NUMBER``. They belong to the subscription that submitted them; no other may read their lane.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from penstock.consumers.batch.batch import Batch
from penstock.consumers.session import Session
from penstock.errors import ConfigError, ProtocolError, QueueFull, WaitTimeout
from penstock.protocol import scripts
from penstock.protocol.audit import scan_groups
from penstock.protocol.position import read_count
from penstock.records.codec import count_of, name_in, name_shown
from penstock.records.job import Job, JobState
from penstock.records.worker_causes import RedisFull
from penstock.redis.commands import Client

#: Jobs admitted per verb.
CHUNK = 128
#: Seconds between two checks whether Redis has room.
LOOK_S = 0.5

#: Lanes that such jobs may be admitted to.
AskedLane = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered ``n`` times; its fields are those of ``penstock.Job``."""

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    n: int = 1
    label: str = ""
    #: The label if it is not text; ``label`` is then its JSON.
    label_value: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    reward: str | None = None
    environment: str | None = None


class Prompts:
    """Jobs of one subscription that submits its own prompts.

    Args:
        session: the owner of the jobs; its name is the dataset.
        lane: the lane of the jobs.
    """

    def __init__(self, session: Session, lane: AskedLane) -> None:
        self._subscriber = session.subscriber
        self._control = session.subscriber.control
        self._keys = session.keys
        self._model = session.config.model.name
        self._name = session.name
        self._lane: AskedLane = lane

    def ensure_lanes(self) -> None:
        """Create the run's lanes before the first job is admitted; parts that start later would drop it otherwise.

        Blocks for a round trip. Raises ConfigError if the run has another schema.
        """
        self._control.do(lambda client: scripts.ensure_lanes(client, self._keys))

    def admit(self, requests: Sequence[Request], deadline: float) -> list[str]:
        """Admit all requests; return their ids. Blocks for room in Redis.

        Raises WaitTimeout past ``deadline`` (monotonic), ProtocolError if Redis holds an invalid position.
        """
        jobs: list[str] = []
        for first in range(0, len(requests), CHUNK):
            chunk = requests[first : first + CHUNK]
            while (admitted := self.admit_now(chunk)) is None:
                if time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"Redis had no room for the prompts ({len(jobs)} of {len(requests)} are admitted): raise its "
                        "maxmemory.",
                        count=len(jobs),
                        cause=RedisFull("admit"),
                    )
                time.sleep(LOOK_S)
            jobs += admitted
        return jobs

    def admit_now(self, requests: Sequence[Request]) -> list[str] | None:
        """Admit at most ``CHUNK``; return their ids, or None if Redis is full. Blocks for a round trip or two."""
        position = self._admit_chunk(requests)
        if position < 0:
            self._subscriber.waiting.blocked_on(RedisFull("admit"))
            return None
        return [self._id(position + i) for i in range(len(requests))]

    def check_buried(self, jobs: Iterable[str]) -> None:
        """Raise ProtocolError with the reason if any of ``jobs`` is dead-lettered. Blocks for one round trip."""
        jobs = list(jobs)
        if buried := self.buried(jobs):
            raise ProtocolError(
                f"{len(buried)} of {len(jobs)} prompts were given up by the workers, {buried[0]} as: "
                f"{self._why(buried[0])}"
            )

    def buried(self, jobs: Sequence[str]) -> list[str]:
        """Return the dead-lettered ones of ``jobs``, sorted. Blocks for one round trip."""

        def states(client: Client) -> list[bytes | None]:
            pipe = client.pipeline(transaction=False)
            for job in jobs:
                pipe.hget(self._keys.group(job), "st")
            return list(pipe.execute())

        found = zip(jobs, self._control.do(states), strict=True)
        return sorted(job for job, state in found if state == JobState.DEAD.encode())

    def check_alone(self) -> None:
        """Raise ConfigError if another subscription reads this lane: it would receive these answers, and keep them.

        Blocks for a round trip per subscription.
        """
        for name in self._live_subs():
            lanes = self._control.do(partial(_lanes, self._keys.sub(name)))
            if name != self._name and self._lane in lanes:
                raise ConfigError(
                    f"Lane {self._lane} of run {self._keys.run!r} belongs to subscription {name!r} already: "
                    "take a run of its own for prompts that a trainer submits itself."
                )

    def cancel(self, jobs: Iterable[str] | None = None) -> bool:
        """Cancel ``jobs``, or with None every live job; return False if a batch of some was cut meanwhile.

        Blocks for a round trip each, and for a scan without ``jobs``.
        """
        subs, mine = self._live_subs(), self._id("")
        if jobs is None:
            found = self._control.do(lambda client: list(scan_groups(client, self._keys)))
            jobs = [job for job in found if job.startswith(mine)]
        calls = [scripts.cancel(self._keys, job, subs) for job in jobs]
        return scripts.HELD_BY_BATCH not in [self._control.call(call) for call in calls]

    def unread(self) -> Iterator[Batch]:
        """Yield batches that are cut but not committed, without payloads. Blocks for a round trip each."""
        sub = self._keys.sub(self._name)
        cut = read_count(self._control.do(lambda client: client.hget(sub, "cut")), "cut", self._name)
        for n in range(self._subscriber.cursor + 1, cut + 1):
            delivery = self._subscriber.read(n, LOOK_S)
            yield Batch(delivery.manifest, digest=delivery.digest, payloads={})

    def _id(self, number: int | str) -> str:
        return f"{self._name}/0/{number}"

    def _admit_chunk(self, requests: Sequence[Request]) -> int:
        """Admit one chunk; return the number of its first job, or -1 if Redis is full."""
        while True:
            raw = self._control.do(lambda client: client.hget(self._keys.source, self._name))
            position = count_of(raw, f"The position in {self._name}")
            jobs = [_job(self._id(position + i), one, self._lane) for i, one in enumerate(requests)]
            try:
                done = self._control.call(
                    scripts.admit(
                        self._keys,
                        [(job, job.to_bytes()) for job in jobs],
                        lane=self._lane,
                        source=self._name,
                        position=position,
                        model=self._model,
                        gate=None,
                    )
                )
            except QueueFull:
                return -1
            if done.outcome == "ok":
                return position

    def _why(self, job: str) -> str:
        for _, entry in self._control.do(lambda client: client.xrevrange(self._keys.dead, count=1000)):
            if entry.get(b"id") == job.encode():
                return f"{name_shown(entry.get(b'reason', b'?'))}: {name_shown(entry.get(b'detail', b''))[-2000:]}"
        return "its dead letter is gone."

    def _live_subs(self) -> list[str]:
        raw = self._control.do(lambda client: client.hgetall(self._keys.subs))
        return sorted(name_in(field[4:], "A subscription") for field in raw if field.startswith(b"sub:"))


def _lanes(sub: str, client: Client) -> list[str]:
    return name_shown(client.hget(sub, "lanes") or b"train").split(",")


def _job(name: str, request: Request, lane: AskedLane) -> Job:
    fields: Mapping[str, Any] = {key: getattr(request, key) for key in Request.__slots__}
    return Job(name, lane=lane, **fields)
