"""What a process was told is on the disk before it goes on, and what it was not told is unknown."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.places import ROOT
from tests.chaos.recording.history import Operation, read
from tests.chaos.recording.recorder import MAX_LINE_BYTES, NO, YES, Recorder


def only(folder: Path, op: str) -> Operation:
    (found,) = read(folder).of(op)
    return found


def test_a_call_and_its_end_are_one_operation(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "worker")

    recorder.end(recorder.call("lease", {"worker": "w"}), YES, {"jobs": ["j"]})
    recorder.end(recorder.call("commit", {"job": "j"}), NO)

    lease, commit = only(tmp_path, "lease"), only(tmp_path, "commit")
    assert (lease.outcome, lease.facts, lease.answer) == (YES, {"worker": "w"}, {"jobs": ["j"]})
    assert (commit.outcome, commit.may_have_happened) == (NO, False)
    assert lease.ended is not None
    assert lease.began < lease.ended < commit.began


def test_a_process_that_is_killed_leaves_an_unknown_outcome(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tests.chaos.recording.recorder import Recorder
recorder = Recorder(Path({str(tmp_path)!r}), "worker")
recorder.note("told", {{}})
recorder.call("commit", {{"job": "j"}})
os.kill(os.getpid(), signal.SIGKILL)
"""

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)

    assert done.returncode == -signal.SIGKILL
    assert only(tmp_path, "told").happened
    assert only(tmp_path, "commit").outcome == "unknown"
    assert only(tmp_path, "commit").may_have_happened


def test_a_torn_last_line_is_no_error(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "worker")
    recorder.end(recorder.call("commit", {"job": "j"}), YES)
    (path,) = tmp_path.glob("*.jsonl")
    whole = path.read_bytes()

    for end in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert {one.outcome for one in read(tmp_path).of("commit")} <= {"unknown"}


def test_a_line_that_is_missing_is_an_error(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "worker")
    for job in "abc":
        recorder.note("commit", {"job": job})
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))

    with pytest.raises(ValueError, match="goes from record 2 to 4: a part of the history is missing"):
        read(tmp_path)


def test_a_child_begins_a_history_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "pool")
    recorder.note("told", {"by": "parent"})

    child = os.fork()
    if child == 0:
        recorder.note("told", {"by": "child"})
        os._exit(0)
    os.waitpid(child, 0)

    told = read(tmp_path).of("told")
    assert [one.facts["by"] for one in told] == ["parent", "child"]
    assert told[0].process != told[1].process


def test_a_record_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="longer than a line of a history"):
        Recorder(tmp_path, "worker").note("told", {"text": "x" * MAX_LINE_BYTES})
