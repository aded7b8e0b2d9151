"""The training data by position: at each one a job, or a line that is skipped.

A skipped line takes its position as a job does, and the position moves past it in the same verb: skipping is a
function of the files and the configuration, so that restarted or concurrent producers agree.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.names import Lane
from penstock.producer.dataset import Dataset
from penstock.producer.held_out import HeldOut
from penstock.producer.mixture import Mixture
from penstock.producer.prompt import Prompt
from penstock.producer.sources.rows import BadLine
from penstock.protocol import scripts
from penstock.protocol.pass_rate import Skip
from penstock.records.codec import count_of
from penstock.records.job import Job
from penstock.records.keys import Keys
from penstock.redis.control import Control

log = logging.getLogger(__name__)

#: Jobs per verb, which bounds its time on the server; and their bytes after which no other is added.
CHUNK, CHUNK_BYTES = 128, 4 * 1024 * 1024
#: Skipped lines of a dataset that are logged one by one.
TOLD = 10


@dataclass(frozen=True, slots=True)
class Passed:
    """A line that is skipped."""

    dataset: str
    #: Names the line, and the error.
    why: str


Offer = Job | Passed


def record_of(offer: Offer) -> tuple[Job | None, bytes]:
    """Return an offer as an argument of admit."""
    return (offer, offer.to_bytes()) if isinstance(offer, Job) else (None, offer.dataset.encode())


def chunk(offers: Iterable[Offer], most: int = CHUNK) -> list[Offer]:
    """Take the first ``most`` of ``offers``, or as many as one verb takes, but at least one, and read no other."""
    taken: list[Offer] = []
    num_bytes = 0
    for offer in offers:
        taken.append(offer)
        if isinstance(offer, Job):
            num_bytes += len(offer.prompt or "") + 8 * len(offer.prompt_ids or ()) + sum(map(len, offer.images))
        if len(taken) == most or num_bytes >= CHUNK_BYTES:
            break
    return taken


class Offers:
    """The training data of a run by position."""

    def __init__(self, config: Config, source: Mixture, held_out: HeldOut) -> None:
        self._n, self._seed = config.rollout.n, config.seed
        self._curricula = {one.name: one.curriculum for one in config.data.train if one.curriculum is not None}
        self._source, self._held_out = source, held_out
        self._passed: Counter[str] = Counter()
        #: Lines skipped since the last job.
        self._in_a_row = 0

    def at(self, position: int) -> Offer:
        """Return the offer at a position. Blocks for the disk. Raises BadLine if the configuration skips no lines."""
        dataset, epoch, line = self._source.place(position)
        prompt = dataset.take(line)
        if isinstance(prompt, Prompt):
            try:
                self._held_out.check(dataset, prompt)
            except BadLine as exc:
                prompt = dataset.passed(exc)
        if isinstance(prompt, str):
            return Passed(dataset.config.name, prompt)
        return dataset.job(prompt, epoch, n=self._n, lane=Lane.TRAIN, sampling={})

    def skip(self, offer: Offer) -> Skip | None:
        """Return when an offer is skipped, as the verb that would admit it decides; None: never.

        Prompts that come although they are easy or hard are a function of seed, prompt and epoch.
        """
        if not isinstance(offer, Job) or (curriculum := self._curricula.get(offer.id.partition("/")[0])) is None:
            return None
        digest = hashlib.blake2b(f"{self._seed}/revisit/{offer.id}".encode(), digest_size=6).digest()
        if int.from_bytes(digest, "big") < curriculum.revisit * 2**48:
            return None
        return Skip(curriculum.groups, easy=curriculum.skip_above, hard=curriculum.skip_below)

    def took(self, offers: Sequence[Offer]) -> None:
        """Log and count skipped lines.

        Raises:
            ConfigError: as many lines in a row as the data has were skipped.
        """
        for offer in offers:
            if isinstance(offer, Job):
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            self._tell(offer)
            if (num_lines := self._source.num_lines) is not None and self._in_a_row >= num_lines:
                raise ConfigError(f"Not one of {num_lines} lines in a row can be used; the last: {offer.why}")

    def _tell(self, passed: Passed) -> None:
        self._passed[passed.dataset] += 1
        if (count := self._passed[passed.dataset]) <= TOLD:
            log.warning("passed over: %s", passed.why)
        elif count == TOLD + 1:
            log.warning("more lines of dataset %s are passed over; `penstock status` counts them", passed.dataset)


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
