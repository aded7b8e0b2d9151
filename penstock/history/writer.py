"""Writing of a history: files of the recorder's own epoch, each commit synced, the oldest deleted to limit the size."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import HistoryError
from penstock.history.packing import LookUp, nothing_known
from penstock.history.part import OpenPart, PartName, begin, journal_of, open_to_read, parts_of, size_of, translated
from penstock.history.row import SampleRow, Use

#: Number of files in a history of ``max_bytes``; smallest and largest size of a file.
NUM_PARTS, LEAST_PART_BYTES, MOST_PART_BYTES = 16, 1024 * 1024, 1024 * 1024 * 1024


class HistoryWriter:
    """Writes the rows of one recorder. Not thread-safe.

    Args:
        folder: folder of the history, ``RunFolder.history``; created if it does not exist.
        epoch: epoch of the recorder's election: greater than that of every recorder before it.
        max_bytes: limit for all files of the folder. Beyond it the oldest are deleted, and their rows are counted.
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
        look_up: LookUp = nothing_known,
    ) -> None:
        self._folder = folder
        self._epoch = epoch
        self._max_bytes = max_bytes
        self._look_up = look_up
        usual = min(max(max_bytes // NUM_PARTS, LEAST_PART_BYTES), MOST_PART_BYTES)
        self._part_bytes = usual if part_bytes is None else part_bytes
        #: Files of this process, the newest last. Files of other processes are never written.
        self._parts: list[OpenPart] = []

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
        self._rotate()
        newest = self._parts[-1]
        jobs = {row.job for row in rows} | {use.job for use in uses}
        homes = {job: self._home(job) or newest for job in jobs}
        for part in list(self._parts):
            own = [row for row in rows if homes[row.job] is part]
            used = [use for use in uses if homes[use.job] is part]
            if own or used:
                self._put(part, own, used)

    def close(self) -> None:
        """Close the files; ``write`` would start a new one."""
        for part in self._parts:
            part.connection.close()
        self._parts = []

    def _put(self, part: OpenPart, rows: Sequence[SampleRow], uses: Sequence[Use]) -> None:
        try:
            part.put(rows, uses)
        except HistoryError:
            self._parts.remove(part)
            part.connection.close()
            raise

    def _home(self, job: str) -> OpenPart | None:
        """Return our file that has samples of a job; those of a job stay together."""
        return next((part for part in reversed(self._parts) if part.has(job)), None)

    def _rotate(self) -> None:
        if self._parts and size_of(self._parts[-1].path) < self._part_bytes:
            return
        name, connection = begin(self._folder, self._epoch)
        self._parts.append(OpenPart(name, name.path(self._folder), connection, self._look_up))
        self._keep_within()

    def _keep_within(self) -> None:
        """Delete the oldest files until the rest, and one more of full size, keep within ``max_bytes``."""
        newest = self._parts[-1]
        there = [name for name in parts_of(self._folder) if name != newest.name]
        sizes = {name: size_of(name.path(self._folder)) for name in there}
        excess = sum(sizes.values()) + max(self._part_bytes, size_of(newest.path)) - self._max_bytes
        for name in there:
            if excess <= 0:
                return
            self._delete(name)
            excess -= sizes[name]

    def _delete(self, name: PartName) -> None:
        """Delete a file, and record in the newest its number of rows, and those that it had recorded."""
        path, newest = name.path(self._folder), self._parts[-1]
        for part in [part for part in self._parts if part.name == name]:
            part.connection.close()
            self._parts.remove(part)
        newest.note([(str(name), _count_in(path)), *_gone_before(path)])
        for one in (path, journal_of(path)):
            one.unlink(missing_ok=True)


def _count_in(path: Path) -> int | None:
    """Count the samples of a file; None if they cannot be counted."""
    with contextlib.suppress(HistoryError):
        found = open_to_read(path)
        if found is None:
            return 0
        with contextlib.closing(found), translated(path):
            return int(found.execute("SELECT count(*) FROM samples").fetchone()[0])
    return None


def _gone_before(path: Path) -> list[tuple[str, int | None]]:
    with contextlib.suppress(HistoryError):
        found = open_to_read(path)
        if found is not None:
            with contextlib.closing(found), translated(path):
                return [(str(name), samples) for name, samples in found.execute("SELECT name, samples FROM gone")]
    return []
