"""Workers of one machine make each copy once: who waits for another one names it, and not for ever."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import PublishError
from penstock.records.publication import Publication
from penstock.records.worker_causes import FolderLocked
from penstock.system.disk import locks
from penstock.weights.delta_store import DeltaStore
from penstock.workers.weights import machine_lock, version_folders
from penstock.workers.weights.local_copies import LocalCopies
from penstock.workers.weights.machine_lock import alone_in
from tests.integration.parts import PATIENCE_S, until
from tests.integration.small_disk import SmallDisk, small_disk
from tests.integration.test_local_copies import WORKER, contents
from tests.integration.test_send_first_zombies import is_stopped
from tests.unit.consumers.weights.test_deltas import Line

__all__ = ["small_disk"]


def test_a_worker_that_stands_still_holds_no_other_up_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, said = Line(tmp_path), []
    line.publish(1)
    written = line.written[1]
    publication = Publication("m", 1, "delta", str(written.path), index=written.index_digest)
    arguments = [tmp_path / "store", tmp_path / "copies", written.path, written.index_digest, 1, 3, "SIGSTOP"]
    holder = subprocess.Popen([sys.executable, "-m", WORKER, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    copies = LocalCopies(tmp_path / "copies", DeltaStore(str(tmp_path / "store")), 2**30, blocked_on=said.append)
    try:
        until(lambda: is_stopped(holder.pid))
        monkeypatch.setattr(machine_lock, "STILL_S", 0.5)
        with pytest.raises(PublishError, match=f"process {holder.pid} of this machine holds .* been stalled"):
            copies.get(publication)
        assert FolderLocked(holder.pid, str(tmp_path / "copies")) in said
        holder.send_signal(signal.SIGCONT)
        made, _ = holder.communicate(timeout=PATIENCE_S)
        assert contents(Path(made.split()[0])) == contents(written.path)
        copies.get(publication)
        assert copies.last.num_bytes == 0, "it is here"
    finally:
        holder.kill()
        holder.wait()
        copies.close()


def is_held(folder: Path) -> bool:
    """Return whether a worker's engine may read a copy, so that no other worker deletes it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        return not locks(handle)
    finally:
        os.close(handle)


def test_what_is_here_waits_for_nobody_who_makes_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, kept, prove = Line(tmp_path), list[bool](), version_folders.prove
    line.publish(1)
    assert line.announced is not None
    one = LocalCopies(tmp_path / "copies", DeltaStore(str(tmp_path / "store")), 2**30)
    path = one.get(line.announced)
    one.close()  # as where all workers were started again

    def proven(folder: Path, digest: str) -> None:
        kept.append(is_held(folder))
        prove(folder, digest)

    monkeypatch.setattr(version_folders, "prove", proven)
    monkeypatch.setattr(machine_lock, "STILL_S", 0.2)
    with (tmp_path / "copies" / ".lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert one.get(line.announced) == path
        assert kept == [True], "nobody deletes it while it is proven"
        assert is_held(path), "nor after that"
        one.close()
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(PublishError, match="process 4711"):
            one.get(line.announced)  # what is being deleted is not taken
        os.close(handle)


def test_who_is_at_work_says_so_in_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_lock, "BEAT_S", 0.01)
    file, said, has_it = tmp_path / ".lock", [], threading.Event()

    def wait() -> None:
        with alone_in(file, said.append):
            has_it.set()

    waiting = threading.Thread(target=wait)
    with alone_in(file):
        first = file.stat().st_mtime_ns
        until(lambda: file.stat().st_mtime_ns > first)
        waiting.start()
        until(lambda: said)
        assert not has_it.is_set()
    waiting.join(PATIENCE_S)
    assert has_it.is_set()
    assert (said[0], said[-1]) == (FolderLocked(os.getpid(), str(tmp_path)), None)


def test_the_lock_of_a_full_disk_is_held_without_a_name(small_disk: Callable[[str, int], SmallDisk]) -> None:
    """Who makes room there needs it."""
    disk = small_disk("full", 2)
    with alone_in(disk.path / ".lock"):
        pass
    disk.fill()
    with alone_in(disk.path / ".lock"):
        assert (disk.path / ".lock").read_bytes() == b"\0"
    disk.make_room()
    with alone_in(disk.path / ".lock"):
        assert (disk.path / ".lock").read_bytes() == str(os.getpid()).encode()
    assert (disk.path / ".lock").stat().st_blocks == 0, "a lock that nobody holds takes no room"
