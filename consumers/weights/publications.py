"""Publish a trainer's weights: write, number, announce and send versions, and keep folders that are needed.

all ranks    publish(weights): all gather a sharded model
rank 0       every rank has committed ─> copy ─> claim a number ─> open ─> announce ─> send ─> write (behind.py)
             or, the folder first ─> number ─> write, claim it ─> open ─> announce ─> send
"""

import logging
import operator
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.consumers.clock import Clock, folder_of
from penstock.consumers.metrics.tally import Tally
from penstock.consumers.subscription.progress import Progress
from penstock.consumers.subscription.subscriber import Subscriber
from penstock.consumers.weights.static_files import StaticFiles
from penstock.errors import ProtocolError, PublishError, WeightsNotFinite
from penstock.records.codec import LEAST
from penstock.records.publication import Publication
from penstock.text import safe_repr

if TYPE_CHECKING:
    from penstock.consumers.weights.behind import Behind
    from penstock.consumers.weights.publisher import Publisher
    from penstock.consumers.weights.sources import Source, Weights

log = logging.getLogger(__name__)

#: Consecutive refused publications that end the run.
MAX_SKIPPED = 3


class Publications:
    """Publish the versions of one trainer's weights.

    Args:
        clock: numbers and announces versions.
        progress: knows which batches the ranks have committed.
        tally: counts versions, their bytes and the time they take.
    """

    def __init__(
        self, config: Config, subscriber: Subscriber, clock: Clock, progress: Progress, tally: Tally | None = None
    ) -> None:
        self._config = config
        self._subscriber = subscriber
        self._clock = clock
        self._progress = progress
        self._tally = tally or Tally()
        self._publisher: Publisher | None = None
        self._serving: StaticFiles | None = None
        self._behind: Behind | None = None
        #: Publications refused because their weights hold NaN or Inf: total of this process, and consecutive ones.
        self.skipped = self.skipped_in_a_row = 0
        #: Folder of published versions.
        self.folder = weights_dir_of(config)

    @property
    def publisher(self) -> "Publisher":
        """Return the publisher, which writes and sends weights; imports torch at first use."""
        if self._publisher is None:
            from penstock.consumers.weights.publisher import Publisher

            self._publisher = Publisher(self._config, self._subscriber)
        return self._publisher

    @property
    def behind(self) -> "Behind":
        """Return the background writer of folders; imports torch at first use."""
        if self._behind is None:
            from penstock.consumers.weights.behind import Behind

            self._behind = Behind(
                self._config,
                self._subscriber,
                self.folder,
                in_use=self.publisher.in_use,
                offer=self._offer,
            )
        return self._behind

    def _offer(self, version: int, index: str, path: str | Path) -> None:
        """Serve an announced version over HTTP, if ``serving.enabled``. Returns at once."""
        if (serving := self._served()) is not None and index:
            serving.offer(version, index, Path(path))

    def _served(self) -> StaticFiles | None:
        if self._serving is None:
            self._serving = StaticFiles.of(self._config, self._subscriber)
        return self._serving

    def close(self) -> None:
        """Write the newest version's folder, then stop sending and serving. Blocks for the disk."""
        if self._behind is not None:
            self._behind.close()
        if self._serving is not None:
            self._serving.close()
        if self._publisher is not None:
            self._publisher.close()

    def publish(self, weights: "Weights", *, step: int | None, timeout_s: float) -> int:
        """Write the next version and announce it, see ``Trainer.publish``."""
        from penstock.consumers.weights.sources import as_source

        self._check_drives("publish")
        source = as_source(weights)
        if not self._subscriber.seat.leads:
            self._clock.last = self.publisher.follow(source) or self._clock.last
            return self._clock.last
        self.publisher.begin(source)
        try:
            number = None if step is None else _whole(step)
            with self._tally.waiting("ranks"):
                through = self._progress.await_ranks(timeout_s)
            self._publish_or_skip(source, through if number is None else number, through)
        except BaseException as exc:
            self.publisher.failed(source, exc)
            raise
        self.publisher.done(source, self._clock.last)
        return self._clock.last

    def _publish_or_skip(self, source: "Source", step: int, through: int) -> None:
        """Publish weights; if they are not finite, publish the last version's again. Raises as ``_skip``."""
        try:
            if self._sends_first():
                self._send_first(source, step, through)
            else:
                self._write_first(source, step, through)
        except WeightsNotFinite as exc:
            self._skip(exc, step, through)
        else:
            self.skipped_in_a_row = 0

    def _skip(self, exc: WeightsNotFinite, step: int, through: int) -> None:
        """Count a refused publication, and announce the last version's weights under the next number instead.

        Without a new number the staleness bound would stop admission, and the trainer would wait forever.

        Raises:
            WeightsNotFinite: there is no earlier version, or this was the last of ``MAX_SKIPPED`` in a row.
        """
        self.skipped += 1
        self.skipped_in_a_row += 1
        self._tally.skip_publication()
        if self._clock.must_publish or not self._clock.last:
            raise WeightsNotFinite(
                f"{exc} There is no earlier version to continue with: start from a checkpoint or a model.path with "
                "finite weights."
            ) from exc
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise WeightsNotFinite(
                f"{exc} This is publication {self.skipped_in_a_row} in a row that was refused, so the run stops: lower "
                "trainer.lr, and continue from a checkpoint with finite weights."
            ) from exc
        version = self._announce_again(step, through)
        log.warning(
            "publication skipped (%d in a row): %s Engines keep the weights of the version before, as version %d.",
            self.skipped_in_a_row,
            exc,
            version,
        )

    def _sends_first(self) -> bool:
        """Return whether to send before the folder is written: never the first version, or the one after a rewind."""
        trainer, clock = self._config.trainer, self._clock
        if trainer.folder_first or clock.must_publish or not clock.last or self.publisher.needs_folder:
            return False
        return not self.behind.writer.owes

    def _write_first(self, source: "Source", step: int, through: int) -> None:
        from penstock.consumers.weights.finite_check import CheckedSource

        if self._behind is not None:
            self._behind.rest()
        began = time.monotonic()
        version, abandoned = self._clock.next_version()
        written = self.publisher.write(CheckedSource(source), self.folder, version, self._clock.claim)
        self.publisher.store_deltas(written, version, self._clock.announced, abandoned)
        written_at = time.monotonic()
        publication = Publication(
            model=self._clock.model,
            version=version,
            transport=self.publisher.transport,
            path=str(written.path),
            index=written.index_digest,
            step=step,
            through=through,
            published_s=time.time(),
            num_bytes=written.num_bytes,
            write_s=written_at - began,
            abandoned=abandoned,
        )
        self.publisher.open(publication)
        self._clock.announce(publication)
        if self._behind is not None:
            self._behind.writer.forgive()
        self._offer(version, written.index_digest, written.path)
        self.publisher.send(source, publication)
        self._tally.publish(written.num_bytes, written_at - began, time.monotonic() - written_at)

    def _send_first(self, source: "Source", step: int, through: int) -> None:
        from penstock.consumers.weights.publish import check_layout

        began, before = time.monotonic(), self._clock.last
        self.publisher.leave_copies()
        self.publisher.walk(source)
        copy = self.behind.take(source)
        check_layout(copy.layout, Path(self._config.model.path))
        version, abandoned = self._clock.claim_next()
        copied_at = time.monotonic()
        publication = Publication(
            model=self._clock.model,
            version=version,
            transport=self.publisher.transport,
            path="",
            layout=copy.layout_digest,
            step=step,
            through=through,
            published_s=time.time(),
            num_bytes=copy.num_bytes,
            abandoned=abandoned,
        )
        self.publisher.open(publication, copy)
        self._clock.announce(publication)
        try:
            self.publisher.send(copy, publication, after=before)
        finally:
            self.behind.put(publication, copy)
        self._tally.publish(copy.num_bytes, copied_at - began, time.monotonic() - copied_at)

    def settle(self) -> None:
        """Wait until the newest version has its folder. Raises PublishError if it will have none."""
        if self._behind is not None:
            self._behind.settle()

    def keep(self) -> None:
        """See ``Behind.keep``."""
        if self._behind is not None:
            self._behind.keep()

    def tick(self, *, step: int | None, timeout_s: float) -> int:
        """Publish the next version with the weights of the last one, see ``Trainer.tick``."""
        self._check_drives("tick")
        if not self._subscriber.seat.leads:
            return self._clock.last
        if self._clock.must_publish:
            raise ProtocolError("Publish the restored weights before tick(): the last version may be abandoned.")
        number = None if step is None else _whole(step)
        through = self._progress.await_ranks(timeout_s)
        return self._announce_again(through if number is None else number, through)

    def _announce_again(self, step: int, through: int) -> int:
        """Announce the weights of the last version under the next number; return it. Blocks for their folder.

        Raises:
            PublishError: the last version has no folder.
        """
        self.settle()
        before = self._clock.newest()
        if not before.is_whole:
            raise PublishError(f"Version {before.version} has no folder: publish its weights before tick().")
        version, abandoned = self._clock.claim_next()
        fields = {name: getattr(before, name) for name in ("model", "path", "index", "tensors", "checksums")}
        announced = self._clock.announce(
            Publication(
                **fields,
                transport="disk",
                version=version,
                step=step,
                through=through,
                published_s=time.time(),
                abandoned=abandoned,
            )
        )
        self._offer(version, before.index, before.path)
        return announced

    def pin(self, version: int, name: str) -> Path:
        """Keep the folder of ``version`` for ``name``, see ``Trainer.pin``."""
        pins = self._subscriber.keys.pins(self._clock.model)
        self._subscriber.control.do(lambda client: client.hset(pins, name, version))
        folder = folder_of(self.folder, version)
        try:
            if not folder.is_dir():
                self.settle()
        except BaseException:
            self.unpin(name)
            raise
        if not folder.is_dir():
            self.unpin(name)
            raise PublishError(f"Version {version} is no longer kept: raise trainer.keep_versions, or pin it earlier.")
        return folder

    def unpin(self, name: str) -> None:
        """Remove the pin ``name``, so that its folder may be deleted. Blocks for one round trip."""
        pins = self._subscriber.keys.pins(self._clock.model)
        self._subscriber.control.do(lambda client: client.hdel(pins, name))

    def _check_drives(self, verb: str) -> None:
        seat = self._subscriber.seat
        if not seat.drives:
            raise ProtocolError(f"Role {seat.role} may not {verb}(): only role {seat.roles[0]} drives the clock.")


def _whole(step: int) -> int:
    """Return ``step`` as an integer that a record can hold; raise PublishError otherwise."""
    try:
        whole = operator.index(step)
    except TypeError:
        whole = LEAST - 1
    if not LEAST <= whole <= -LEAST - 1:
        raise PublishError(f"The step of a publication is {safe_repr(step)}: give publish() an integer of 64 bits.")
    return whole


def weights_dir_of(config: Config) -> Path:
    """Return the folder of a run's published versions."""
    return Path(config.trainer.weights_dir or config.run_dir / "weights").absolute()
