import os
import random
import signal
import sqlite3
import string
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import DiskFull
from penstock.history import part
from penstock.history.filters import Filters
from penstock.history.part import PartName, _connect, begin, open_to_read, parts_of, size_of
from penstock.history.reader import HistoryReader
from penstock.history.row import Fate, Use
from penstock.history.writer import HistoryWriter
from tests.unit.penstock.history.rows import row

MANY = 2**30


def kept(folder: Path) -> list[tuple[str, int, int, float | None, str]]:
    """(job, k, part, reward, fate) of every row of every file."""
    found = []
    for name in parts_of(folder):
        part = open_to_read(name.path(folder))
        assert part is not None
        with closing(part):
            found += part.execute(
                "SELECT job, k, part, reward, fate FROM samples JOIN groups USING(g) ORDER BY s"
            ).fetchall()
    return found


def test_rows_are_there_once_however_often_they_are_written(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "history", 1, max_bytes=MANY)

    writer.write([row(k=0), row(k=1, reward=None)])
    writer.write([row(k=1, reward=0.75, fate=Fate.MASKED), row(k=1, part=1)])
    writer.close()

    assert kept(tmp_path / "history") == [
        ("math/0/7", 0, 0, 0.5, "trained"),
        ("math/0/7", 1, 0, 0.75, "masked"),
        ("math/0/7", 1, 1, 0.5, "trained"),
    ]


def test_samples_whose_rewards_return_very_many_values_are_read_again(tmp_path: Path) -> None:
    """A reader takes at most 8 Mi values of a record, and a reward may return 256 KiB of empty lists."""
    with closing(HistoryWriter(tmp_path, 1, max_bytes=MANY)) as writer:
        writer.write([row("d/0/1", k, reward_info={"empty": [[]] * 260_000}) for k in range(20)])
    with closing(HistoryReader(tmp_path)) as reader:
        assert len(list(reader.each())) == 20, reader.problems


def test_words_of_a_row_that_was_replaced_are_found_no_more(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 1, max_bytes=MANY)
    writer.write([row(answer="a zebra")])
    writer.write([row(answer="an okapi")])
    writer.close()

    with closing(HistoryReader(tmp_path)) as reader:
        for word, count in (("zebra", 0), ("okapi", 1)):
            assert len(reader.rows(Filters(text=word)).rows) == reader.count(Filters(text=word)) == count


def test_a_use_may_come_before_its_row(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 1, max_bytes=MANY)
    use = Use("math/0/7", 0, "policy", batch=3, version=4, staleness=1, loss_tokens=2)
    writer.write([], [use])
    writer.write([row()], [use])
    writer.close()

    with closing(sqlite3.connect(parts_of(tmp_path)[0].path(tmp_path))) as part:
        assert part.execute(
            "SELECT job, batch, version, staleness, loss FROM uses JOIN groups USING(g)"
        ).fetchall() == [("math/0/7", 3, 4, 1, 2)]
    assert kept(tmp_path) == [("math/0/7", 0, 0, 0.5, "trained")]


def test_writers_never_share_a_file(tmp_path: Path) -> None:
    writers = [HistoryWriter(tmp_path, epoch, max_bytes=MANY) for epoch in (1, 2, 2)]
    for writer in writers:
        writer.write([row()])
    for writer in writers:
        writer.write([row(k=1)])
        writer.close()

    assert parts_of(tmp_path) == [PartName(1, 1), PartName(2, 1), PartName(2, 2)]
    assert len(kept(tmp_path)) == 6


def test_a_file_that_was_begun_is_nobody_elses(tmp_path: Path) -> None:
    first, one = begin(tmp_path, 4)
    second, two = begin(tmp_path, 4)
    one.close()
    two.close()
    assert (first, second) == (PartName(4, 1), PartName(4, 2))


