"""Entries of a log: time with its zone, run, part, level and job; as lines for people, or as JSON."""

import asyncio
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.system.logs import LogFormat, as_text, of_job, say_end, set_up
from penstock.text import know

TIME = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
HOSTILE = "\x1b]0;title\x07 \u202e\nsecond"
log = logging.getLogger("some.module")


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = logging.root.handlers[:], logging.root.level
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    yield
    logging.root.handlers[:], logging.root.level = before
    logging.captureWarnings(False)


def entries(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_has_time_with_zone_run_part_level_and_job(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker-0", "digits")
    log.info("leased")
    with of_job("train/0/12"):
        log.warning("lost")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{TIME} digits worker-0 INFO leased", first)
    assert re.fullmatch(rf"{TIME} digits worker-0 WARNING \[job train/0/12\] lost", second)


def test_json_has_the_same_as_fields_and_a_traceback_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    know("hush hush")
    set_up("worker-0", "digits", LogFormat.JSON)
    with of_job("train/0/12"):
        try:
            raise ValueError("hush hush")
        except ValueError:
            log.exception("it %s hush hush", HOSTILE)
    said = capsys.readouterr().err
    (entry,) = entries(said)
    assert re.fullmatch(TIME, entry.pop("time"))
    assert "ValueError: ***" in entry.pop("traceback")
    assert entry == {
        "run": "digits",
        "part": "worker-0",
        "level": "ERROR",
        "logger": "some.module",
        "job": "train/0/12",
        "message": f"it {HOSTILE} ***",
    }
    assert said.isascii()
    assert said.rstrip("\n").isprintable()


def test_a_percent_sign_in_a_name_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("w%s", "r%d")
    log.info("text")
    assert " r%d w%s INFO text\n" in capsys.readouterr().err


async def test_tasks_of_a_job_say_its_id_and_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker-0", "digits", LogFormat.JSON)

    async def say(text: str) -> None:
        await asyncio.to_thread(log.info, text)

    async def work(job: str) -> None:
        with of_job(job):
            await asyncio.gather(say(f"{job} one"), say(f"{job} two"))

    await asyncio.gather(*(asyncio.create_task(work(f"job{n}")) for n in range(3)), say("none"))
    found = {entry["message"]: entry.get("job") for entry in entries(capsys.readouterr().err)}
    assert found == {f"job{n} {word}": f"job{n}" for n in range(3) for word in ("one", "two")} | {"none": None}


@pytest.mark.parametrize("form", LogFormat)
def test_the_last_sentence_of_a_process_is_like_its_log(form: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    set_up("trainer", "digits", form)
    say_end("No Redis.")
    said = capsys.readouterr().err
    if form is LogFormat.JSON:
        assert entries(said)[0]["message"] == "No Redis."
    else:
        assert said == "penstock: No Redis.\n"


def test_what_nobody_caught_is_an_entry_of_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("trainer", "digits", LogFormat.JSON)

    def fail() -> None:
        raise KeyError("x")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    (entry,) = entries(capsys.readouterr().err)
    assert entry["level"] == "CRITICAL"
    assert entry["traceback"].endswith("KeyError: 'x'")


def test_a_log_of_json_is_shown_as_text_and_the_rest_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("trainer", "digits", LogFormat.JSON)
    log.error("it %s failed", HOSTILE)
    line = capsys.readouterr().err
    shown = as_text(f'{line}from elsewhere\n{{"time"\n{{"time": 1}}')
    first, second, *rest = shown.splitlines()
    assert re.fullmatch(rf"{TIME} digits trainer ERROR it \\x1b\]0;title\\x07 \\u202e", first)
    assert second == "second failed"
    assert rest == ["from elsewhere", '{"time"', "1"]
