"""A worker that is killed while it makes a copy leaves nothing that anybody takes for one."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.unit.consumers.weights.test_deltas import Line

WORKER = "tests.integration.copies_worker"


def make(line: Line, version: int, die_at: int = 1_000_000) -> subprocess.CompletedProcess[str]:
    written = line.written[version]
    arguments = [line.path / "store", line.path / "copies", written.path, written.index_digest, version, die_at]
    command = [sys.executable, "-m", WORKER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_I9_kill_9_at_points_of_the_making_leaves_whole_copies_and_a_folder_that_the_next_one_removes(
    tmp_path: Path,
) -> None:
    line = Line(tmp_path, anchor_every=2)
    line.in_use = {1}
    for version in range(1, 4):
        line.publish(version)
    assert make(line, 1).returncode == 0
    done = make(line, 2)
    acts = int(done.stdout.split("acts ")[1])
    assert acts > 8
    (copy,) = (tmp_path / "copies").glob("v00000002*")
    copy.rename(tmp_path / "elsewhere")

    for die_at in sorted({1, 2, acts // 4, acts // 2, 3 * acts // 4, acts - 1, acts}):
        killed = make(line, 2, die_at)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        for path in (tmp_path / "copies").glob("v*"):
            assert contents(path) == contents(line.written[int(path.name[1:9])].path)
        again = make(line, 2)
        assert again.returncode == 0, again.stderr
        assert contents(Path(again.stdout.split()[0])) == contents(line.written[2].path)
        if int(again.stdout.split("acts ")[1]):  # else it is here, and leaves this to whoever makes the next one
            assert not list((tmp_path / "copies").glob(".making*"))
        (copy,) = (tmp_path / "copies").glob("v00000002*")
        for file in copy.iterdir():
            file.unlink()
        copy.rmdir()
    assert make(line, 2).returncode == 0
    assert not list((tmp_path / "copies").glob(".making*"))
    assert contents(next((tmp_path / "copies").glob("v00000001*"))) == contents(line.written[1].path)
