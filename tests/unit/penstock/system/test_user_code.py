"""Code of a user's own: what it leaves on the loop, how it ends, and what it gives."""

import asyncio
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.errors import ConfigError
from penstock.system.user_code import Raised, bounded, find, run_through
from penstock.text import TooMuch, safe_repr, to_plain

LOOPS = [uvloop.new_event_loop, asyncio.new_event_loop]


async def swallows() -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("factory", LOOPS)
def test_nothing_on_the_loop_ends_it_before_its_work_is_done(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def exits(how: BaseException) -> None:
        ended.append(type(how).__name__)
        raise how

    async def main() -> str:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(exits(how)) for how in (SystemExit(3), KeyboardInterrupt())]
        loop.call_soon(sys.exit, 4)
        loop.stop()
        await asyncio.wait(tasks)
        return "done"

    assert run_through(main(), factory) == "done"
    assert ended == ["SystemExit", "KeyboardInterrupt"]
    assert "which continues: " in caplog.text


@pytest.mark.parametrize("factory", LOOPS)
def test_what_the_work_itself_ends_by_is_raised(factory: Any) -> None:
    async def main() -> None:
        sys.exit(5)

    with pytest.raises(SystemExit, match="5"):
        run_through(main(), factory)


def test_a_task_that_swallows_its_cancellation_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.system.user_code.CLOSE_S", 0.1)
    kept = []

    async def main() -> str:
        kept.append(asyncio.create_task(swallows()))
        await asyncio.sleep(0)
        return "done"

    assert run_through(main(), uvloop.new_event_loop) == "done"


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_left_to_itself_is_closed_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await bounded(swallows, 0.05, "swallows")

    gc.collect()  # what other tests left
    caplog.clear()
    run_through(main(), asyncio.new_event_loop)
    gc.collect()
    assert caplog.text == ""


async def test_a_GeneratorExit_of_its_own_is_what_it_raised() -> None:
    async def leaves() -> None:
        raise GeneratorExit("of its own")

    with pytest.raises(Raised, match="raised GeneratorExit: of its own"):
        await bounded(leaves, 60, "leaves")


async def test_a_fork_does_not_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    async def forks() -> int:
        if (pid := os.fork()) == 0:
            raise FileNotFoundError("no such program")
        return pid

    pid = await bounded(forks, 60, "forks")
    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert "forked came back from it by Raised: raised FileNotFoundError: no such program" in capfd.readouterr().err


def entangled(width: int) -> list[Any]:
    node: list[Any] = []
    node.extend([node] * width)
    return node


def doubled(times: int) -> list[Any]:
    node: list[Any] = []
    for _ in range(times):
        node = [node, node]
    return node


def test_what_holds_itself_ends_where_it_meets_itself() -> None:
    assert to_plain({"a": entangled(30)}) == {"a": ["..."] * 30}
    child: dict[str, Any] = {"name": "child"}
    parent = {"name": "parent", "children": [child]}
    child["parent"] = parent
    assert to_plain(parent)["children"] == [{"name": "child", "parent": "..."}]


def shared(width: int, depth: int) -> Any:
    return [shared(width, depth - 1)] * width if depth else 0


@pytest.mark.parametrize("value", [list(range(10**6)), [["x" * 1000] * 1000] * 1000, shared(9, 12)])
def test_what_is_too_large_is_refused_before_it_is_made(value: Any) -> None:
    with pytest.raises(TooMuch, match="more than 10,000 values and characters"):
        to_plain(value, 10_000)


def test_anything_is_shown_in_few_characters() -> None:
    before = time.process_time()
    for value in (doubled(64), entangled(9), {"a": doubled(64)}, "x" * 10**7, b"x" * 10**7, 10**5000):
        assert len(safe_repr(value)) <= 80
    assert time.process_time() - before < 10, "64 doublings are 2**64 brackets"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "own_reward:score",
            "own_reward imports it: install it in penstock's environment (pip install not_here).",
        ),
        ("not_here.at_all:score", "put it beside where you start penstock, or on PYTHONPATH."),
    ],
)
def test_a_missing_package_is_installed_and_a_missing_module_put_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    (tmp_path / "own_reward.py").write_text("import not_here.part\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError) as caught:
        find(name, "reward.function")

    assert str(caught.value).endswith(remedy)
