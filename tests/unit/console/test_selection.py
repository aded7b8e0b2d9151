"""Lists: what --where, --sort and --limit choose, alike in all of them."""

import json

import pytest

from penstock.console.cli.nouns import show_list
from penstock.console.resources import Column, Resource
from penstock.console.selection import SHOWN, Choice, Row, select
from penstock.errors import ConfigError

FIELDS = ("job", "state", "n", "worker")
JOBS = Resource("jobs", ("job",), columns=tuple(Column(name, "text", "", name == "job") for name in FIELDS))
ROWS: list[Row] = [
    {"job": "d/0/10", "state": "dead", "n": 3, "worker": "w1"},
    {"job": "d/0/9", "state": "queued", "n": 12, "worker": ""},
    {"job": "d/0/11", "state": "dead", "n": None, "worker": None},
]


def chosen(*where: str, sort: str | None = None) -> list[str]:
    return [row["job"].rpartition("/")[2] for row in select(ROWS, FIELDS, Choice(where, sort))]


@pytest.mark.parametrize(
    ("where", "jobs"),
    [
        ((), ["10", "9", "11"]),
        (("state=dead",), ["10", "11"]),
        (("state!=dead",), ["9"]),
        (("state=dead", "worker=w1"), ["10"]),
        (("n>3",), ["9"]),
        (("n>=3",), ["10", "9"]),
        (("n<12",), ["10"]),
        (("n=3.0",), ["10"]),
        (("job~/1",), ["10", "11"]),
        (("worker=",), ["9", "11"]),
        (("job>d/0/9",), ["10", "11"]),
        (("state=a=b",), []),
    ],
)
def test_filters_hold_all_together(where: tuple[str, ...], jobs: list[str]) -> None:
    assert chosen(*where) == jobs


@pytest.mark.parametrize(
    ("sort", "jobs"), [("job", ["9", "10", "11"]), ("-job", ["11", "10", "9"]), ("n", ["11", "10", "9"])]
)
def test_numbers_in_ids_are_sorted_by_their_value_and_nothing_comes_first(sort: str, jobs: list[str]) -> None:
    assert chosen(sort=sort) == jobs


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice(["state"]), "invalid --where 'state': give FIELD=VALUE"),
        (Choice(["stat=dead"]), "these rows have no field 'stat', but job, state, n, worker."),
        (Choice(sort="-stat"), "--sort '-stat': these rows have no field 'stat'"),
    ],
)
def test_a_field_that_is_not_there_is_named_even_where_there_are_no_rows(choice: Choice, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        select([], FIELDS, choice)


def test_words_stop_at_a_screen_and_say_so_and_json_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"job": f"d/0/{i}"} for i in range(SHOWN + 3)]
    show_list(JOBS, rows, Choice())
    out, err = capsys.readouterr()
    assert (len(out.splitlines()), err) == (
        2 + SHOWN,
        f"3 more: --after {SHOWN} continues, --limit {SHOWN + 3} shows all\n",
    )

    show_list(JOBS, rows, Choice(after=SHOWN))
    out, err = capsys.readouterr()
    assert ([line.split()[0] for line in out.splitlines()[2:]], err) == (["d/0/50", "d/0/51", "d/0/52"], "")
    show_list(JOBS, rows, Choice(after=2, limit=1))
    assert capsys.readouterr().err == f"{SHOWN} more: --after 3 continues, --limit {SHOWN + 3} shows all\n"
    show_list(JOBS, rows, Choice(after=900))
    assert capsys.readouterr() == ("jobs: none\n", "")

    show_list(JOBS, rows, Choice(limit=2))
    assert len(capsys.readouterr().out.splitlines()) == 4

    show_list(JOBS, rows, Choice(as_json=True))
    assert len(json.loads(capsys.readouterr().out)) == SHOWN + 3
    show_list(JOBS, rows, Choice(as_json=True, limit=2))
    assert len(json.loads(capsys.readouterr().out)) == 2
