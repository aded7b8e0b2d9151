"""A folder that stands for a payload server."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as NoAnswer

from penstock.errors import ConfigError, QueueFull, QueueUnavailable
from penstock.payloads import folder as folder_module
from penstock.payloads import read_file
from penstock.payloads.async_store import AsyncPayloadFolder
from penstock.payloads.folder import PayloadFolder
from penstock.payloads.run_files import MARK, PARTS
from penstock.records.keys import Keys

#: Longest wait for what must come; a file system that is stuck is so for as long.
PATIENCE_S = 60.0
KEYS = Keys("run")
NAME = KEYS.payload("d a/0/7/3", "t.1")


@pytest.fixture
def folder(tmp_path: Path) -> PayloadFolder:
    return PayloadFolder(f"file://{tmp_path}/a%20folder", timeout_s=PATIENCE_S)


def files(folder: PayloadFolder) -> list[Path]:
    return sorted(path for path in folder.path.rglob("*") if path.is_file() and path.name != MARK)


def test_a_payload_is_a_file_that_nobody_else_reads_and_its_bytes_go(folder: PayloadFolder, tmp_path: Path) -> None:
    assert folder.path == tmp_path / "a folder"
    assert folder.put([(NAME, b"abcdef")]) == [None]
    (file,) = files(folder)
    assert file.stat().st_mode & 0o777 == 0o600
    folder.keep([NAME])
    folder.unlink([NAME])
    folder.close()
    assert files(folder) == []
    assert not folder.is_full()


def test_I4_what_is_not_whole_is_not_there(folder: PayloadFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of writing, a worker leaves nothing that bears a payload's name."""
    folder.put([(NAME, b"whole")])
    seen: list[list[str]] = []

    def killed(file: int, data: Any) -> int:
        raise KeyboardInterrupt

    other = KEYS.payload("d/0/9/0", "t")
    monkeypatch.setattr(os, "write", killed)
    monkeypatch.setattr(os, "unlink", lambda path: seen.append([path]))
    with pytest.raises(KeyboardInterrupt):
        folder.put([(other, b"half")])
    monkeypatch.undo()
    assert len(files(folder)) == 2
    assert list(folder.names(KEYS.prefix)) == [(NAME, False)]
    assert folder.keep([NAME, other]) == [True, False]
    assert folder.expire(KEYS.prefix, -1.0) == 1
    assert len(files(folder)) == 1


def test_what_nobody_committed_in_time_expires_and_what_is_kept_does_not(folder: PayloadFolder) -> None:
    old, new, kept = (KEYS.payload(f"d/0/{i}/0", "t") for i in range(3))
    folder.put([(old, b"x"), (new, b"x"), (kept, b"x")])
    folder.keep([kept])
    for path in files(folder):
        if "%2F1%2F" not in path.name:
            os.utime(path, (time.time() - 100, time.time() - 100))
    assert folder.expire(KEYS.prefix, 50.0) == 1
    assert sorted(folder.names(KEYS.prefix)) == [(new, False), (kept, True)]


@pytest.mark.parametrize(("code", "wanted"), [(errno.ENOSPC, "room"), (errno.EDQUOT, "room"), (errno.EIO, "answer")])
def test_a_full_folder_is_told_from_one_that_does_not_answer(
    folder: PayloadFolder, monkeypatch: pytest.MonkeyPatch, code: int, wanted: str
) -> None:
    write = os.write

    def failing(file: int, data: Any) -> int:
        if bytes(data) == b"second":
            raise OSError(code, os.strerror(code))
        return write(file, data)

    monkeypatch.setattr(os, "write", failing)
    names = [KEYS.payload(f"d/0/{i}/0", "t") for i in range(3)]
    pairs = list(zip(names, (b"first", b"second", b"third"), strict=True))
    if wanted == "answer":
        with pytest.raises(NoAnswer, match=r"does not answer: .*Input/output error"):
            folder.put(pairs)
        return
    first, second, third = folder.put(pairs)
    assert (first, third) == (None, None)
    assert isinstance(second, QueueFull)
    assert "has no room" in str(second)
    assert sorted(folder.names(KEYS.prefix)) == [(names[0], False), (names[2], False)]


LOOKS: list[Callable[[PayloadFolder], Any]] = [
    lambda folder: list(folder.names(KEYS.prefix)),
    lambda folder: folder.usage(),
    lambda folder: folder.check(),
]


