"""Payloads as files: a payload server without a process, for workers, buffer and trainers that share a folder.

    put      NAME%new, by a rename of what is whole          worker   (SET NX EX of a server)
    keep     NAME%new ─rename─> NAME                         leader   (PERSIST)
    read     NAME or NAME%new, whole or a range of it        trainer  (GET, GETRANGE)
    free     out of the way by a rename, unlinked later      leader   (UNLINK)
    expire   NAME%new that nobody committed in time is gone  leader   (a server does it by itself)

The address is ``file:///FOLDER``; a run's files lie in ``FOLDER/RUN/x/``, and ``FOLDER/RUN`` bears a mark: nothing is
written into a folder, or deleted from it, that holds somebody else's files. What makes a payload count stays in Redis,
with all its fences: names carry the lease's token, so a worker that lost its lease writes a file that nobody reads.
Processes that die lose nothing. A machine that dies may lose what was written in its last second, as an append-only
file with fsync every second does; such a payload is missed or fails its checksum, and is a counted loss.

Errors of the file system pass for a server that does not answer (``redis.ConnectionError``), so that everybody waits
and asks again as they do for one; a full one is QueueFull. A network file system whose server is gone answers with no
error either: the leader, who has others to serve, asks it in a thread that may be left behind.
"""

import itertools
import logging
import os
import queue
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from redis.exceptions import ConnectionError as NoAnswer

from penstock.addresses import path_of
from penstock.errors import ConfigError, QueueFull
from penstock.payloads.write_back import WriteBack
from penstock.system.disk import FULL
from penstock.system.one_at_a_time import OneAtATime

#: Endings of files; no quoted name has such an ending, for a percent sign is followed by two hex digits there.
PENDING, WRITING, FREED = "%new", "%tmp", "%old"

#: File that says whose a run's folder is.
MARK = ".penstock-payloads"

#: Names of the folders in it, and how the names of the files in those begin.
PARTS, KINDS = "0123456789abcdef", ("payload:", "side:")

#: Longest wait of the leader for an answer, and files that it asks for at once.
ANSWER_S, CHUNK = 2.0, 64

#: Share of a file system above which nothing is written any more.
FULL_SHARE = 0.97

T = TypeVar("T")
log = logging.getLogger(__name__)


