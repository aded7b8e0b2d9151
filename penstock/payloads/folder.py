"""Payloads as files: a payload store without a server, in a folder shared by workers, buffer and trainers.

    put      NAME%new, by a rename of the complete file      worker   (SET NX EX of a server)
    keep     NAME%new ─rename─> NAME, unkeep the other way   leader   (PERSIST, PEXPIRE)
    read     NAME or NAME%new, or a range of it              trainer  (GET, GETRANGE)
    free     out of the way by a rename, unlinked later      leader   (UNLINK)
    expire   deletes each NAME%new not committed in time     leader   (a server does it itself)

The address is ``file:///FOLDER``; a run's files are in ``FOLDER/RUN/x/``, and ``FOLDER/RUN`` has a mark: folders with
other files are never written to. Redis decides which payloads count, with all its fences: names contain the lease's
token, so a worker that lost its lease writes a file that is never read.
Processes that die lose nothing. A machine that dies may lose what was written in its last second, as an append-only
file with fsync every second does; such a payload is missing or fails its checksum, and is a counted loss.

Errors of the file system are raised as those of a server that does not answer (``redis.ConnectionError``), so that
callers retry as for a server; a full one raises QueueFull. A network file system whose server is gone may block
without an error: it is called in a thread that may be abandoned.
"""

import errno
import itertools
import logging
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from redis.exceptions import ConnectionError as NoAnswer

from penstock.config.redis import path_of
from penstock.errors import ConfigError, QueueFull
from penstock.payloads.daemon_threads import DaemonThreads, Step
from penstock.payloads.read_file import Pick, WriteBack, part, read_file, whole
from penstock.payloads.run_files import (
    FREED,
    MARK,
    PENDING,
    WRITING,
    check_access,
    claim,
    delete,
    file_of,
    files,
    if_there,
    names_in,
    parts,
    run_of,
    unkeep,
    write_all,
)
from penstock.records.causes import PayloadFolderFull
from penstock.system.disk import FULL

log = logging.getLogger(__name__)


