"""A folder and a file of this user alone: others can neither prepare them nor look into them."""

import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.system.disk import append, own_file, own_folder
from penstock.system.run_folder import RunFolder


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_of_ours_is_closed_to_others(tmp_path: Path) -> None:
    own_folder(tmp_path / "a" / "new")
    old = tmp_path / "old"
    old.mkdir()
    old.chmod(0o777)  # whatever the umask was
    own_folder(old)
    assert [mode(tmp_path / "a" / "new"), mode(old)] == [0o700, 0o700]


def test_a_record_begins_on_a_line_of_its_own_behind_half_a_record(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "da')
    append(file, '{"step": 2}\n')
    append(file, '{"step": 3}\n')
    assert file.read_text() == '{"step": 1}\n{"step": 2, "da\n{"step": 2}\n{"step": 3}\n'


def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    theirs = Path("/usr")  # for a plain user
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir(mode=0o755)
        os.chown(theirs, 65534, 65534)
    with pytest.raises(PermissionError, match=rf"{theirs} belongs to another user \(uid \d+\): name another folder"):
        own_folder(theirs)
    assert mode(theirs) == 0o755


def test_a_link_to_a_folder_is_followed_where_it_is_ours(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk")
    own_folder(link)
    assert mode(tmp_path / "disk") == 0o700
    if os.geteuid() == 0:
        os.chown(link, 65534, 65534, follow_symlinks=False)
        with pytest.raises(PermissionError, match="is a link of another user"):
            own_folder(link)


def test_a_file_of_ours_is_closed_to_others_and_never_what_a_link_or_pipe_leads_to(tmp_path: Path) -> None:
    old, kept, link, pipe = (tmp_path / name for name in ("old", "kept", "link", "pipe"))
    old.touch(mode=0o644)
    kept.write_text("a checkpoint")
    link.symlink_to(kept)
    os.mkfifo(pipe)
    for path in (old, tmp_path / "new"):
        os.close(own_file(path))
        assert mode(path) == 0o600
    for path in (link, pipe):
        with pytest.raises(PermissionError, match=f"{path} is .*: remove it"):
            own_file(path)
    assert (kept.read_text(), mode(kept)) == ("a checkpoint", 0o644)


def test_a_run_is_held_by_a_file_that_others_can_neither_lock_nor_lead_elsewhere(tmp_path: Path) -> None:
    run, kept, lock = RunFolder(tmp_path / "run"), tmp_path / "kept", tmp_path / ".run.lock"
    lock.touch(mode=0o644)
    for _ in range(2):
        with run.held():
            assert (mode(lock), lock.read_text()) == (0o600, str(os.getpid()))
            assert run.is_held()
    lock.unlink()
    kept.write_text("a checkpoint")
    lock.symlink_to(kept)
    with pytest.raises(ConfigError, match="is a link"), run.held():
        pytest.fail("it is held")
    assert kept.read_text() == "a checkpoint"
