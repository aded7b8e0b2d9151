"""Parts that a zygote forks: processes of their own in all but their imports."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster.forked import Zygote
from tests.chaos.cluster.processes import runs
from tests.chaos.cluster.supervisor import searched
from tests.chaos.places import RECORDED, ROOT
from tests.chaos.recording import history

PATIENCE_S = 60.0
PART = """
import json, os, signal, sys
import preloaded
from tests.chaos.recording import hooks
hooks._installed.note("began", {})
print(json.dumps({"argv": sys.argv[1:], "mine": os.environ["MINE"], "imported_by": preloaded.PID}), flush=True)
if sys.argv[1] == "waits":
    signal.pause()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zygote")
    (folder / "part.py").write_text(PART)
    (folder / "preloaded.py").write_text("import os, time\nPID = os.getpid()\ndef now(): return time.time()\n")
    return folder


@pytest.fixture
def zygote(folder: Path) -> Iterator[Zygote]:
    zygote = Zygote(folder, environment(folder, "zygote"), folder / "zygote.log", ["preloaded", "no_such_module"])
    yield zygote
    zygote.end()


def environment(folder: Path, who: str, **more: str) -> dict[str, str]:
    path = searched(str(RECORDED), str(ROOT))
    of_all = {"PYTHONPATH": path, "CHAOS_HISTORY": str(folder / "history"), "CHAOS_WHO": who}
    return {**os.environ, **of_all, **more}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_part_has_its_own_arguments_environment_log_history_and_end(zygote: Zygote, folder: Path) -> None:
    one = zygote.fork(["part", "5", "--x"], environment(folder, "one", MINE="1"), folder / "one.log")
    other = zygote.fork(["part", "0"], environment(folder, "other", MINE="2"), folder / "other.log")

    assert (one.wait(), other.wait()) == (5, 0)
    said = [json.loads((folder / f"{name}.log").read_text()) for name in ("one", "other")]
    assert [(each["argv"], each["mine"]) for each in said] == [(["5", "--x"], "1"), (["0"], "2")]
    assert said[0]["imported_by"] == said[1]["imported_by"] not in (one.pid, other.pid)
    recorded = history.read(folder / "history").of("began")
    assert sorted(each.process.split("-")[:2] for each in recorded) == sorted(
        [["one", str(one.pid)], ["other", str(other.pid)]]
    )


def test_a_forked_part_is_killed_and_leaves_no_process(zygote: Zygote, folder: Path) -> None:
    one = zygote.fork(["part", "waits"], environment(folder, "one", MINE="1"), folder / "killed.log")
    assert one.poll() is None

    os.kill(one.pid, signal.SIGKILL)

    assert one.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        one.kill()


def test_what_a_zygote_forked_ends_with_it(zygote: Zygote, folder: Path) -> None:
    one = zygote.fork(["part", "waits"], environment(folder, "one", MINE="1"), folder / "left.log")

    zygote.end()

    until(lambda: not runs(one.pid))


def test_a_forked_part_may_have_a_false_clock(zygote: Zygote, folder: Path) -> None:
    """What was imported before it is no matter: parts look the time up where it is replaced."""
    (folder / "clock.py").write_text(f"import preloaded\nprint(preloaded.now() - {time.time()} > 3000)\n")
    (folder / "told").write_text("+3600")

    one = zygote.fork(["clock"], environment(folder, "one", CHAOS_CLOCK=str(folder / "told")), folder / "clock.log")

    assert one.wait() == 0
    assert (folder / "clock.log").read_text() == "True\n"


@pytest.mark.parametrize("package", ["penstock", "producer", "buffer", "workers", "consumers", "console"])
def test_no_part_takes_the_clock_out_of_its_module(package: str) -> None:
    """It would keep the true one."""
    taken = [path for path in (ROOT / package).rglob("*.py") if "from time import" in path.read_text()]

    assert taken == []
