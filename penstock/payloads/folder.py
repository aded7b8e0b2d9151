"""Payloads as files: a payload server without a process, for workers, buffer and trainers that share a folder.

    put      NAME%new, by a rename of what is whole          worker   (SET NX EX of a server)
    keep     NAME%new ─rename─> NAME, unkeep the other way   leader   (PERSIST, PEXPIRE)
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
error either: it is asked in a thread that may be left behind.
"""

import errno
import itertools
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from redis.exceptions import ConnectionError as NoAnswer

from penstock.errors import ConfigError, QueueFull
from penstock.payloads.addresses import path_of
from penstock.payloads.daemon_threads import DaemonThreads, Step
from penstock.payloads.freed_files import FreedFiles
from penstock.payloads.read_file import Pick, part, read_file, whole
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
from penstock.payloads.write_back import WriteBack
from penstock.protocol.records.causes import PayloadFolderFull
from penstock.system.disk import FULL

#: Errors of a file system whose server does not answer; others of making a folder are mistakes.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, *FULL}

#: Longest wait of the leader for an answer, and files that it asks for at once.
ANSWER_S, CHUNK = 2.0, 64

#: Longest wait for a file system that does nothing, when it is left.
CLOSE_S = 10.0

#: Share of a file system above which nothing is written any more.
FULL_SHARE = 0.97

T = TypeVar("T")
log = logging.getLogger(__name__)


class PayloadFolder:
    """One shared folder of payloads; see ``PayloadStore``. Blocks for the file system alone. Thread-safe.

    Args:
        url: ``file:///FOLDER``; ConfigError where it names none. Only ``claim`` and ``put`` make it, for whoever looks
            into a folder that was just made would take what lies elsewhere for gone.
        makes: whether they may; False where nobody on this machine named it, and they only make the run's folder in it.
        timeout_s: longest wait for the file system to do anything, of whoever asks but ``put`` and ``is_full``.
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
        #: What this process names files by until they have their own name.
        self._me = f"{os.getpid():x}-{secrets.token_hex(4)}-"
        self._numbers = itertools.count()
        self._freed = FreedFiles(self.path)

    def put(self, pairs: Sequence[tuple[str, bytes]], step: Step = lambda: None) -> list[QueueFull | None]:
        """Write (key, bytes) that nobody has committed yet; again with the same: nothing changes.

        Args:
            step: called whenever the file system has answered.

        Returns:
            None for each that is written, QueueFull for each that found no room.
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
        """A new file."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            part = Path(path).parent
            self._make()
            claim(part.parent)
            part.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def claim(self, prefix: str) -> None:
        """Make a run's folder, and mark it as one of payloads; ``prefix`` is that of the run's keys.

        Raises:
            ConfigError: there is a folder of that name, and it holds files of somebody else.
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
        """See whether this machine has the folder at all. Raises ConfigError where it has not."""
        if not self._ask(lambda step: self.path.is_dir()):
            raise ConfigError(
                f"This machine has no folder {self.path}: mount it or make it here, or name another one that is here "
                "and that workers, buffer and trainers share."
            )

    def ping(self, prefix: str = "") -> None:
        """See whether the file system answers in time; a folder that is not there is one without payloads.

        Of a run it asks what ``expire`` does: one of the two must not call away what answers to the other.
        """
        self._ask(partial(self._look, prefix))

    def _look(self, prefix: str, step: Step) -> None:
        with suppress(FileNotFoundError):
            os.stat(self.path)
            if prefix:
                check_access(self._run(prefix))

    def is_full(self) -> bool:
        """Is there hardly any room left?"""
        with self._answering():
            try:
                found = os.statvfs(self.path)
            except FileNotFoundError:
                if not self._makes:
                    raise
                return False
        return found.f_bavail < (1 - FULL_SHARE) * found.f_blocks

    def keep(self, names: Sequence[str]) -> list[bool]:
        """Make committed payloads permanent; False where one is gone.

        Raises:
            ConfigError: this process sees nothing of the run at all: it has another folder than the workers.
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
        """Take back what ``keep`` did: they are gone once ``expire`` finds them older than its time."""
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
        """Does this process see the run's folder, as whoever wrote there left it?"""
        return (self._run(name) / MARK).exists()

    def unlink(self, names: Sequence[str]) -> None:
        """Free payloads; what is gone does not matter. They are gone at once, and their bytes soon.

        A file whose bytes are on their way to the disk is not deleted before they are there: a thread waits for that.
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
        """Remove what nobody committed in ``ttl_s``, and what a process that died left half done; how many files."""
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
        """(key, bytes that it has by its record) each; None where one is gone, or is longer.

        Raises:
            ConfigError: as of ``keep``.
        """
        return self._ask(lambda step: [self._read(name, partial(whole, most), step) for name, most in wanted])

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """(key, first byte, number of bytes) each; None where the payload is gone, or ends before it does.

        Raises:
            ConfigError: as of ``keep``.
        """
        picks = [(name, partial(part, begin, num_bytes)) for name, begin, num_bytes in ranges]
        return self._ask(lambda step: [self._read(name, pick, step) or None for name, pick in picks])

    def _read(self, name: str, pick: Pick, step: Step) -> bytes | None:
        path = self._file(name)
        # In this order: the leader may rename it between the two looks.
        for file in (path, path + PENDING, path):
            data = read_file(file, pick, step)
            step()
            if data is not None:
                return data
        self._check_shared(name)
        return None

    def names(self, prefix: str) -> Iterator[tuple[str, bool]]:
        """(key, is it permanent) of all payloads of a run; ``prefix`` is that of its keys.

        Raises:
            ConfigError: this machine does not see the run's folder, or not any more; what lies there is not known.
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
                f"In {self.path} this machine sees no folder of the run {run_of(prefix)}, so nobody knows what lies "
                "there: ask on a machine that workers write from, or mount what they have there. It is so too where "
                "no worker has ever written."
            )

    def delete(self, prefix: str) -> int:
        """Delete all payloads of a run; how many. What else lies in its folder stays.

        Raises:
            ConfigError: the folder of that name is not one of payloads.
        """
        return self._ask(partial(delete, self._run(prefix)))

    def usage(self) -> tuple[int, int]:
        """(used, total) bytes of the file system. Raises ConfigError where this machine has no such folder."""
        self.check()
        found = self._ask(lambda step: shutil.disk_usage(self.path))
        return found.used, found.total

    def close(self) -> None:
        """Bring what was written to the disk, and free what was to be freed.

        Blocks, for a file system that does nothing ``CLOSE_S`` for each of the two.
        """
        self._freed.close(CLOSE_S)
        try:
            DaemonThreads("payload folder closes").do(lambda step: self._write_back.close(), CLOSE_S)
        except TimeoutError as exc:
            log.warning("payloads in %s may not be on the disk: %s", self.path, exc)

    def _ask(self, work: Callable[[Step], T]) -> T:
        """What ``work`` returns; NoAnswer where it does not come back in time, or an earlier one has not."""
        with self._answering():
            return self._asking.do(work, self._timeout_s)

    def _run(self, name: str) -> Path:
        """Folder of the run that a key belongs to: its name is in braces."""
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
