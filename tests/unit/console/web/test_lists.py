"""Lists page by page: with all rows, in order, filtered as on the command line."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.console.resources import LISTS, Column, Resource
from penstock.console.web import lists
from penstock.console.web.lists import KEPT_FURTHER_S, KEPT_S, Lists
from penstock.console.web.replies import NotThere
from penstock.errors import ConfigError

Rows = list[dict[str, Any]]


class Book:
    """A list of jobs that a test holds, and the clock that it is read by."""

    def __init__(self, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows, self.reads, self.now = rows, 0, 100.0
        self.target: Any = SimpleNamespace(client=None, keys=SimpleNamespace(run="demo"))
        self.lists = Lists(clock=lambda: self.now)
        columns = tuple(Column(name, "text", "", True) for name in ("job", "n"))
        monkeypatch.setitem(lists.LISTS, "jobs", Resource("jobs", ("job",), columns=columns))  # type: ignore[index]
        monkeypatch.setattr(Resource, "rows", self._read)

    def _read(self, *_: Any) -> Rows:
        self.reads += 1
        return list(self.rows)

    def page(self, after: int = 0, sort: str = "", where: tuple[str, ...] = (), limit: int = 3) -> Any:
        return SimpleNamespace(**self.lists.page(self.target, "jobs", where=where, sort=sort, limit=limit, after=after))

    def all(self, sort: str = "") -> list[str]:
        found, page = [], self.page(sort=sort)
        while True:
            found += [row["job"] for row in page.rows]
            if page.next is None:
                return found
            page = self.page(page.next, sort)


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    rows: Rows = [{"job": f"d/0/{at}", "n": at % 3 or None} for at in range(20)]
    return Book(rows[::-1], monkeypatch)


@pytest.mark.parametrize("sort", ["", "job", "-job", "n", "-n"])
def test_pages_hold_every_row_once_in_order(book: Book, sort: str) -> None:
    found = book.all(sort)
    assert sorted(found) == sorted(row["job"] for row in book.rows)
    if sort in ("", "job"):
        assert found == [f"d/0/{at}" for at in range(20)], "numbers by their value"
    if sort == "-job":
        assert found == [f"d/0/{at}" for at in range(19, -1, -1)]
    counts = {row["job"]: row["n"] or 0 for row in book.rows}
    if sort in ("n", "-n"):
        values = [counts[job] for job in found]
        assert values == sorted(values, reverse=sort == "-n")


def test_pages_of_one_list_are_read_once(book: Book) -> None:
    assert len(book.all()) == 20
    assert book.reads == 1
    book.now += KEPT_S
    book.page()
    assert book.reads == 2


def test_a_list_is_filtered_as_on_the_command_line(book: Book) -> None:
    page = book.page(where=("n=2", "job~1"), limit=100)
    assert [row["job"] for row in page.rows] == ["d/0/11", "d/0/14", "d/0/17"]
    assert (page.total, page.next) == (3, None)


def test_what_is_not_a_list_or_not_a_field_is_refused(book: Book) -> None:
    with pytest.raises(NotThere, match="no list of 'cats'"):
        book.lists.page(book.target, "cats", where=(), sort="", limit=3, after=0)
    with pytest.raises(ConfigError, match="have no field 'cats'"):
        book.page(sort="cats")
    with pytest.raises(ConfigError, match="have no field 'cats'"):
        book.page(where=("cats=1",))


def test_a_row_is_cut_to_what_a_list_shows(book: Book) -> None:
    book.rows = [{"job": "x" * 100_000, "n": ["y" * 100_000] * 5_000}]
    (row,) = book.page().rows
    assert len(row["job"]) == lists.MAX_TEXT
    assert (len(row["n"]), len(row["n"][0])) == (lists.MAX_LIMIT, lists.MAX_TEXT)


def test_a_page_further_on_is_of_the_list_that_was_read_for_the_first(book: Book) -> None:
    first = book.page()
    book.now += KEPT_FURTHER_S - 1
    further = book.page(first.next)
    assert ([row["job"] for row in further.rows], book.reads) == (["d/0/3", "d/0/4", "d/0/5"], 1)
    book.now += 1
    book.page(first.next)
    assert book.reads == 2, "whoever takes a minute gets what is there by then"
    book.now += KEPT_S
    book.page()
    assert book.reads == 3


@pytest.mark.parametrize("noun", LISTS)
def test_the_key_of_a_list_is_among_its_fields(noun: str) -> None:
    """A list can be sorted by each field that identifies its rows."""
    assert set(LISTS[noun].key) <= set(LISTS[noun].fields)


def test_cells_are_text_in_the_order_of_the_columns(book: Book) -> None:
    page = book.page(limit=1)
    assert [(one["title"], one["kind"]) for one in page.columns] == [("Job", "text"), ("N", "text")]
    assert page.cells == [{"job": "d/0/0", "n": ""}]