@pytest.mark.parametrize("look", LOOKS)
def test_who_only_looks_makes_no_folder_and_does_not_call_empty_what_is_not_here(
    folder: PayloadFolder, look: Callable[[PayloadFolder], Any]
) -> None:
    with pytest.raises(ConfigError, match=r"This machine has no folder .*a folder: mount it or make it here"):
        look(folder)
    folder.ping()
    folder.expire(KEYS.prefix, 0.0)
    folder.delete(KEYS.prefix)
    assert not folder.is_full()
    assert not folder.path.exists()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_scan_of_a_folder_that_bears_no_mark_is_no_answer(folder: PayloadFolder, when: str) -> None:
    """As of a mount point that nothing is mounted on, or not any more."""
    folder.put([(NAME, b"x")])
    found = folder.names(KEYS.prefix)
    if when == "during":
        next(found)
    run = folder.path / "run"
    run.rename(run.with_name("elsewhere"))
    run.mkdir()
    with pytest.raises(ConfigError, match=r"sees no folder of the run run, so its payloads are not known"):
        list(found)


def test_a_folder_that_nobody_on_this_machine_named_is_not_made(folder: PayloadFolder) -> None:
    """Its address came in a record: who can write to Redis must not choose where folders are made."""
    told = PayloadFolder(folder.url, makes=False)
    for act in (lambda: told.put([(NAME, b"x")]), lambda: told.claim(KEYS.prefix)):
        with pytest.raises(NoAnswer, match="is not on this machine: mount it, or make it"):
            act()
    with pytest.raises(NoAnswer, match="does not answer"):
        told.is_full()
    assert not folder.path.exists()
    folder.path.mkdir()
    assert told.put([(NAME, b"x")]) == [None]
    assert folder.read([(NAME, 99)]) == [b"x"]


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for at in ("/proc/nowhere", f"{tmp_path}/file/below"):
        with pytest.raises(ConfigError, match=r"The folder of payloads .* cannot be made: "):
            PayloadFolder(f"file://{at}").claim(KEYS.prefix)


@pytest.mark.parametrize("look", [lambda folder: folder.keep([NAME]), lambda folder: folder.read([(NAME, 99)])])
def test_a_machine_that_was_given_another_folder_says_so(
    folder: PayloadFolder, look: Callable[[PayloadFolder], Any]
) -> None:
    with pytest.raises(ConfigError, match=r"but here that folder has no run: give it to this machine too"):
        look(folder)
    folder.put([(KEYS.payload("d/0/1/0", "t"), b"x")])
    assert look(folder) in ([False], [None]), "one payload that is gone is that, and no more"


def test_a_payload_whose_name_no_file_can_have_is_gone_and_no_other(folder: PayloadFolder) -> None:
    """Records come from Redis: one of them must not have all that lies in the folder wait."""
    long = KEYS.payload("d/0/1/0", "b" * 300)
    folder.put([(NAME, b"x")])
    for part in PARTS:
        (folder.path / "run" / part).mkdir(exist_ok=True)
    assert folder.keep([long, NAME]) == [False, True]
    assert folder.read([(long, 99), (NAME, 99)]) == [None, b"x"]
    assert folder.read_ranges([(long, 0, 1), (NAME, 0, 1)]) == [None, b"x"]
    folder.unlink([long, NAME])
    assert folder.read([(NAME, 99)]) == [None]


@pytest.mark.parametrize("what", ["pipe", "link", "folder", "larger", "sparse"])
def test_what_is_no_payload_in_the_place_of_one_is_not_read(folder: PayloadFolder, tmp_path: Path, what: str) -> None:
    """Who can write to the folder must not have a trainer hang, run out of memory or read what lies elsewhere."""
    folder.put([(NAME, b"x")])
    folder.keep([NAME])
    (file,) = files(folder)
    file.unlink()
    (tmp_path / "secret").write_bytes(b"s")
    match what:
        case "pipe":
            os.mkfifo(file)
        case "link":
            file.symlink_to(tmp_path / "secret")
        case "folder":
            file.mkdir()
        case "larger":
            file.write_bytes(b"xx")
        case "sparse":
            file.touch()
            os.truncate(file, 2**40)
    assert folder.read([(NAME, 1)]) == [None]
    if what not in ("larger", "sparse"):
        assert folder.read_ranges([(NAME, 0, 1)]) == [None]


