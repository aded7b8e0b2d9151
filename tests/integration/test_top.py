"""``penstock top``: what keys do to the screen, and that it is drawn whatever the records say."""

from pathlib import Path
from typing import Any

import pytest
import redis
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from penstock.console.cli.target import Target
from penstock.console.top import Top
from penstock.records.codec import pack
from penstock.records.keys import Keys
from penstock.redis.server import RedisServer
from tests.integration import play

HOSTILE = "\x1b[2J\u202e[/red]"


@pytest.fixture
def target(redis_server: RedisServer, client: redis.Redis, keys: Keys) -> Target:
    """A run with 30 workers, of which the first is hostile, and five jobs."""
    play.subscribe(client, keys, mode="async", size=2)
    play.join(client, keys)
    play.publish(client, keys, 1, 0)
    play.admit(client, keys, [play.job(i) for i in range(5)])
    now = float(client.time()[0]) + 600
    for index in range(30):
        record = {"name": f"w{index:02}", "at": now, "held": 30 - index, "version": 1, "state": "serving"}
        client.hset(keys.workers, f"w{index:02}", pack(record | ({"engine": HOSTILE} if not index else {})))
    return Target(keys.run, redis_server.url, Path("none"))


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()


def first_column(app: Top) -> list[str]:
    table: DataTable[Any] = app.query_one(DataTable)
    return [str(table.get_row_at(at)[0]) for at in range(table.row_count)]


def text_of(app: Top, name: str) -> str:
    return str(app.query_one(name, Static).content)


async def test_keys_choose_the_list_the_order_and_the_row(target: Target) -> None:
    async with Top(target, 3600.0).run_test() as pilot:
        app = pilot.app
        assert isinstance(app, Top)
        assert first_column(app)[:2] == ["w00", "w01"]
        assert "async, bound 1" in text_of(app, "#head")
        assert "train 5+0" in text_of(app, "#head")
        await press(pilot, "down", "j", "k", "enter")
        assert app.opened == "w01"
        assert "name: w01" in text_of(app, "#about")
        await press(pilot, "escape")
        assert app.opened == ""
        await press(pilot, "s", "s", "s", "s")
        assert (app.sort, first_column(app)[0]) == ("leased", "w29")
        await press(pilot, "r")
        assert first_column(app)[0] == "w00"
        await press(pilot, "2")
        assert (app.list_name, app.sort, first_column(app)) == ("jobs", "job", [f"d/0/{i}" for i in range(5)])
        await press(pilot, "tab")
        assert (app.list_name, first_column(app)) == ("subs", ["actor"])
        await press(pilot, "enter")
        assert "sampler" in text_of(app, "#about")
        await press(pilot, "tab", "tab", "q")
        assert app.list_name == "workers"


async def test_hostile_text_is_drawn_harmlessly(target: Target) -> None:
    async with Top(target, 3600.0).run_test(size=(200, 40)) as pilot:
        app = pilot.app
        assert isinstance(app, Top)
        row = "".join(map(str, app.query_one(DataTable).get_row_at(0)))
        await press(pilot, "enter")
        for shown in (row, text_of(app, "#about")):
            assert "[/red]" in shown
            assert not {"\x1b", "\u202e"} & set(shown)


async def test_a_redis_that_does_not_answer_is_reported_and_the_data_stay(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise redis.ConnectionError("refused")

    async with Top(target, 3600.0).run_test() as pilot:
        app = pilot.app
        assert isinstance(app, Top)
        monkeypatch.setattr("penstock.console.top.snapshot", fail)
        app.look()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "refused" in text_of(app, "#head")
        assert len(first_column(app)) == 30
