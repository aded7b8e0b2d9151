"""What workers share on a machine is closed to its other users: they neither lead them elsewhere nor hold them up."""

import os
from pathlib import Path

import pytest

from penstock.errors import PublishError
from penstock.workers.weights.machine_lock import alone_in
from penstock.workers.weights.version_folders import remove_strangers
from tests.unit.consumers.weights.test_deltas import Line
from tests.unit.workers.weights.test_local_copies import copies_of, get
from tests.unit.workers.weights.test_version_folders import folders_in


def modes(folder: Path) -> list[str]:
    """Of a folder, and of its lock."""
    locked = [folder / ".lock"]
    return [f"{path.stat().st_mode & 0o777:o}" for path in (folder, *locked)]


def test_nobody_else_can_open_what_workers_lock(tmp_path: Path) -> None:
    fetched, copies = tmp_path / "fetched", tmp_path / "copies"
    for folder in (fetched, copies):
        folder.mkdir()
        folder.chmod(0o755)  # as an earlier release left it
    for lock in (fetched / ".lock", copies / ".lock"):
        lock.touch()
        lock.chmod(0o644)
    line = Line(tmp_path)
    line.publish(1)
    get(copies_of(line), line, 1)
    with alone_in(folders_in(fetched).lock_file()):
        pass
    assert [modes(fetched), modes(copies)] == [["700", "600"], ["700", "600"]]


def test_a_link_in_the_place_of_a_lock_empties_no_file(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoint"
    kept.write_text("8 TB")
    line = Line(tmp_path)
    line.publish(1)
    line.announce(1)
    assert line.announced is not None
    for link in ("a/.lock", "c/.lock"):
        (tmp_path / link).parent.mkdir(parents=True)
        (tmp_path / link).symlink_to(kept)
    with pytest.raises(PublishError, match="is a link, and must be a file of penstock's"):
        copies_of(line, "a").get(line.announced)
    with pytest.raises(PermissionError, match="is a link"), alone_in(tmp_path / "c" / ".lock"):
        pytest.fail("it went on")
    assert kept.read_text() == "8 TB"


def test_a_link_in_the_place_of_what_is_fetched_deletes_no_file(tmp_path: Path) -> None:
    theirs = tmp_path / "checkpoints"
    (theirs / "step_9000").mkdir(parents=True)
    (theirs / "notes").touch()
    at = folders_in(tmp_path).temporary("v1")
    at.symlink_to(theirs)
    with pytest.raises(PublishError, match="cannot be read"):
        folders_in(tmp_path).complete(at, "0" * 32, lambda sizes: None)
    assert sorted(os.listdir(theirs)) == ["notes", "step_9000"]
    assert not at.is_symlink()
    (at / "link").symlink_to(theirs / "step_9000")
    (at / "folder").mkdir()
    (at / "f").write_bytes(b"12345678901")  # longer than it may be
    (at / "other").touch()
    remove_strangers(at, {"f": 10, "link": 0, "folder": 0})
    assert os.listdir(at) == []
    assert sorted(os.listdir(theirs)) == ["notes", "step_9000"]