@pytest.mark.parametrize(("begin", "num_bytes"), [(0, 2**40), (2**63, 4), (-1, 4), (2, 5), (4, -2), (7, 0)])
def test_a_range_that_a_payload_does_not_have_is_not_read(folder: PayloadFolder, begin: int, num_bytes: int) -> None:
    folder.put([(NAME, b"abcdef")])
    assert folder.read_ranges([(NAME, begin, num_bytes), (NAME, 2, 4)]) == [None, b"cdef"]


def test_a_large_payload_is_read_in_pieces(folder: PayloadFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_file, "_CHUNK", 4)
    folder.put([(NAME, b"abcdefghij")])
    assert folder.read([(NAME, 10)]) == [b"abcdefghij"]
    assert folder.read_ranges([(NAME, 1, 8)]) == [b"bcdefghi"]


def test_a_payload_of_which_nothing_can_be_known_is_not_called_gone(
    folder: PayloadFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = KEYS.payload("d/0/8/0", "t")
    folder.put([(NAME, b"x"), (new, b"x")])
    folder.keep([NAME])

    def stale(path: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    for call in ("stat", "lstat"):
        monkeypatch.setattr(os, call, stale)
    with pytest.raises(NoAnswer):
        folder.keep([new, NAME])


def test_a_reader_never_misses_a_payload_that_is_being_kept(folder: PayloadFolder) -> None:
    names = [KEYS.payload(f"d/0/{i}/0", "t") for i in range(300)]
    folder.put([(name, b"x") for name in names])
    keeper = threading.Thread(target=lambda: folder.keep(names))
    keeper.start()
    try:
        for name in names:
            assert folder.read([(name, 99)]) == [b"x"]
    finally:
        keeper.join()


def test_a_folder_of_somebody_elses_files_takes_no_payload_and_loses_nothing(folder: PayloadFolder) -> None:
    """A run called as a folder that was there, such as the run digits beside examples/digits."""
    theirs = folder.path / "run" / "a" / "thesis.tex"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("years of work")
    for act in (folder.claim, folder.delete, lambda _: folder.put([(NAME, b"x")])):
        with pytest.raises(ConfigError, match=r"run holds 'a' and is not a folder of payloads: name another folder"):
            act(KEYS.prefix)
    assert theirs.read_text() == "years of work"


def test_a_run_is_deleted_by_the_names_that_payloads_have(folder: PayloadFolder, tmp_path: Path) -> None:
    folder.put([(NAME, b"x"), (KEYS.payload("d/0/8/0", "t"), b"x")])
    folder.keep([NAME])
    linked = tmp_path / "linked"
    linked.mkdir()
    for put_there in (linked / "payload:d", folder.path / "run" / "notes.txt"):
        put_there.write_text("mine")
    spare = next(folder.path / "run" / name for name in PARTS if not (folder.path / "run" / name).exists())
    spare.symlink_to(linked)
    assert folder.delete(KEYS.prefix) == 2
    assert files(folder) == [folder.path / "run" / "notes.txt"]
    assert (linked / "payload:d").read_text() == "mine"
    (folder.path / "run" / "notes.txt").unlink()
    spare.unlink()
    folder.delete(KEYS.prefix)
    assert list(folder.path.iterdir()) == []
    assert folder.delete(KEYS.prefix) == 0, "again"


def test_what_somebody_else_put_among_payloads_does_not_expire(folder: PayloadFolder) -> None:
    folder.put([(NAME, b"x")])
    theirs = files(folder)[0].with_name("draft%new")
    theirs.write_text("mine")
    assert folder.expire(KEYS.prefix, -1.0) == 1
    assert theirs.exists()
    assert list(folder.names(KEYS.prefix)) == []


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[list[Any], threading.Event]]]:
    """Have a call of ``os`` on what lies in a folder not come back before the event; what it was called with."""
    events: list[threading.Event] = []

    def make(call: str) -> tuple[list[Any], threading.Event]:
        asked: list[Any] = []
        again, real = threading.Event(), getattr(os, call)

        def hang(path: Any, *args: Any, **kwargs: Any) -> Any:
            if "a folder" in str(path):
                asked.append(path)
                again.wait(PATIENCE_S)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, call, hang)
        events.append(again)
        return asked, again

    yield make
    for again in events:
        again.set()


def until_true(met: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def left_behind() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "payload folder answers"]


