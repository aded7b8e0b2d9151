"""Files of a version are hashed once per machine; what is remembered of one that has changed counts for nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PublishError
from penstock.system.disk import file_xxh3
from penstock.system.processes import python_environment
from penstock.workers.weights import file_hashes
from penstock.workers.weights.file_hashes import cache_folder, hashes_of, prove
from tests.unit.penstock.weights.deltas.version_folders import a_model, publish

NAMES = ["a", "b"]
DIGEST = "0" * 32


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_hashes, "SMALL_BYTES", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "version"
    path.mkdir()
    for name in NAMES:
        (path / name).write_bytes(name.encode() * 1000)
    return path


def real(folder: Path) -> dict[str, int]:
    return {name: file_xxh3(folder / name) for name in NAMES}


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files that were just written count as settled."""
    monkeypatch.setattr(file_hashes, "SETTLED_NS", -(10**18))


def without_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(folder: Path, names: list[str]) -> dict[str, int]:
        return {name: file_hashes.file_xxh3(folder / name) for name in names}

    monkeypatch.setattr(file_hashes, "_ask_child", ask)


class Hashed:
    """Names of the files that were hashed in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        monkeypatch.setattr(file_hashes, "file_xxh3", self._hash)
        without_child(monkeypatch)

    def _hash(self, path: Path) -> int:
        self.names.append(path.name)
        return file_xxh3(path)


def test_files_are_hashed_once_while_they_do_not_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    hashed = Hashed(monkeypatch)
    for _ in range(3):
        assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    assert hashed.names == NAMES
    assert hashes_of(folder, NAMES, "1" * 32) == real(folder)
    assert hashed.names == NAMES * 2, "another version is another record"


def test_flipped_bits_a_short_file_and_another_file_of_that_name_are_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    hashed = Hashed(monkeypatch)
    hashes_of(folder, NAMES, DIGEST)
    file, before = folder / "a", (folder / "a").stat()

    # Of the same size, and somebody sets the old times.
    file.write_bytes(b"A" + file.read_bytes()[1:])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    file.write_bytes(b"a" * 999)
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    other = folder / "other"
    other.write_bytes(b"c" * 999)
    other.rename(file)
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    assert hashed.names == [*NAMES, "a", "a", "a"]
    file.unlink()
    with pytest.raises(FileNotFoundError):
        hashes_of(folder, NAMES, DIGEST)


def test_a_file_that_was_just_written_is_not_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be written again without another time."""
    monkeypatch.setattr(file_hashes, "SETTLED_NS", 10**18)
    hashed = Hashed(monkeypatch)
    for _ in range(2):
        hashes_of(folder, NAMES, DIGEST)
    assert hashed.names == NAMES * 2


def test_a_file_that_changes_while_it_is_hashed_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    without_child(monkeypatch)

    def hash_and_change(path: Path) -> int:
        found = file_xxh3(path)
        path.write_bytes(b"another")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(file_hashes, "file_xxh3", hash_and_change)
        hashes_of(folder, NAMES, DIGEST)
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)


def test_two_workers_of_a_machine_hash_a_version_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    without_child(monkeypatch)
    began, go_on = threading.Event(), threading.Event()
    names: list[str] = []

    def wait_and_hash(path: Path) -> int:
        names.append(path.name)
        began.set()
        assert go_on.wait(60)
        return file_xxh3(path)

    monkeypatch.setattr(file_hashes, "file_xxh3", wait_and_hash)
    found: list[dict[str, int]] = []
    one, two = (threading.Thread(target=lambda: found.append(hashes_of(folder, NAMES, DIGEST))) for _ in range(2))
    one.start()
    assert began.wait(60)
    two.start()
    go_on.set()
    for thread in (one, two):
        thread.join(60)
    assert names == NAMES
    assert found == [real(folder)] * 2


def test_a_child_of_low_priority_hashes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is really used; it is not asked again for what is remembered."""
    asked: list[Any] = []
    run = subprocess.run

    def note(command: Sequence[str], **options: Any) -> Any:
        asked.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", note)
    monkeypatch.setattr(file_hashes, "file_xxh3", lambda path: pytest.fail("it was hashed in the worker"))
    while not (cache_folder() / f"{DIGEST}.json").exists():  # the files may be too young for the first one
        assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    while set(json.loads((cache_folder() / f"{DIGEST}.json").read_bytes())) != set(NAMES):
        hashes_of(folder, NAMES, DIGEST)
    count = len(asked)
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    assert len(asked) == count >= 1


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.workers.weights import file_hashes
file_hashes.SETTLED_NS = -(10**18)
real = file_hashes.file_xxh3
def hash_one(path):
    if path.name == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path)
file_hashes.SMALL_BYTES = 0
file_hashes._ask_child = lambda folder, names: {name: hash_one(folder / name) for name in names}
file_hashes.hashes_of(Path(sys.argv[1]), ["a", "b"], sys.argv[2])
"""


