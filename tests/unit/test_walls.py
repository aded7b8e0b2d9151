"""What the house looks like: what a part loads, how long a file is, how many a folder holds.

That no import crosses a wall is checked by `make check`.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("console", "producer", "workers", "buffer", "consumers", "penstock")

#: Lines of a file; a longer one says why in a line of its head that begins so.
MAX_LINES, REASON = 500, "Over 500 lines because "

#: Python files and packages directly in a folder, `__init__.py` apart.
MAX_MEMBERS = {"penstock": 15, "workers": 15, "consumers": 12}
MAX_OTHERS = 22


@pytest.mark.parametrize(
    "module",
    ["penstock.workers.fleet.main", "penstock.redis.connect", "penstock.buffer.main", "penstock.producer.main"],
)
def test_a_part_loads_nothing_of_the_console(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith('penstock.console')])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "[]\n"


def test_no_request_is_limited_by_the_timer_of_aiohttp() -> None:
    """It takes a cancellation that comes as the time runs out for the time: who asks again would go on for ever."""
    files = [file for name in PARTS for file in (ROOT / name).rglob("*.py")]

    calls = [
        call
        for file in files
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("aiohttp.Client")
    ]

    timers = [call for call in calls if ast.unparse(call.func) == "aiohttp.ClientTimeout"]
    assert timers
    assert {ast.unparse(call.keywords[0].value) for call in timers} == {"None"}
    assert {call.keywords[0].arg for call in timers} == {"total"}
    sessions = [call for call in calls if ast.unparse(call.func) == "aiohttp.ClientSession"]
    assert all("timeout" in {word.arg for word in call.keywords} for call in sessions), "without, it is five minutes"


def test_every_timeout_of_a_wait_says_what_was_missing() -> None:
    calls = [
        (str(file), call)
        for name in PARTS
        for file in (ROOT / name).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "WaitTimeout"
    ]

    assert len(calls) > 10
    assert [file for file, call in calls if "cause" not in {word.arg for word in call.keywords}] == []


def test_a_file_is_short_or_says_why_it_is_not() -> None:
    files = [file for name in (*PARTS, "benchmarks", "examples") for file in (ROOT / name).rglob("*.py")]

    long = {file for file in files if len(file.read_text().splitlines()) > MAX_LINES}

    reasons = {file: ast.get_docstring(ast.parse(file.read_text())) or "" for file in long}
    assert {str(file) for file in long if not any(map(is_reason, reasons[file].splitlines()))} == set()


def test_no_file_is_parted_by_banners() -> None:
    """What wants a headline wants a file, or a name."""
    banner = re.compile(r"^\s*#\s*[-=~*#]{3,}", re.MULTILINE)
    files = [file for name in (*PARTS, "benchmarks", "examples") for file in (ROOT / name).rglob("*.py")]

    assert [str(file) for file in files if banner.search(file.read_text())] == []


def is_reason(line: str) -> bool:
    return line.startswith(REASON)


def test_a_folder_holds_what_can_be_looked_through() -> None:
    inside = [folder for name in PARTS for folder in ((ROOT / name), *(ROOT / name).rglob("*"))]
    folders = [folder for folder in inside if folder.is_dir() and not folder.is_symlink()]

    crowded = {}
    for folder in folders:
        members = {one.stem for one in folder.glob("*.py")} | {
            one.parent.name for one in folder.glob("*/__init__.py") if not one.parent.is_symlink()
        }
        count, room = len(members - {"__init__"}), str(folder.relative_to(ROOT))
        if count > MAX_MEMBERS.get(room, MAX_OTHERS):
            crowded[room] = count
    assert crowded == {}
