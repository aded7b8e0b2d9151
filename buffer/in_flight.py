"""Reading of in-flight jobs. The order of these reads is part of the correctness of a cut.

    gate ─> end of the data ─> jobs ─> completed, admitted ─> unfinished, running ─> ingest of completed groups

A job moves along it and never back: admitted before the gate closes or the data ends, in a lane (or delayed) until it
is complete. A job missed by an earlier read is therefore seen by a later one, or has completed. Completed groups are
ingested (``State.catch_up``) afterwards, never before: a job that is no longer in flight is in a pool then.
"""

from collections.abc import Iterable, Sequence

from penstock.buffer.view import End, InFlight, View
from penstock.protocol.gate import Room, read_rooms
from penstock.protocol.keys import Keys
from penstock.protocol.records.small_maps import count_of
from penstock.redis.commands import Client


def read(client: Client, keys: Keys, view: View, gates: Sequence[Sequence[str]]) -> InFlight:
    """Read what is in flight for the subscription of ``view``. Blocks for a round trip, one more with held rejects.

    Args:
        gates: names of the subscriptions that hold the gate, members of a pool together.

    Raises:
        ProtocolError: a count in Redis is invalid.
    """
    is_gate_open = not view.rejects or _is_open(read_rooms(client, keys, gates).values())
    lane, last = view.definition.lanes[0], view.first_place + view.definition.size - 1
    versions = range(view.floor, view.train_version) if view.policy.waits else range(0)
    pipe = client.pipeline(transaction=False)
    pipe.hmget(keys.source, "train", "end", "last_batch")
    for name in view.lanes:
        pipe.xlen(keys.jobs(name))
    pipe.zcard(keys.delayed)
    pipe.hmget(keys.counters, "completed", f"seq:{lane}")
    pipe.zcount(keys.unfinished(lane), "-inf", last)
    pipe.zrange(keys.unfinished(lane), 0, 0, withscores=True)
    for version in versions:
        pipe.zcount(keys.inflight, version, version)
    source, *answers = pipe.execute()
    jobs, answers = answers[: len(view.lanes) + 1], answers[len(view.lanes) + 1 :]
    (completed, admitted), unfinished, first, *running = answers
    return InFlight(
        jobs=sum(map(int, jobs)),
        running={version: int(count) for version, count in zip(versions, running, strict=True) if count},
        admitted=count_of(admitted, f"The number of jobs admitted to lane {lane}"),
        unfinished=int(unfinished),
        first_unfinished=int(first[0][1]) if first else None,
        completed=count_of(completed, "The number of jobs completed"),
        end=_end(*source),
        is_gate_open=is_gate_open,
    )


def _is_open(rooms: Iterable[Room]) -> bool:
    """Return whether every gate admits a job; without a gate nothing is admitted."""
    free = [room.free for room in rooms]
    return bool(free) and min(free) > 0


def _end(position: bytes | None, end: bytes | None, last_batch: bytes | None) -> End | None:
    """Return the end of the data if it is reached, or None."""
    if end is None:
        return None
    last = count_of(end, "The end of the data")
    return None if count_of(position, "The position in the data") < last else End(last, last_batch == b"train")
