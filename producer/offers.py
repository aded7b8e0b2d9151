"""Map each position of the training data to a job or a skipped line.

The position moves past a skipped line as past a job. Which lines are skipped is a function of the files and the
configuration, so that restarted or concurrent producers agree.
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

#: Most jobs per admission, which bounds its time on the server; and the bytes after which no further job is added.
CHUNK, CHUNK_BYTES = 128, 4 * 1024 * 1024
#: Number of a dataset's skipped lines that are logged individually.
LOGGED_SKIPS = 10


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """Row of a dataset that is skipped."""

    dataset: str
    #: The line and the error.
    why: str


Offer = Job | SkippedRow


def record_of(offer: Offer) -> tuple[Job | None, bytes]:
    """Encode an offer as an argument of the Lua function ``admit``."""
    return (offer, offer.to_bytes()) if isinstance(offer, Job) else (None, offer.dataset.encode())


def chunk(offers: Iterable[Offer], most: int = CHUNK) -> list[Offer]:
    """Take at most ``most`` offers and about ``CHUNK_BYTES``, but at least one; consume no more of the iterable."""
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
    """Make the offers of a run's training data by position."""

    def __init__(self, config: Config, source: Mixture, held_out: HeldOut) -> None:
        self._n, self._seed = config.rollout.n, config.seed
        self._curricula = {one.name: one.curriculum for one in config.data.train if one.curriculum is not None}
        self._source, self._held_out = source, held_out
        #: Dataset -> number of skipped lines.
        self._skipped: Counter[str] = Counter()
        #: Number of lines skipped since the last job.
        self._in_a_row = 0

    def at(self, position: int) -> Offer:
        """Return the offer at a position. Blocks for the disk. Raises BadLine if the configuration skips no lines."""
        dataset, epoch, line = self._source.place(position)
        prompt = dataset.take(line)
        if isinstance(prompt, Prompt):
            try:
                self._held_out.check(dataset, prompt)
            except BadLine as exc:
                prompt = dataset.skip(exc)
        if isinstance(prompt, str):
            return SkippedRow(dataset.config.name, prompt)
        return dataset.job(prompt, epoch, n=self._n, lane=Lane.TRAIN, sampling={})

    def skip_rule(self, offer: Offer) -> Skip | None:
        """Return the rule by which the curriculum skips an offer at admission; None if it is never skipped.

        Which easy or hard prompts are offered anyway is a function of seed, prompt and epoch.
        """
        if not isinstance(offer, Job) or (curriculum := self._curricula.get(offer.id.partition("/")[0])) is None:
            return None
        digest = hashlib.blake2b(f"{self._seed}/revisit/{offer.id}".encode(), digest_size=6).digest()
        if int.from_bytes(digest, "big") < curriculum.revisit * 2**48:
            return None
        return Skip(curriculum.groups, easy=curriculum.skip_above, hard=curriculum.skip_below)

    def record_skips(self, offers: Sequence[Offer]) -> None:
        """Log and count the skipped lines among admitted offers.

        Raises:
            ConfigError: a complete epoch was skipped.
        """
        for offer in offers:
            if isinstance(offer, Job):
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            self._log_skip(offer)
            if (num_lines := self._source.num_lines) is not None and self._in_a_row >= num_lines:
                raise ConfigError(f"None of {num_lines} consecutive lines can be used; last error: {offer.why}")

    def _log_skip(self, row: SkippedRow) -> None:
        self._skipped[row.dataset] += 1
        if (count := self._skipped[row.dataset]) <= LOGGED_SKIPS:
            log.warning("skipped a row: %s", row.why)
        elif count == LOGGED_SKIPS + 1:
            log.warning("skipping more rows of dataset %s; `penstock status` counts them", row.dataset)


class Evaluations:
    """Admit the evaluations of a run. Calls block for Redis.

    Args:
        admit: admits jobs of a source, ``eval@VERSION``, at a position.
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
        """Admit an evaluation if due: of the first version, of every ``data.eval_every``-th, and of the final one.

        Raises:
            QueueFull: Redis is full.
            ProtocolError: an evaluation record in Redis is invalid.
        """
        if not self._config.data.eval:
            return
        state = self._control.do(lambda client: client.hgetall(self._keys.source))
        last = count_of(state.get(b"evaluated"), "The version that was evaluated last")
        begun = count_of(state.get(b"evaluating"), "The version that is being evaluated")
        if begun <= last:
            due = self.next_version(version, last)
            if due is None:
                return
            begun = self._control.call(scripts.swap(self._keys, "evaluating", begun, due))
        # Begun by this producer, a concurrent one, or one that was killed during the admission.
        self._admit(begun)
        self._control.call(scripts.swap(self._keys, "evaluated", last, begun))

    def next_version(self, version: int, last: int) -> int | None:
        """Return the version to evaluate next, or None. ``version``: newest one; ``last``: the last evaluated one."""
        final = self._count(self._keys.clock, "final", "The last version to be evaluated")
        if final > last:
            return final
        if self._config.data.eval_pinned and self._is_running():
            return None  # an engine can be pinned to one version only, so those published meanwhile are skipped
        every = self._config.data.eval_every
        due = not last or (every and version - last >= every)
        return version if due and version > last else None

    def _is_running(self) -> bool:
        return bool(self._control.do(lambda client: client.zcard(self._keys.unfinished(Lane.EVAL))))

    def _admit(self, version: int) -> None:
        source, lines = f"eval@{version}", self._held_out.lines
        while (position := self._count(self._keys.source, source, f"The position in {source}")) < len(lines):
            jobs = chunk(self._job(version, *line) for line in islice(lines, position, None))
            self._admit_jobs(jobs, source, position)
        log.info("evaluation of version %d admitted: %d prompts", version, len(lines))

    def _job(self, version: int, dataset: Dataset, line: int) -> Job:
        sampling = dict(self._config.rollout.eval_sampling)
        return dataset.job(dataset[line], version, n=1, lane=Lane.EVAL, sampling=sampling)

    def _count(self, key: str, field: str, what: str) -> int:
        return count_of(self._control.do(lambda client: client.hget(key, field)), what)
