"""Evaluations (T18): when one is due, and its jobs, which have their own lane and no gate."""

import logging
from collections.abc import Callable
from itertools import islice

from penstock.config import Config
from penstock.names import Lane
from penstock.producer.dataset import Dataset
from penstock.producer.held_out import HeldOut
from penstock.producer.offers import Offer, chunk
from penstock.protocol import scripts
from penstock.protocol.keys import Keys
from penstock.protocol.records.job import Job
from penstock.protocol.records.small_maps import count_of
from penstock.redis.control import Control

log = logging.getLogger(__name__)


class Evaluations:
    """Evaluations of one run. Calls block for Redis.

    Args:
        admit: admits jobs of a source, ``eval@VERSION``, from a position of it on.
    """

    def __init__(
        self,
        config: Config,
        keys: Keys,
        control: Control,
        held_out: HeldOut,
        admit: Callable[[list[Offer], str, int], object],
    ) -> None:
        self._config, self._keys, self._control = config, keys, control
        self._held_out, self._admit_jobs = held_out, admit

    def admit(self, version: int) -> None:
        """Admit the evaluation of this version if it is due: the first, every so many, and the last requested one.

        Raises:
            QueueFull: Redis is full.
            ProtocolError: a record of evaluations in Redis is invalid.
        """
        if not self._config.data.eval:
            return
        state = self._control.do(lambda client: client.hgetall(self._keys.source))
        last = count_of(state.get(b"evaluated"), "The version that was evaluated last")
        begun = count_of(state.get(b"evaluating"), "The version that is being evaluated")
        if begun <= last:
            wanted = self.to_evaluate(version, last)
            if wanted is None:
                return
            begun = self._control.call(scripts.swap(self._keys, "evaluating", begun, wanted))
        # The one that was begun: here, by a concurrent producer, or by one that was killed in the middle.
        self._admit(begun)
        self._control.call(scripts.swap(self._keys, "evaluated", last, begun))

    def to_evaluate(self, version: int, last: int) -> int | None:
        """Return the version to evaluate next, or None: ``last`` was the one before, ``version`` is the newest."""
        final = self._count(self._keys.clock, "final", "The last version to be evaluated")
        if final > last:
            return final
        if self._config.data.eval_pinned and self._runs():
            return None  # the versions between are skipped: an engine could be pinned to one of them only
        every = self._config.data.eval_every
        due = not last or (every and version - last >= every)
        return version if due and version > last else None

    def _runs(self) -> bool:
        return bool(self._control.do(lambda client: client.zcard(self._keys.unfinished(Lane.EVAL))))

    def _admit(self, version: int) -> None:
        source, lines = f"eval@{version}", self._held_out.lines
        while (position := self._count(self._keys.source, source, f"The position in {source}")) < len(lines):
            jobs = chunk(self._job(version, *line) for line in islice(lines, position, None))
            self._admit_jobs(jobs, source, position)
        log.info("version %d is being evaluated on %d prompts", version, len(lines))

    def _job(self, version: int, dataset: Dataset, line: int) -> Job:
        sampling = dict(self._config.rollout.eval_sampling)
        return dataset.job(dataset[line], version, n=1, lane=Lane.EVAL, sampling=sampling)

    def _count(self, key: str, field: str, what: str) -> int:
        return count_of(self._control.do(lambda client: client.hget(key, field)), what)