def test_a_worker_that_is_killed_leaves_nothing_that_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), DIGEST], env=python_environment(os.environ), check=False
    )
    assert died.returncode == -signal.SIGKILL
    assert list(cache_folder().glob("*.json")) == []
    settle(monkeypatch)
    hashed = Hashed(monkeypatch)
    assert hashes_of(folder, NAMES, DIGEST) == real(folder), "its lock went with it"
    assert hashed.names == NAMES


@pytest.mark.parametrize("code", ["import os; os.kill(os.getpid(), 9)", "print('[]')", "print('{')"])
def test_where_the_child_fails_the_worker_hashes(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(file_hashes, "python_command", lambda *_: [sys.executable, "-c", code])
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"a": 3}', b'{"a": [[1], "x"]}', b"[" * 200_000, b'{"a": [[Infinity], 1]}']
)
def test_a_record_that_cannot_be_read_counts_for_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    settle(monkeypatch)
    hashed = Hashed(monkeypatch)
    hashes_of(folder, NAMES, DIGEST)
    (cache_folder() / f"{DIGEST}.json").write_bytes(text)
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    assert hashed.names == NAMES * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_the_cache_of_another_user_counts_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    hashes_of(folder, NAMES, DIGEST)
    record = cache_folder() / f"{DIGEST}.json"
    record.write_text(json.dumps({name: (state, 42) for name, (state, _) in json.loads(record.read_text()).items()}))
    for path in (record, cache_folder()):
        os.chown(path, 65534, 65534)
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)


def test_without_a_cache_files_are_hashed_every_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    hashed = Hashed(monkeypatch)
    for _ in range(2):
        assert hashes_of(folder, NAMES, DIGEST) == real(folder)
    assert hashed.names == NAMES * 2


def test_only_the_newest_versions_are_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    without_child(monkeypatch)
    monkeypatch.setattr(file_hashes, "MAX_REMEMBERED", 2)
    for number in range(4):
        hashes_of(folder, NAMES, f"{number:032}")
        os.utime(cache_folder() / f"{number:032}.json", (number, number))
    assert sorted(path.stem for path in cache_folder().glob("*.json"))[-1] == f"{3:032}"
    assert len(list(cache_folder().glob("*.json"))) == 2


def test_a_version_with_flipped_bits_is_refused_though_it_was_proven_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    Hashed(monkeypatch)
    written = publish(tmp_path, 1, a_model(size=30))
    for _ in range(2):
        prove(written.path, written.index_digest)
    file = next(written.path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(PublishError, match="not the file"):
        prove(written.path, written.index_digest)


def test_a_child_that_never_answers_is_killed_and_the_worker_hashes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "CHILD_S", 0.1)
    monkeypatch.setattr(
        file_hashes, "python_command", lambda *_: [sys.executable, "-c", "import threading; threading.Event().wait()"]
    )
    assert hashes_of(folder, NAMES, DIGEST) == real(folder)


def test_a_file_that_was_read_wrongly_once_is_hashed_again_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    hashed = Hashed(monkeypatch)
    written = publish(tmp_path, 1, a_model(size=30))
    with monkeypatch.context() as patch:
        patch.setattr(file_hashes, "file_xxh3", lambda path: 7)
        with pytest.raises(PublishError, match="not the file"):
            prove(written.path, written.index_digest)
    prove(written.path, written.index_digest)
    count = len(hashed.names)
    prove(written.path, written.index_digest)
    assert len(hashed.names) == count, "the right hash is remembered"


def test_a_flipped_bit_that_was_repaired_in_place_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    Hashed(monkeypatch)
    written = publish(tmp_path, 1, a_model(size=30))
    file = next(written.path.glob("*.safetensors"))
    good, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    # Size, inode and times stay: the memory cannot see that the file changed.
    monkeypatch.setattr(file_hashes, "_state", lambda found: [found.st_size, found.st_ino, found.st_dev, 0, 0])
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    os.utime(file, ns=times)
    with pytest.raises(PublishError, match="not the file"):
        prove(written.path, written.index_digest)
    file.write_bytes(good)
    os.utime(file, ns=times)
    prove(written.path, written.index_digest)