class FreedFiles:
    """Unlinks files of one folder in a thread, which may block for the file system. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        #: Files to unlink; None ends the thread.
        self._files: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, file: str) -> None:
        """Enqueue a file for deletion. Returns at once."""
        self._files.put(file)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._unlink_all, name="payload folder frees", daemon=True)
                    self._thread.start()

    def _unlink_all(self) -> None:
        while (file := self._files.get()) is not None:
            try:
                os.unlink(file)
            except FileNotFoundError:
                continue
            except OSError as exc:
                # ``PayloadFolder.expire`` finds it again.
                log.warning("a payload that is not needed any more stays in %s: %s", self._folder, exc)

    def close(self, silent_s: float) -> None:
        """Unlink the remaining files. Blocks for at most ``silent_s`` after the last file."""
        if self._thread is None:
            return
        self._files.put(None)
        left = -1
        while self._thread.is_alive() and (there := self._files.qsize()) != left:
            left = there
            self._thread.join(silent_s)
        if self._thread.is_alive():
            # ``PayloadFolder.expire`` finds them again.
            log.warning("payloads that are not needed any more stay in %s: it does not answer", self._folder)
        self._thread = None


#: Errors of a file system whose server does not answer; other errors of creating a folder are mistakes of the user.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, *FULL}

#: Longest wait of the leader for an answer, and files per call.
ANSWER_S, CHUNK = 2.0, 64

#: Longest wait for a file system without progress, on close.
CLOSE_S = 10.0

#: Share of a file system above which nothing is written any more.
FULL_SHARE = 0.97

T = TypeVar("T")


class PayloadFolder:
    """One shared folder of payloads; see ``PayloadStore``. Blocks only for the file system. Thread-safe.

    Args:
        url: ``file:///FOLDER``; ConfigError if it is invalid. Only ``claim`` and ``put`` create it: in a new empty
            folder on the wrong machine all payloads would seem lost.
        makes: whether they may; False if this machine's configuration does not name it: only the run's folder in it.
        timeout_s: longest wait for progress of the file system, in all methods but ``put`` and ``is_full``.
    """

    #: Columns need a Redis.
    columns = None

    def __init__(self, url: str, *, timeout_s: float = ANSWER_S, makes: bool = True) -> None:
        self.url = url
        self._makes = makes
        self._timeout_s = timeout_s
        self._asking = DaemonThreads("payload folder answers")
        try:
            self.path = path_of(url)
        except ValueError as exc:
            raise ConfigError(f"The folder of payloads {url} cannot be read: it {exc}.") from exc
        self._write_back = WriteBack(self.path)
        #: Prefix of this process' temporary file names.
        self._me = f"{os.getpid():x}-{secrets.token_hex(4)}-"
        self._numbers = itertools.count()
        self._freed = FreedFiles(self.path)

    def put(self, pairs: Sequence[tuple[str, bytes]], step: Step = lambda: None) -> list[QueueFull | None]:
        """Write (key, bytes) that are not committed yet; repeating a write changes nothing.

        Args:
            step: called whenever the file system has answered.

        Returns:
            None for each that is written, QueueFull for each that did not fit.
        """
        answers: list[QueueFull | None] = []
        with self._answering():
            for name, data in pairs:
                try:
                    self._put(self._file(name), data, step)
                    step()
                    answers.append(None)
                except OSError as exc:
                    if exc.errno not in FULL:
                        raise
                    cause = PayloadFolderFull(str(self.path), str(exc.strerror))
                    answers.append(QueueFull(f"The folder of payloads {self.path} has no room: {exc.strerror}.", cause))
        self._write_back.soon()
        return answers

    def _put(self, path: str, data: bytes, step: Step) -> None:
        temporary = f"{path}{WRITING}{self._me}{next(self._numbers)}"
        file = self._open(temporary)
        try:
            try:
                write_all(file, data, step)
            finally:
                os.close(file)
            os.rename(temporary, path + PENDING)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _open(self, path: str) -> int:
        """Create and open a new file."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            part = Path(path).parent
            self._make()
            claim(part.parent)
            part.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def claim(self, prefix: str) -> None:
        """Create a run's folder, and mark it as a folder of payloads; ``prefix`` is that of the run's keys.

        Raises:
            ConfigError: a folder of that name exists, and holds other files.
        """
        self._ask(partial(self._claim, prefix))

    def _claim(self, prefix: str, step: Step) -> None:
        self._make()
        step()
        claim(self._run(prefix))

    def _make(self) -> None:
        if self._makes:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                if exc.errno in PASSING:
                    raise
                raise ConfigError(f"The folder of payloads {self.path} cannot be made: {exc.strerror}.") from exc
        elif not self.path.exists():
            raise NoAnswer(f"the folder of payloads {self.path} is not on this machine: mount it, or make it")

    def check(self) -> None:
        """Raise ConfigError if this machine does not have the folder."""
        if not self._ask(lambda step: self.path.is_dir()):
            raise ConfigError(
                f"This machine has no folder {self.path}: mount it or make it here, or name another one that is here "
                "and that workers, buffer and trainers share."
            )

    def ping(self, prefix: str = "") -> None:
        """Check that the file system answers in time; a folder that does not exist counts as empty.

        For a run it makes the same calls as ``expire``, so that ``expire`` is not blocked by errors that ping misses.
        """
        self._ask(partial(self._look, prefix))

    def _look(self, prefix: str, step: Step) -> None:
        with suppress(FileNotFoundError):
            os.stat(self.path)
            if prefix:
                check_access(self._run(prefix))

    def is_full(self) -> bool:
        """Return whether the file system is nearly full."""
        with self._answering():
            try:
                found = os.statvfs(self.path)
            except FileNotFoundError:
                if not self._makes:
                    raise
                return False
        return found.f_bavail < (1 - FULL_SHARE) * found.f_blocks

    def keep(self, names: Sequence[str]) -> list[bool]:
        """Make committed payloads permanent; False for a missing one.

        Raises:
            ConfigError: the run's folder is missing here: this process has another folder than the workers.
        """
        kept = [one for chunk in _chunks(names) for one in self._ask(partial(self._keep_all, chunk))]
        if names and not any(kept):
            self._ask(lambda step: self._check_shared(names[0]))
        return kept

    def _keep_all(self, names: Sequence[str], step: Step) -> list[bool]:
        return [self._keep(self._file(name)) for name in names]

    def _keep(self, path: str) -> bool:
        with if_there():
            os.rename(path + PENDING, path)
            return True
        with if_there():
            os.lstat(path)
            return True
        return False

    def unkeep(self, names: Sequence[str], ttl_s: float) -> None:
        """Undo ``keep``: the payloads expire once ``expire`` finds them older than its time."""
        for chunk in _chunks(names):
            self._ask(partial(self._unkeep_all, chunk))

    def _unkeep_all(self, names: Sequence[str], step: Step) -> None:
        for path in map(self._file, names):
            unkeep(path)
            step()

    def _check_shared(self, name: str) -> None:
        if not self._is_marked(name):
            raise ConfigError(
                f"Samples were committed whose payloads lie in {self.path}, but here that folder has no "
                f"{run_of(name)}: give it to this machine too, at the same path or as redis.payload_servers.NAME of "
                "its own."
            )

    def _is_marked(self, name: str) -> bool:
        """Return whether this process sees the mark in the run's folder."""
        return (self._run(name) / MARK).exists()

    def unlink(self, names: Sequence[str]) -> None:
        """Free payloads; missing ones are ignored. They are gone at once, and their bytes soon.

        A file that is being written back is not deleted before that ends: a thread waits for it.
        """
        for chunk in _chunks(names):
            self._ask(partial(self._put_all_aside, chunk))

    def _put_all_aside(self, names: Sequence[str], step: Step) -> None:
        for path in map(self._file, names):
            for file in (path, path + PENDING):
                with if_there():
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

    def expire(self, prefix: str, ttl_s: float) -> int:
        """Delete files not committed within ``ttl_s``, and files of dead processes; return the number of files."""
        self.ping(prefix)
        return self._ask(partial(self._expire, prefix, ttl_s))

    def _expire(self, prefix: str, ttl_s: float, step: Step) -> int:
        gone, now = 0, time.time()
        for file in files(self._run(prefix)):
            step()
            if not file.name.endswith((PENDING, FREED)) and WRITING not in file.name:
                continue
            with suppress(FileNotFoundError):
                if now - file.stat().st_mtime > ttl_s:
                    os.unlink(file.path)
                    gone += 1
        return gone

    def read(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Read payloads by (key, size in the record); None for one that is missing, or longer.

        Raises:
            ConfigError: see ``keep``.
        """
        return self._ask(lambda step: [self._read(name, partial(whole, most), step) for name, most in wanted])

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Read (key, first byte, number of bytes); None if the payload is missing, or ends before.

        Raises:
            ConfigError: see ``keep``.
        """
        picks = [(name, partial(part, begin, num_bytes)) for name, begin, num_bytes in ranges]
        return self._ask(lambda step: [self._read(name, pick, step) or None for name, pick in picks])

    def _read(self, name: str, pick: Pick, step: Step) -> bytes | None:
        path = self._file(name)
        # In this order: the leader may rename it between two attempts.
        for file in (path, path + PENDING, path):
            data = read_file(file, pick, step)
            step()
            if data is not None:
                return data
        self._check_shared(name)
        return None

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        """Yield (key, is it permanent) of all payloads of a run; ``prefix`` is that of its keys.

        Raises:
            ConfigError: this machine does not see the run's folder, so its payloads are not known.
        """
        self._check_marked(prefix)
        for place in self._ask(lambda step: parts(self._run(prefix))):
            for file in self._ask(partial(names_in, place)):
                if WRITING not in file and not file.endswith(FREED):
                    name = file.removesuffix(PENDING)
                    yield prefix + unquote(name), name == file
        # A file system that was unmounted meanwhile ends a scan as an empty folder does.
        self._check_marked(prefix)

    def _check_marked(self, prefix: str) -> None:
        self.check()
        if not self._ask(lambda step: self._is_marked(prefix)):
            raise ConfigError(
                f"In {self.path} this machine sees no folder of the run {run_of(prefix)}, so its payloads are "
                "not known: run this on a machine that workers write from, or mount what they have there. The folder "
                "is also missing if no worker has ever written to it."
            )

    def delete(self, prefix: str) -> int:
        """Delete all payloads of a run; return their number. Other files in its folder stay.

        Raises:
            ConfigError: the folder of that name is not one of payloads.
        """
        return self._ask(partial(delete, self._run(prefix)))

    def usage(self) -> tuple[int, int]:
        """Return (used, total) bytes of the file system. Raises ConfigError if the folder does not exist here."""
        self.check()
        found = self._ask(lambda step: shutil.disk_usage(self.path))
        return found.used, found.total

    def close(self) -> None:
        """Sync written files and delete freed ones. Blocks for at most ``CLOSE_S`` each without progress."""
        self._freed.close(CLOSE_S)
        try:
            DaemonThreads("payload folder closes").do(lambda step: self._write_back.close(), CLOSE_S)
        except TimeoutError as exc:
            log.warning("payloads in %s may not be on the disk: %s", self.path, exc)

    def _ask(self, work: Callable[[Step], T]) -> T:
        """Return the result of ``work``; raise NoAnswer if it does not return in time, or an earlier call has not."""
        with self._answering():
            return self._asking.do(work, self._timeout_s)

    def _run(self, name: str) -> Path:
        """Return the folder of the run that a key belongs to: its name is in braces."""
        return self.path / run_of(name)

    def _file(self, name: str) -> str:
        return file_of(self.path, name)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise NoAnswer(f"the folder of payloads {self.path} does not answer: {exc}") from exc


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), CHUNK):
        yield names[start : start + CHUNK]