class PayloadFolder:
    """One shared folder of payloads; see ``PayloadStore``. Blocks for the file system alone. Thread-safe.

    Args:
        url: ``file:///FOLDER``; it is made when it is not there (ConfigError where that fails).
        timeout_s: longest wait of ``ping``, and for each ``CHUNK`` files of ``keep`` and ``unlink``.
    """

    #: Columns need a Redis.
    columns = None

    def __init__(self, url: str, *, timeout_s: float = ANSWER_S) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._asking = OneAtATime("payload folder answers")
        try:
            self.path = path_of(url)
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"The folder of payloads {url} cannot be made or read: {exc}.") from exc
        self._lock = threading.Lock()
        self._write_back = WriteBack(self.path)
        #: What this process names files by until they have their own name.
        self._me = f"{os.getpid():x}-{secrets.token_hex(4)}-"
        self._numbers = itertools.count()
        #: Files to be unlinked; None ends the thread that does it.
        self._freed: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._freeing: threading.Thread | None = None

    def put(self, pairs: Sequence[tuple[str, bytes]]) -> list[QueueFull | None]:
        """Write (key, bytes) that nobody has committed yet; again with the same: nothing changes.

        Returns:
            None for each that is written, QueueFull for each that found no room.
        """
        answers: list[QueueFull | None] = []
        with self._answering():
            for name, data in pairs:
                try:
                    self._put(self._file(name), data)
                    answers.append(None)
                except OSError as exc:
                    if exc.errno not in FULL:
                        raise
                    answers.append(QueueFull(f"The folder of payloads {self.path} has no room: {exc.strerror}."))
        self._write_back.soon()
        return answers

    def _put(self, path: str, data: bytes) -> None:
        temporary = f"{path}{WRITING}{self._me}{next(self._numbers)}"
        file = self._open(temporary)
        try:
            try:
                _write_all(file, data)
            finally:
                os.close(file)
            os.rename(temporary, path + PENDING)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _open(self, path: str) -> int:
        """A new file."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            part = Path(path).parent
            _claim(part.parent)
            part.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def claim(self, prefix: str) -> None:
        """Make a run's folder, and mark it as one of payloads; ``prefix`` is that of the run's keys.

        Raises:
            ConfigError: there is a folder of that name, and it holds files of somebody else.
        """
        with self._answering():
            _claim(self._run(prefix))

    def check(self) -> None:
        """It was made when it was opened, which is all that can be known."""

    def ping(self) -> None:
        """See whether the file system answers in time; a folder that is not there is one without payloads."""
        self._ask(self._look)

    def _look(self) -> None:
        with suppress(FileNotFoundError):
            os.stat(self.path)

    def is_full(self) -> bool:
        """Is there hardly any room left?"""
        with self._answering():
            found = os.statvfs(self.path)
        return found.f_bavail < (1 - FULL_SHARE) * found.f_blocks

    def keep(self, names: Sequence[str]) -> list[bool]:
        """Make committed payloads permanent; False where one is gone.

        Raises:
            ConfigError: this process sees nothing of the run at all: it has another folder than the workers.
        """
        kept = [one for chunk in _chunks(names) for one in self._ask(partial(self._keep_all, chunk))]
        if names and not any(kept):
            self._ask(partial(self._check_shared, names[0]))
        return kept

    def _keep_all(self, names: Sequence[str]) -> list[bool]:
        return [self._keep(self._file(name)) for name in names]

    def _keep(self, path: str) -> bool:
        try:
            os.rename(path + PENDING, path)
        except FileNotFoundError:
            return os.path.exists(path)
        return True

    def _check_shared(self, name: str) -> None:
        folder = self._run(name)
        with self._answering():
            is_there = folder.exists()
        if not is_there:
            raise ConfigError(
                f"Samples were committed whose payloads lie in {self.path}, but here that folder has no {folder.name}: "
                "give it to this machine too, at the same path or as redis.payload_servers.NAME of its own."
            )

    def unlink(self, names: Sequence[str]) -> None:
        """Free payloads; what is gone does not matter. They are gone at once, and their bytes soon.

        A file whose bytes are on their way to the disk is not deleted before they are there: a thread waits for that.
        """
        for chunk in _chunks(names):
            self._ask(partial(self._put_all_aside, chunk))
        if self._freeing is None:
            with self._lock:
                if self._freeing is None:
                    self._freeing = threading.Thread(target=self._free, name="payload folder frees", daemon=True)
                    self._freeing.start()

    def _put_all_aside(self, names: Sequence[str]) -> None:
        for path in map(self._file, names):
            for file in (path, path + PENDING):
                with suppress(FileNotFoundError):
                    self._put_aside(file)

    def _put_aside(self, file: str) -> None:
        freed = f"{file}{FREED}"
        try:
            os.rename(file, freed)
        except OSError as exc:
            # A folder that has to grow for the longer name must not keep a full disk full.
            if exc.errno not in FULL:
                raise
            os.unlink(file)
        else:
            self._freed.put(freed)

    def _free(self) -> None:
        while (file := self._freed.get()) is not None:
            try:
                os.unlink(file)
            except FileNotFoundError:
                continue
            except OSError as exc:
                # ``expire`` finds it again.
                log.warning("a payload that is not needed any more stays in %s: %s", self.path, exc)

    def expire(self, prefix: str, ttl_s: float) -> int:
        """Remove what nobody committed in ``ttl_s``, and what a process that died left half done; how many files."""
        gone, now = 0, time.time()
        self.ping()
        with self._answering():
            for file in self._files(prefix):
                if not file.name.endswith((PENDING, FREED)) and WRITING not in file.name:
                    continue
                with suppress(FileNotFoundError):
                    if now - file.stat().st_mtime > ttl_s:
                        os.unlink(file.path)
                        gone += 1
        return gone

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """Payloads in the order of ``names``; None where one is gone.

        Raises:
            ConfigError: as of ``keep``.
        """
        return [self._read(name) for name in names]

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """(key, first byte, number of bytes) each; None where the payload is gone, or ends before it.

        Raises:
            ConfigError: as of ``keep``.
        """
        return [self._read(*one) or None for one in ranges]

    def _read(self, name: str, begin: int = 0, num_bytes: int = -1) -> bytes | None:
        with self._answering():
            data = self._read_file(self._file(name), begin, num_bytes)
        if data is None:
            self._check_shared(name)
        return data

    def _read_file(self, path: str, begin: int, num_bytes: int) -> bytes | None:
        # In this order: the leader may rename it between the two looks.
        for file in (path, path + PENDING, path):
            with suppress(FileNotFoundError):
                opened = os.open(file, os.O_RDONLY)
                try:
                    return os.pread(opened, os.fstat(opened).st_size if num_bytes < 0 else num_bytes, begin)
                finally:
                    os.close(opened)
        return None

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        """(key, is it permanent) of all payloads of a run; ``prefix`` is that of its keys."""
        with self._answering():
            for file in self._files(prefix):
                if WRITING not in file.name and not file.name.endswith(FREED):
                    name = file.name.removesuffix(PENDING)
                    yield prefix + unquote(name), name == file.name

    def delete(self, prefix: str) -> int:
        """Delete all payloads of a run; how many. What else lies in its folder stays.

        Raises:
            ConfigError: the folder of that name is not one of payloads.
        """
        folder, count = self._run(prefix), 0
        with self._answering():
            if not folder.exists():
                return 0
            _claim(folder)
            for file in self._files(prefix):
                with suppress(FileNotFoundError):
                    os.unlink(file.path)
                    count += 1
            with suppress(OSError):  # somebody else's file keeps its folder
                for part in _parts(folder):
                    part.rmdir()
                (folder / MARK).unlink()
                folder.rmdir()
        return count

    def usage(self) -> tuple[int, int]:
        """(used, total) bytes of the file system."""
        with self._answering():
            found = shutil.disk_usage(self.path)
        return found.used, found.total

    def close(self) -> None:
        """Bring what was written to the disk, and free what was to be freed. Blocks."""
        if self._freeing is not None:
            self._freed.put(None)
            self._freeing.join()
            self._freeing = None
        self._write_back.close()

    def _ask(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; NoAnswer where it does not come back in time, or an earlier one has not."""
        with self._answering():
            return self._asking.do(work, self._timeout_s)

    def _run(self, name: str) -> Path:
        """Folder of the run that a key belongs to: its name is in braces."""
        return self.path / name[name.index("{") + 1 : name.index("}")]

    def _file(self, name: str) -> str:
        run, _, rest = name.partition("{")[2].partition("}:")
        file = quote(rest, safe=":")
        return f"{self.path}/{run}/{PARTS[zlib.crc32(file.encode()) & 15]}/{file}"

    def _files(self, prefix: str) -> Iterator[os.DirEntry[str]]:
        """Files of a run by the names that they are given here, in any stage of their lives."""
        for part in _parts(self._run(prefix)):
            with os.scandir(part) as found:
                yield from (file for file in found if file.name.startswith(KINDS))

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise NoAnswer(f"the folder of payloads {self.path} does not answer: {exc}") from exc


def _claim(folder: Path) -> None:
    """Mark a run's folder as one of payloads; ConfigError where somebody else's files lie in it."""
    if (folder / MARK).exists():
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if others := [file.name for file in folder.iterdir() if file.name != MARK]:
        raise ConfigError(
            f"{folder} holds {others[0]!r} and is not a folder of payloads: name another folder in "
            "redis.payload_servers, or another --run."
        )
    (folder / MARK).touch(mode=0o600)


def _parts(folder: Path) -> list[Path]:
    """The folders of a run in which its files lie; a link is none of them."""
    return [part for name in PARTS if (part := folder / name).is_dir() and not part.is_symlink()]


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), CHUNK):
        yield names[start : start + CHUNK]


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
