"""The training data by position: at each one a job, or a line that is skipped.

A skipped line takes its position as a job does, and the position moves past it in the same verb: skipping is a
function of the files and the configuration, so that restarted or concurrent producers agree.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.names import Lane
from penstock.producer.held_out import HeldOut
from penstock.producer.mixture import Mixture
from penstock.producer.prompt import Prompt
from penstock.producer.sources.rows import BadLine
from penstock.protocol.records.job import Job
from penstock.protocol.records.pass_rate import Skip

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