def test_a_row_in_a_later_file_replaces_an_earlier_one(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 1, max_bytes=MANY, part_bytes=1)
    use = Use("math/0/1", 0, "policy", batch=3, version=4)
    writer.write([row("math/0/1")], [use])
    writer.write([row("math/0/2")])
    writer.write([row("math/0/1", reward=1.0), row("math/0/3")], [use])
    writer.close()

    assert len(parts_of(tmp_path)) == 3
    with closing(HistoryReader(tmp_path)) as reader:
        assert {found.job: found.reward for found in reader.rows().rows} == {
            "math/0/1": 1.0,
            "math/0/2": 0.5,
            "math/0/3": 0.5,
        }
        assert (reader.count(), reader.count(Filters(batch=3))) == (3, 1)
        assert reader.uses("math/0/1/0") == [use]


def test_the_oldest_files_are_deleted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = HistoryWriter(tmp_path, 1, max_bytes=200_000, part_bytes=1)
    for number in range(8):
        writer.write([row(f"math/0/{number}"), row(f"math/0/{number}", k=1)])
    writer.close()

    left = parts_of(tmp_path)
    assert 1 < len(left) < 8
    assert left == [PartName(1, number) for number in range(9 - len(left), 9)]
    assert caplog.text.count("deleting its oldest file") == 8 - len(left)
    assert sum(size_of(name.path(tmp_path)) for name in left) <= 200_000 + 60_000


def test_a_disk_without_room_is_told_and_what_was_there_stays(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 1, max_bytes=MANY, look_up=lambda tokens: dict.fromkeys(tokens, (b"x", False)))
    writer.write([row()])
    assert writer._part is not None
    pages = writer._part.connection.execute("PRAGMA page_count").fetchone()[0]
    writer._part.connection.execute(f"PRAGMA max_page_count={pages}")
    text = "".join(random.Random(1).choices(string.printable, k=100_000))
    small, large = row("math/0/1", tokens=np.arange(7, dtype=np.int32)), row(k=1, prompt="", answer=text)

    with pytest.raises(DiskFull, match="no room is left"):
        writer.write([small, large])
    writer._part.connection.execute("PRAGMA max_page_count=1073741823")
    assert len(kept(tmp_path)) == 1
    writer.write([small, large])
    writer.close()
    assert len(kept(tmp_path)) == 3
    with closing(HistoryReader(tmp_path)) as reader:
        found = reader.row(small.id)
    assert found is not None
    assert found.pieces.keys() == {*range(7)}, "those of the failed commit are written again"


def test_a_disk_without_room_for_a_new_file_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(path: Path, mode: str) -> sqlite3.Connection:
        made = _connect(path, mode)
        made.execute("PRAGMA max_page_count=3")
        return made

    monkeypatch.setattr(part, "_connect", connect)
    writer = HistoryWriter(tmp_path, 1, max_bytes=MANY)
    for _ in range(3):
        with pytest.raises(DiskFull, match="no room is left"):
            writer.write([row()])
        assert os.listdir(tmp_path) == []
    held = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    assert not [path for path in held if path.startswith(str(tmp_path))], "each try would keep a file open"
    monkeypatch.undo()
    writer.write([row()])
    writer.close()
    assert len(kept(tmp_path)) == 1


WRITES_AND_DIES = """
import os, signal, sys
from pathlib import Path
from penstock.history import writer as module
from tests.unit.penstock.history.rows import row

writer = module.HistoryWriter(Path(sys.argv[1]), 1, max_bytes=2**30)
writer.write([row()])
part = writer._part.connection
# Small, so that pages go to the file before the commit.
part.execute("PRAGMA cache_size=2")
part.execute("BEGIN IMMEDIATE")
for k in range(1, 200):
    writer._part._put_job(f"math/0/{k}", [row(f"math/0/{k}", answer=str(k) * 500)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_left_half_done_is_taken_back(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WRITES_AND_DIES, str(tmp_path)], timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    (name,) = parts_of(tmp_path)
    assert os.path.getsize(f"{name.path(tmp_path)}-journal") > 0

    assert kept(tmp_path) == [("math/0/7", 0, 0, 0.5, "trained")]

    writer = HistoryWriter(tmp_path, 2, max_bytes=MANY)
    writer.write([row(k=1)])
    writer.close()
    assert [k for _, k, *_ in kept(tmp_path)] == [0, 1]
