"""Child processes that are kept running: what is said of one that ended."""

import contextlib
import logging
import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

from penstock.system.processes import Child
from tests.integration.parts import until


@pytest.mark.parametrize(
    ("says", "said"), [("print('ConfigError: no such file')", "ConfigError: no such file"), ("", "")]
)
def test_a_restart_says_how_the_log_of_what_ended_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, says: str, said: str
) -> None:
    program = f"{says}\nraise SystemExit(1)"
    child = Child("trainer", [sys.executable, "-c", program], dict(os.environ), tmp_path / "trainer.log")
    child.start()
    assert child.process is not None
    child.process.wait()
    assert child.ended()
    with caplog.at_level(logging.WARNING):
        assert child.schedule_restart() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("trainer ended by exit code 1 and is started again in 0.5 s")
    assert line.endswith(f"trainer.log ends with: {said}" if said else "0.5 s")


def test_what_a_stopped_keeper_keeps_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    mark = f"kept-{uuid.uuid4().hex}"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1e6)', '{mark}'])"
    child = Child("kept", [sys.executable, "-c", script], os.environ, tmp_path / "log", kept=True)
    child.start()
    until(lambda: len(with_word(mark)) > 1)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)

    child.kill()

    assert with_word(mark) == []


def with_word(word: str) -> list[str]:
    """Processes with this word in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [file.parent.name] if word.encode() in file.read_bytes() else []
    return found
