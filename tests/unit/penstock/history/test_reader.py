import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.history import filters, read_part
from penstock.history.filters import Filters, Sort
from penstock.history.part import begin, parts_of
from penstock.history.reader import HistoryReader
from penstock.history.row import SampleRow, Use
from penstock.history.writer import HistoryWriter
from tests.unit.penstock.history.rows import row

MANY = 2**30
ANSWERS = ("a red fox", "a blue whale, and a fox", "no animal", "five", "Füchse und 日本語 foxes")


def rows() -> list[SampleRow]:
    """Ten samples of five prompts."""
    return [
        row(
            f"{'math' if line < 4 else 'other'}/0/{line}",
            k,
            prompt=f"Question {line}: what is it?",
            answer=ANSWERS[line] if k else "nothing",
            reward=None if (line, k) == (3, 0) else line / 4 - k / 8,
            oldest=line,
            newest=line + k,
            num_generated=10 * line + k,
            fate="filtered" if line == 2 else "trained",
            lane="eval" if line == 4 else "train",
            status="truncated" if k else "completed",
        )
        for line in range(5)
        for k in range(2)
    ]


def used() -> list[Use]:
    return [Use(one.job, one.k, "policy", batch=one.line // 2, version=5) for one in rows() if one.fate == "trained"]


@pytest.fixture(params=["one file", "a file each", "several recorders"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A history of ``rows``, in the same order however many files it has."""
    write(tmp_path, request.param)
    return tmp_path


def write(folder: Path, how: str) -> None:
    epochs = {"one file": [1], "a file each": [1], "several recorders": [1, 2, 3]}[how]
    size = -(-10 // len(epochs))
    for number, epoch in enumerate(epochs):
        writer = HistoryWriter(folder, epoch, max_bytes=MANY, part_bytes=1 if how == "a file each" else None)
        jobs = {one.job for one in rows()[number * size : (number + 1) * size]}
        for job in sorted(jobs):
            writer.write([one for one in rows() if one.job == job], [use for use in used() if use.job == job])
        writer.close()


@pytest.fixture
def reader(folder: Path) -> Iterator[HistoryReader]:
    with closing(HistoryReader(folder)) as made:
        yield made


def ids(found: list[SampleRow]) -> list[str]:
    return [f"{one.line}/{one.k}" for one in found]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (Filters(), ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1", "3/0", "3/1", "4/0", "4/1"]),
        (Filters(job="math/0/1"), ["1/0", "1/1"]),
        (Filters(job="math/0/99"), []),
        (Filters(prompt="question 3"), ["3/0", "3/1"]),
        (Filters(prompt='"3: what"'), ["3/0", "3/1"]),
        (Filters(prompt='"what question"'), []),
        (Filters(version=2), ["1/1", "2/0", "2/1"]),
        (Filters(batch=1), ["3/0", "3/1"]),
        (Filters(batch=0, subscription="policy"), ["0/0", "0/1", "1/0", "1/1"]),
        (Filters(batch=0, subscription="other"), []),
        (Filters(subscription="policy", dataset="other"), ["4/0", "4/1"]),
        (Filters(least_reward=0.75), ["4/0", "4/1"]),
        (Filters(most_reward=0.0), ["0/0", "0/1"]),
        (Filters(least_reward=0.5, most_reward=0.7), ["2/0", "3/1"]),
        (Filters(fate="filtered"), ["2/0", "2/1"]),
        (Filters(fate="unheard of"), []),
        (Filters(dataset="other"), ["4/0", "4/1"]),
        (Filters(lane="eval", status="truncated"), ["4/1"]),
        (Filters(text="fox"), ["0/1", "1/1"]),
        (Filters(text="fox*"), ["0/1", "1/1", "4/1"]),
        (Filters(text="FOX blue"), ["1/1"]),
        (Filters(text='"and a fox"'), ["1/1"]),
        (Filters(text="本"), ["4/1"]),
        (Filters(text="FÜCHSE"), ["4/1"]),
        (Filters(text="question 1"), ["1/0", "1/1"]),
        (Filters(text="fox question"), []),
        (Filters(text="fox", least_reward=0.1), ["1/1"]),
        (Filters(text='x" OR answers MATCH "fox'), []),
    ],
)
def test_filters(reader: HistoryReader, asked: Filters, wanted: list[str]) -> None:
    page = reader.rows(asked, ascending=True)

    assert ids(page.rows) == wanted
    assert ids(reader.rows(asked).rows) == wanted[::-1]
    assert page.next == ""
    assert reader.count(asked) == len(wanted)
    assert reader.problems == []


@pytest.mark.parametrize("sort", Sort)
@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("asked", [Filters(), Filters(text="question"), Filters(fate="trained")])
def test_pages_hold_each_row_once_and_in_order(
    reader: HistoryReader, sort: Sort, ascending: bool, asked: Filters
) -> None:
    whole = reader.rows(asked, sort, ascending=ascending).rows
    found, after = [], ""
    while True:
        page = reader.rows(asked, sort, limit=3, after=after, ascending=ascending)
        assert len(page.rows) <= 3
        found += page.rows
        if not (after := page.next):
            break

    assert ids(found) == ids(whole)
    assert len(set(ids(found))) == reader.count(asked) - (sort is Sort.REWARD)
    values = [
        {Sort.RECORDED: 0, Sort.REWARD: one.reward, Sort.VERSION: one.newest, Sort.LENGTH: one.num_generated}[sort]
        for one in found
    ]
    assert values == sorted(values, reverse=not ascending)  # type: ignore[type-var]


@pytest.mark.parametrize("sort", [Sort.REWARD, Sort.VERSION, Sort.LENGTH])
def test_what_takes_long_in_an_order_is_gone_through_as_it_lies(
    reader: HistoryReader, sort: Sort, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = [Filters(fate="trained"), Filters(lane="eval", status="truncated"), Filters(text="question", dataset="math")]
    monkeypatch.setattr(filters, "FEW", 0)
    in_order = [reader.rows(one, sort, limit=3) for one in wide]
    monkeypatch.setattr(read_part, "PATIENCE", 1)
    as_they_lie = [reader.rows(one, sort, limit=3) for one in wide]

    assert [ids(page.rows) for page in as_they_lie] == [ids(page.rows) for page in in_order]
    assert [page.next for page in as_they_lie] == [page.next for page in in_order]
    assert reader.problems == []


def test_a_row_and_its_uses(reader: HistoryReader) -> None:
    found = reader.row("math/0/1/1")
    assert found is not None
    assert found.answer == ANSWERS[1]
    assert found.logprobs is not None
    assert np.array_equal(found.logprobs, row().logprobs)  # type: ignore[arg-type]
    assert [(use.batch, use.version) for use in reader.uses("math/0/1/1")] == [(0, 5)]
    assert reader.row("math/0/1/7") is None
    assert reader.uses("math/0/2/0") == []
    page = reader.rows(ascending=True).rows
    assert reader.uses_of(page) == [reader.uses(one.id) for one in page]
    with pytest.raises(ConfigError, match="no id of a sample"):
        reader.row("math")


def test_the_later_recorder_has_the_word(tmp_path: Path) -> None:
    for epoch, reward in ((2, 0.75), (1, 0.25)):
        writer = HistoryWriter(tmp_path, epoch, max_bytes=MANY)
        writer.write([row(k=0, reward=reward, answer=f"epoch {epoch}"), row(f"math/0/{epoch}", k=1, reward=reward)])
        writer.close()
    with closing(HistoryReader(tmp_path)) as reader:
        for sort in Sort:
            found = reader.rows(sort=sort).rows
            assert sorted((one.id, one.reward) for one in found) == [
                ("math/0/1/1", 0.25),
                ("math/0/2/1", 0.75),
                ("math/0/7/0", 0.75),
            ]
        assert reader.count() == 3
        assert reader.count(Filters(most_reward=0.3)) == 1
        assert reader.count(Filters(text="epoch 1")) == 0
        once = reader.row("math/0/7/0")
        assert once is not None
        assert once.answer == "epoch 2"


def test_a_file_says_what_its_tokens_stand_for(tmp_path: Path) -> None:
    tokens = np.array([1, 2, 3, 2], np.int32)
    mask = np.array([0, 1, 1, 1], np.uint8)
    known = {1: (b"<start>", True), 2: (b" fox", False), 3: (b"\xc3", False)}
    one = row(
        prompt="<start>", answer=" fox\ufffd fox", prompt_length=1, tokens=tokens, generated=mask, loss_mask=mask,
        versions=np.full(4, 3, np.int32), logprobs=np.zeros(4, np.float32), is_spelled=True,
    )  # fmt: skip
    writer = HistoryWriter(
        tmp_path, 1, max_bytes=MANY, look_up=lambda tokens: {one: known[one] for one in tokens if one in known}
    )
    writer.write([one, row(k=1)])
    writer.close()
    with closing(HistoryReader(tmp_path)) as reader:
        assert [found.answer for found in reader.rows(Filters(text="fox")).rows] == [" fox\ufffd fox"]
        found = reader.row(one.id)
        assert found is not None
        assert (found.prompt, found.answer) == (one.prompt, one.answer)
        assert found.pieces == {1: b"<start>", 2: b" fox", 3: b"\xc3"}
    with closing(sqlite3.connect(parts_of(tmp_path)[0].path(tmp_path))) as part:
        part.execute("UPDATE pieces SET piece = 'text' WHERE t = 2")
        part.commit()
    with closing(HistoryReader(tmp_path)) as reader:
        assert [found.k for found in reader.rows().rows] == [1]
        (said,) = reader.problems
        assert "spells a token" in said


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_cut_off_or_overwritten_nothing_but_its_own_rows_is_lost(
    harmed: tuple[Path, bytes], data: st.DataObject
) -> None:
    folder, whole = harmed
    path = parts_of(folder)[0].path(folder)
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.booleans())
    harm = b"" if cut else data.draw(st.binary(min_size=1, max_size=64))
    path.write_bytes(whole[:at] if cut else whole[:at] + harm + whole[at + len(harm) :])
    asked = [Filters(), Filters(text="fox"), Filters(fate="trained"), Filters(batch=0)]
    with closing(HistoryReader(folder)) as reader:
        for one in asked:
            for sort in (Sort.RECORDED, Sort.REWARD):
                found = reader.rows(one, sort, arrays=True).rows
                least = {"safe/0/0/0"} if one == Filters() else set()
                assert {row.id for row in found if row.dataset == "safe"} >= least
        reader.count()
        reader.scores()
        reader.uses("math/0/0/0")
        assert all(str(folder) in said for said in reader.problems)


def test_a_file_whose_trouble_sqlite_tells_in_bytes_that_are_no_text_is_passed_over(
    harmed: tuple[Path, bytes],
) -> None:
    folder, whole = harmed
    parts_of(folder)[0].path(folder).write_bytes(whole.replace(b"CREATE TABLE", b"CREATE \x80ABLE"))
    with closing(HistoryReader(folder)) as reader:
        assert {row.id for row in reader.rows().rows} == {"safe/0/0/0"}
        (said,) = reader.problems
        assert "cannot be used" in said


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A history of two files, and the bytes of the first."""
    folder = tmp_path_factory.mktemp("harmed")
    for epoch, some in ((1, rows()), (2, [row("safe/0/0")])):
        writer = HistoryWriter(folder, epoch, max_bytes=MANY)
        writer.write(some, used() if epoch == 1 else [])
        writer.close()
    return folder, parts_of(folder)[0].path(folder).read_bytes()


def test_live_rows_are_shown_until_a_file_has_them(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 1, max_bytes=MANY)
    writer.write([row("math/0/1", fate="trained")])
    with closing(HistoryReader(tmp_path)) as reader:
        reader.show_too([row("math/0/1", fate=""), row("math/0/2", fate="", reward=2.0)])
        assert [(one.line, one.fate) for one in reader.rows().rows] == [(2, ""), (1, "trained")]
        assert [one.line for one in reader.rows(sort=Sort.REWARD, limit=1).rows] == [2]
        assert reader.count() == 2
        assert reader.count(Filters(fate="trained")) == 1
        once = reader.row("math/0/1/0")
        assert once is not None
        assert once.fate == "trained"
        writer.write([row("math/0/2", fate="dropped")])
        assert [(one.line, one.fate) for one in reader.rows().rows] == [(2, "dropped"), (1, "trained")]
        reader.show_too([])
        assert reader.count() == 2
    writer.close()


def test_what_is_written_meanwhile_is_seen_and_shifts_no_page(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, 1, max_bytes=MANY, part_bytes=1)
    with closing(HistoryReader(tmp_path)) as reader:
        assert not reader.is_there
        assert reader.rows().rows == []
        for k in range(4):
            writer.write([row(f"math/0/{k}")])
        first = reader.rows(limit=2)
        writer.write([row("math/0/9")])
        second = reader.rows(limit=2, after=first.next)
        assert ids(first.rows + second.rows) == ["3/0", "2/0", "1/0", "0/0"]
        assert ids(reader.rows().rows)[0] == "9/0"
    writer.close()


@pytest.mark.parametrize("harm", ["cut", "emptied", "text", "another", "trigger", "format", "middle"])
def test_a_file_that_is_not_what_it_should_be_is_told_and_left_out(tmp_path: Path, harm: str) -> None:
    write(tmp_path, "a file each")
    second = parts_of(tmp_path)[1].path(tmp_path)
    if harm in ("trigger", "format", "another"):
        statement = {
            "trigger": "CREATE TRIGGER t AFTER INSERT ON uses BEGIN DELETE FROM uses; END",
            "format": "PRAGMA user_version=7",
            "another": "DROP TABLE uses",
        }[harm]
        with closing(sqlite3.connect(second)) as part:
            part.execute(statement)
            part.commit()
    elif harm == "middle":
        data = bytearray(second.read_bytes())
        data[16384:] = b"\x55" * (len(data) - 16384)
        second.write_bytes(data)
    else:
        data = second.read_bytes()
        second.write_bytes(
            {"cut": data[: len(data) // 2], "emptied": b"\0" * 40_000, "text": b"no database" * 999}[harm]
        )

    with closing(HistoryReader(tmp_path)) as reader:
        assert ids(reader.rows(ascending=True).rows) == ["0/0", "0/1", "2/0", "2/1", "3/0", "3/1", "4/0", "4/1"]
        assert reader.count() == 8
        (said,) = reader.problems
        assert said.startswith(str(second))
        assert said.endswith("It is left out.")


def test_a_row_that_is_damaged_is_told_and_left_out(tmp_path: Path) -> None:
    write(tmp_path, "one file")
    with closing(sqlite3.connect(parts_of(tmp_path)[0].path(tmp_path))) as part:
        part.execute("UPDATE blocks SET fields = 3 WHERE b = 3")
        part.execute("UPDATE blocks SET fields = substr(fields, 9) WHERE b = 5")
        part.execute("DELETE FROM blocks WHERE b = 7")
        part.commit()
    with closing(HistoryReader(tmp_path)) as reader:
        assert ids(reader.rows(ascending=True).rows) == ["0/0", "0/1", "4/0", "4/1"]
        assert len(reader.problems) == 6
        assert all(said.startswith("Row ") for said in reader.problems)


@pytest.mark.parametrize("column", ["k", "part", "oldest", "newest", "num_generated", "fate", "reward"])
def test_a_row_of_other_types_is_no_row(tmp_path: Path, column: str) -> None:
    write(tmp_path, "one file")
    with closing(sqlite3.connect(parts_of(tmp_path)[0].path(tmp_path))) as part:
        part.execute(f"UPDATE samples SET {column} = x'00' WHERE s = 3")
        part.commit()
    with closing(HistoryReader(tmp_path)) as reader:
        assert len(reader.rows().rows) == 9
        (said,) = reader.problems
        assert "other types than penstock writes" in said
        for sort in Sort:
            reader.rows(sort=sort)
        assert all("other types than penstock writes" in one for one in reader.problems)


@pytest.mark.parametrize(
    "harm",
    [
        "uses SET batch = 'text'",
        "uses SET staleness = x'00'",
        "groups SET job = x'00' WHERE g = 1",
        "samples SET k = 'a'",
    ],
)
def test_a_file_whose_uses_and_names_are_of_other_types_is_left_out(tmp_path: Path, harm: str) -> None:
    write(tmp_path, "one file")
    with closing(sqlite3.connect(parts_of(tmp_path)[0].path(tmp_path))) as part:
        part.execute(f"UPDATE {harm}" if "samples" not in harm else f"UPDATE {harm} WHERE s = 1")
        part.commit()
    with closing(HistoryReader(tmp_path)) as reader:
        rows = reader.rows().rows
        reader.uses_of(rows)
        reader.scores()
        assert len(reader.problems) >= 1
        assert all("other types than penstock writes" in said for said in reader.problems)


def test_a_file_that_was_only_begun_is_no_fault(tmp_path: Path) -> None:
    write(tmp_path, "one file")
    _, connection = begin(tmp_path, 9)
    connection.close()
    (tmp_path / "0000000010-000001.sqlite").touch()
    with closing(HistoryReader(tmp_path)) as reader:
        assert len(reader.rows().rows) == 10
        assert reader.problems == []


@pytest.mark.parametrize("after", ["x", "reward:0.5:1-1:3", "recorded:nan:1-1:3", "recorded:0:1-1:x"])
def test_a_place_that_is_none_is_refused(tmp_path: Path, after: str) -> None:
    with pytest.raises(ConfigError, match="no place in the order of recorded"):
        HistoryReader(tmp_path).rows(after=after)


@pytest.mark.parametrize("wrong", [{"least_reward": float("nan")}, {"version": -2}, {"text": "!?"}, {"batch": 2**64}])
def test_filters_that_ask_for_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Filters(**wrong)  # type: ignore[arg-type]
