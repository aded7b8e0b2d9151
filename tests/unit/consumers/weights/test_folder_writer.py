"""The writer of folders: one at a time, the newest first, and no failure unsaid."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.consumers.weights.checkpoint_writer import CheckpointWriter, _Task
from penstock.consumers.weights.copies import Copy
from penstock.errors import DiskFull, PublishError
from penstock.records.cause import Cause

PATIENCE_S = 60.0


class Disk:
    """Writes when it may; what it began and ended, in order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.done: list[int] = []
        self.is_begun = threading.Event()
        self.may_go_on = threading.Event()
        self.failure: Exception | None = None

    def write(self, task: _Task) -> None:
        self.begun.append(task.version)
        self.is_begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self.done.append(task.version)


class Writer(CheckpointWriter):
    """Writes to a ``Disk``; keeps the causes of its waits."""

    def __init__(self, write: Callable[[_Task], None]) -> None:
        self.causes: list[Cause | None] = []
        subscriber: Any = SimpleNamespace(waiting=SimpleNamespace(blocked_on=self.causes.append))
        config: Any = None
        super().__init__(config, subscriber, None)
        self._write = write  # type: ignore[method-assign]


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def writer(disk: Disk) -> Iterator[Writer]:
    made = Writer(disk.write)
    yield made
    disk.may_go_on.set()
    made.close()


def put(writer: Writer, version: int) -> Copy:
    copy = Copy([])
    writer.put(version, copy)
    return copy


def test_what_is_begun_is_ended_and_of_what_waits_the_newest_is_next(disk: Disk, writer: Writer) -> None:
    first = put(writer, 1)
    assert disk.is_begun.wait(PATIENCE_S)
    put(writer, 2)
    assert writer._drop_waiting() is first, "its copy must not be touched"
    assert writer.owes
    put(writer, 3)
    assert not writer.owes
    disk.may_go_on.set()
    writer.settle()
    assert disk.done == disk.begun == [1, 3]
    assert writer.causes[-1] is None
    assert writer._drop_waiting() is None


def test_a_version_whose_copy_went_is_owed_until_another_is_there(disk: Disk, writer: Writer) -> None:
    put(writer, 1)
    assert disk.is_begun.wait(PATIENCE_S)
    put(writer, 2)
    writer._drop_waiting()
    disk.may_go_on.set()
    with pytest.raises(PublishError, match=r"Version 2 is announced and has no folder.*publish again"):
        writer.settle()
    writer.forgive()
    writer.check()


@pytest.mark.parametrize("failure", [PublishError("the disk is broken."), DiskFull("no room."), ZeroDivisionError()])
def test_a_folder_that_is_not_written_is_said_in_every_call(disk: Disk, writer: Writer, failure: Exception) -> None:
    disk.failure = failure
    disk.may_go_on.set()
    put(writer, 4)
    for _ in range(2):
        with pytest.raises(PublishError, match=r"Version 4 is announced and has no folder.*it is tried once more"):
            writer.settle()
        assert writer.owes
    writer.rest()
    disk.failure = None
    with pytest.raises(PublishError):
        writer.check()
    writer.settle()
    assert not writer.owes
    put(writer, 5)
    writer.settle()
    assert disk.done == [4, 5]


def test_what_is_tried_once_more_is_owed_and_not_said_meanwhile(disk: Disk, writer: Writer) -> None:
    disk.failure = PublishError("the disk is broken.")
    disk.may_go_on.set()
    put(writer, 4)
    writer.rest()
    disk.failure = None
    disk.may_go_on.clear()
    disk.is_begun.clear()
    with pytest.raises(PublishError, match="it is tried once more"):
        writer.check()
    assert disk.is_begun.wait(PATIENCE_S)
    writer.check()
    assert writer.owes
    disk.may_go_on.set()
    writer.settle()
    assert not writer.owes
    assert disk.begun == [4, 4]


def test_of_two_without_a_folder_the_newest_is_named(disk: Disk, writer: Writer) -> None:
    put(writer, 1)
    assert disk.is_begun.wait(PATIENCE_S)
    put(writer, 2)
    writer._drop_waiting()
    disk.failure = PublishError("the disk is broken.")
    disk.may_go_on.set()
    with pytest.raises(PublishError, match=r"Version 2 is announced and has no folder, because its copy .*: publish"):
        writer.settle()


def test_at_the_end_nothing_is_promised(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.failure = PublishError("the disk is broken.")
    disk.may_go_on.set()
    writer = Writer(disk.write)
    put(writer, 4)
    writer.close()
    assert caplog.messages[-1].startswith("Version 4 is announced and has no folder")
    assert caplog.messages[-1].endswith("the disk is broken: publish again.")


def test_what_failed_is_not_tried_again_when_its_copy_is_gone(disk: Disk, writer: Writer) -> None:
    disk.failure = PublishError("the disk is broken.")
    disk.may_go_on.set()
    put(writer, 4)
    writer.rest()
    writer._drop_waiting()
    for _ in range(2):
        with pytest.raises(PublishError, match=r"Version 4 is announced and has no folder.*: publish again"):
            writer.settle()
    assert disk.begun == [4]


def test_a_failure_of_what_is_not_the_newest_keeps_nobody(disk: Disk, writer: Writer) -> None:
    put(writer, 1)
    assert disk.is_begun.wait(PATIENCE_S)
    disk.failure = PublishError("gone")
    put(writer, 2)

    def write(task: _Task) -> None:
        if task.version == 1:
            assert writer._is_room_unneeded(), "a newer one has its folder instead"
        disk.done.append(task.version)

    writer._write = write  # type: ignore[method-assign]
    disk.may_go_on.set()
    writer.settle()
    assert disk.done == [2]


def test_the_end_waits_for_what_was_put(disk: Disk) -> None:
    writer = Writer(disk.write)
    put(writer, 1)
    assert disk.is_begun.wait(PATIENCE_S)
    put(writer, 2)
    ended = threading.Thread(target=writer.close)
    ended.start()
    disk.may_go_on.set()
    ended.join(PATIENCE_S)
    assert not ended.is_alive()
    assert disk.done == [1, 2]


def test_no_thread_is_made_for_nothing() -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    Writer(never).close()
