"""Child processes that are kept running: what is said of one that ended."""

import logging
import os
import sys
from pathlib import Path

import pytest

from penstock.system.processes import Child


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