def let_come_back() -> None:
    for thread in left_behind():
        thread.join(PATIENCE_S)


def test_a_file_system_whose_server_is_gone_holds_up_nobody_who_asks_whether_it_answers(
    tmp_path: Path, stuck: Callable[[str], tuple[list[Any], threading.Event]]
) -> None:
    """It gives no error: the call does not come back. Threads that wait for it do not pile up."""
    folder = PayloadFolder(f"file://{tmp_path}/a%20folder", timeout_s=0.05)
    asked, again = stuck("stat")
    with pytest.raises(NoAnswer, match=r"a folder does not answer: nothing came back in 0.05 s"):
        folder.ping()
    for _ in range(3):
        with pytest.raises(NoAnswer, match=r"a folder does not answer: what was asked before has not come back"):
            folder.ping()
    assert len(left_behind()) == 1
    again.set()
    let_come_back()
    assert len(asked) == 1
    with suppress(NoAnswer):  # a machine under load may take its time
        folder.ping()
    let_come_back()
    assert len(asked) == 2, "it is asked again once it has answered"


async def test_a_worker_goes_on_and_ends_without_a_file_system_whose_server_is_gone(
    tmp_path: Path, folder: PayloadFolder, stuck: Callable[[str], tuple[list[Any], threading.Event]]
) -> None:
    """Its samples go to other stores, and neither its other threads nor its end wait for it."""
    folder.claim(KEYS.prefix)
    writer = AsyncPayloadFolder(folder, 0.0, silent_s=0.05)
    asked, again = stuck("open")
    for _ in range(40):
        with pytest.raises(QueueUnavailable, match="a folder does not answer"):
            await writer.put([(NAME, b"x")], 60)
    with pytest.raises(QueueUnavailable, match="a folder does not answer"):
        await writer.is_full()
    assert len(asked) == 1, "threads that wait for it do not pile up"
    assert await asyncio.to_thread(lambda: "free") == "free"
    await writer.close()
    again.set()
    until_true(lambda: list(folder.names(KEYS.prefix)) == [(NAME, False)])


def test_a_folder_is_closed_without_a_file_system_whose_server_is_gone(
    folder: PayloadFolder,
    stuck: Callable[[str], tuple[list[Any], threading.Event]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(folder_module, "CLOSE_S", 0.05)
    folder.put([(NAME, b"x")])
    folder.keep([NAME])
    stuck("unlink")
    folder.unlink([NAME])
    folder.close()
    assert "payloads that are not needed any more stay in" in caplog.text


@pytest.mark.parametrize(
    ("call", "act", "left"),
    [
        ("rename", lambda folder: folder.keep([NAME]), [(NAME, True)]),
        ("rename", lambda folder: folder.unlink([NAME]), []),
        ("stat", lambda folder: folder.expire(KEYS.prefix, -1.0), []),
        ("unlink", lambda folder: folder.expire(KEYS.prefix, -1.0), []),
        ("open", lambda folder: folder.read([(NAME, 1)]), [(NAME, False)]),
        ("open", lambda folder: folder.read_ranges([(NAME, 0, 1)]), [(NAME, False)]),
        ("stat", lambda folder: folder.check(), [(NAME, False)]),
        ("stat", lambda folder: folder.claim(KEYS.prefix), [(NAME, False)]),
        ("scandir", lambda folder: list(folder.names(KEYS.prefix)), [(NAME, False)]),
        ("unlink", lambda folder: folder.delete(KEYS.prefix), None),
    ],
)
def test_who_asks_goes_on_without_a_file_system_whose_server_is_gone_and_does_it_later(
    tmp_path: Path,
    folder: PayloadFolder,
    stuck: Callable[[str], tuple[list[Any], threading.Event]],
    call: str,
    act: Callable[[PayloadFolder], Any],
    left: list[tuple[str, bool]] | None,
) -> None:
    folder.put([(NAME, b"x")])
    leaders = PayloadFolder(folder.url, timeout_s=0.05)
    _, again = stuck(call)
    for _ in range(2):
        with pytest.raises(NoAnswer, match="a folder does not answer"):
            act(leaders)
    assert len(left_behind()) == 1
    again.set()
    let_come_back()
    act(folder)
    if left is None:
        assert not (folder.path / "run").exists()
    else:
        assert list(folder.names(KEYS.prefix)) == left
