"""Release evaluations that no consumer reads: write their results, then retire their groups.

A trainer that subscribes to lane ``eval`` reads and retires evaluations; without one only this module retires them.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from penstock.buffer.group import Group
from penstock.buffer.manifest import Ages, rows_of
from penstock.buffer.state import State
from penstock.errors import DiskFull
from penstock.history.eval_rows import FILE, add_rows, read_rows, summarize
from penstock.names import Lane
from penstock.protocol import scripts
from penstock.protocol.staleness import Lineage
from penstock.protocol.waits import Waiting
from penstock.records.causes import EvaluationsUnread, FileUnwritable
from penstock.records.codec import count_of
from penstock.records.keys import Keys
from penstock.records.manifest import Row
from penstock.redis.commands import Client

log = logging.getLogger(__name__)

#: Groups retired per turn, so that a cut does not wait for long.
CHUNK = 512


class UnreadEvaluations:
    """Write an evaluation that was complete for ``ttl_s`` to ``eval.jsonl``, and retire its groups.

    Args:
        run_dir: the run's folder.
        ttl_s: ``buffer.eval_ttl_s``, counted from when this leader read the evaluation's last group.
        waiting: reports evaluations that wait for a consumer.
        alive: called between chunks; keeps the leadership, raises LeadershipLost.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        state: State,
        run_dir: Path,
        ttl_s: float,
        *,
        waiting: Waiting,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._state = state
        self._path = run_dir / FILE
        self._ttl_s = ttl_s
        self._waiting = waiting
        self._alive = alive
        #: (version, dataset) of each row in the file; None before the file is read.
        self._written: set[tuple[int, str]] | None = None

    def tend(self) -> int:
        """Release evaluations that waited too long; return the number of retired groups. Blocks for round trips."""
        unread = self._unread()
        if not unread:
            self._waiting.end()
            return 0
        groups = sum(map(len, unread.values()))
        self._waiting.blocked_on(EvaluationsUnread(len(unread), groups, self._ttl_s))
        limit, retired = time.monotonic() - self._ttl_s, 0
        due = {version for version, some in unread.items() if max(group.since_s for group in some) <= limit}
        due -= self._unfinished() if due else set()
        for version, some in sorted(unread.items()):
            if version in due and retired < CHUNK:
                retired += self._release(version, some)
        return retired

    def _unfinished(self) -> set[int]:
        """Return the versions that have unfinished evaluation jobs. Blocks for a round trip."""
        jobs = self._client.zrange(self._keys.unfinished(Lane.EVAL), 0, -1)
        return {int(version) for job in jobs if (version := job.decode().rsplit("/", 2)[-2]).isdecimal()}

    def _unread(self) -> Mapping[int, list[Group]]:
        """Return the ready groups of lane eval by version; {} if a subscription reads that lane."""
        if any(Lane.EVAL in sub.definition.lanes for sub in self._state.subs.values()):
            return {}
        found: dict[int, list[Group]] = {}
        for group in self._state.groups.values():
            version = group.job.rsplit("/", 2)[-2]
            if group.lane == Lane.EVAL and version.isdecimal():
                found.setdefault(int(version), []).append(group)
        return found

    def _release(self, version: int, groups: Sequence[Group]) -> int:
        try:
            self._write(version, groups)
        except (DiskFull, OSError) as exc:
            self._waiting.blocked_on(FileUnwritable(str(self._path), str(exc)))
            return 0
        retired = 0
        for group in groups[:CHUNK]:
            outcome = scripts.run(self._client, scripts.collect(self._keys, group.job, Lane.EVAL))
            if outcome != "subscribed":
                self._state.forget([group.job])
            retired += outcome == "retired"
        if retired:
            log.warning(
                "evaluation of version %d was not read within %g s: retired %d groups, wrote the result to %s",
                version, self._ttl_s, retired, self._path,
            )  # fmt: skip
        return retired

    def _write(self, version: int, groups: Sequence[Group]) -> None:
        """Append a row for each dataset without one, once, before the dataset's first group is retired."""
        if self._written is None:
            self._written = {(row["version"], row["dataset"]) for row in read_rows(self._path)}
        by_dataset = attrgetter("dataset")
        rows: list[dict[str, Any]] = []
        for dataset, some in groupby(sorted(groups, key=by_dataset), key=by_dataset):
            if (version, dataset) not in self._written:
                rows += self._rows(list(some))
        add_rows(self._path, rows)
        self._written |= {(row["version"], row["dataset"]) for row in rows}

    def _rows(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        num_prompts = count_of(
            self._client.hget(self._keys.source, "eval_jobs"), "The number of prompts of an evaluation"
        )
        # No token is stale in an evaluation.
        ages = Ages(Lineage(), 0, counts=False, floor=-1)
        samples: list[Row] = []
        reward_infos: dict[tuple[str, int], Mapping[str, Any]] = {}
        for start in range(0, len(groups), CHUNK):
            self._alive()
            chunk = groups[start : start + CHUNK]
            for group, records in zip(chunk, self._state.records.read([one.job for one in chunk]), strict=True):
                samples += [row for record in records for row in rows_of(group, record, ages)]
                reward_infos |= {(group.job, record.k): record.reward_info for record in records}
        return list(summarize(samples, num_prompts, reward_infos))
