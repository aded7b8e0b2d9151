"""Writing of a history: files of the recorder's own epoch, each commit synced, the oldest deleted to limit the size."""

import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import HistoryError
from penstock.history.blocks import LookUp
from penstock.history.part import OpenPart, PartName, begin, journal_of, parts_of, size_of
from penstock.history.row import SampleRow, Use

log = logging.getLogger(__name__)

#: Number of files in a history of ``max_bytes``; smallest and largest size of a file.
NUM_PARTS, LEAST_PART_BYTES, MOST_PART_BYTES = 16, 1024 * 1024, 1024 * 1024 * 1024


class HistoryWriter:
    """Writes the rows of one recorder. Not thread-safe.

    Args:
        folder: folder of the history, ``RunFolder.history``; created if it does not exist.
        epoch: epoch of the recorder's election: greater than that of every recorder before it.
        max_bytes: limit for all files of the folder. Beyond it the oldest are deleted.
        part_bytes: size at which a new file is started; None: a sixteenth of ``max_bytes``, but
            1 MiB to 1 GiB.
        look_up: returns the pieces of token ids, by the run's tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        epoch: int,
        *,
        max_bytes: int,
        part_bytes: int | None = None,
        look_up: LookUp = lambda _: {},
    ) -> None:
        self._folder = folder
        self._epoch = epoch
        self._max_bytes = max_bytes
        self._look_up = look_up
        usual = min(max(max_bytes // NUM_PARTS, LEAST_PART_BYTES), MOST_PART_BYTES)
        self._part_bytes = usual if part_bytes is None else part_bytes
        #: The newest file of this process. Files of other processes are never written.
        self._part: OpenPart | None = None

    def write(self, rows: Sequence[SampleRow], uses: Sequence[Use] = ()) -> None:
        """Write rows and uses. They are on disk when this returns; a row of the same (job, k, part) is replaced.

        After an error any part of them may have been written: write them all again. Blocks for the disk, and up to a
        minute for a reader.

        Raises:
            DiskFull: the disk is full.
            HistoryError: the file cannot be written; the next call starts another one.
        """
        if not rows and not uses:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._rotate()
        try:
            part.put(rows, uses)
        except HistoryError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; ``write`` would start a new one."""
        if self._part is not None:
            self._part.connection.close()
        self._part = None

    def _rotate(self) -> OpenPart:
        """Return the file to write to: the newest, or another one if that is full."""
        if self._part is not None and size_of(self._part.path) < self._part_bytes:
            return self._part
        self.close()
        name, connection = begin(self._folder, self._epoch)
        self._part = OpenPart(name.path(self._folder), connection, self._look_up)
        self._keep_within(name)
        return self._part

    def _keep_within(self, newest: PartName) -> None:
        """Delete the oldest files until the rest, and one more of full size, keep within ``max_bytes``."""
        paths = [name.path(self._folder) for name in parts_of(self._folder) if name != newest]
        sizes = [size_of(path) for path in paths]
        excess = sum(sizes) + max(self._part_bytes, size_of(newest.path(self._folder))) - self._max_bytes
        for path, size in zip(paths, sizes, strict=True):
            if excess <= 0:
                return
            log.warning("the history is full (history.max_bytes): deleting its oldest file %s", path.name)
            for one in (path, journal_of(path)):
                one.unlink(missing_ok=True)
            excess -= size
