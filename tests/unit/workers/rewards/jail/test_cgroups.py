"""Cgroups of a jail, in a folder that looks like a machine's."""

import os
from pathlib import Path

import pytest

from penstock.workers.rewards.jail import jail


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_version_1_has_a_group_for_memory_and_one_for_processes(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/\n4:memory:/mine\n3:pids:/\n0::/\n")
    memory, pids = root / "sys/fs/cgroup/memory/mine", root / "sys/fs/cgroup/pids"
    memory.mkdir(parents=True)
    pids.mkdir()

    made = jail.make(1000, 10, root)

    name = f"penstock-jail-{os.getpid()}"
    assert made.folders == (memory / name, pids / name)
    assert (memory / name / "memory.limit_in_bytes").read_text() == "1000"
    assert (pids / name / "pids.max").read_text() == "12"


def test_version_2_has_one_group_and_is_asked_for_what_is_missing(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/mine\n")
    mine = root / "sys/fs/cgroup/mine"
    mine.mkdir(parents=True)
    (mine / "cgroup.subtree_control").write_text("memory")

    made = jail.make(1000, 10, root)

    (folder,) = made.folders
    assert ((folder / "memory.max").read_text(), (folder / "pids.max").read_text()) == ("1000", "12")
    assert (mine / "cgroup.subtree_control").read_text() == "+pids"


def test_version_2_has_it_beside_a_group_that_may_have_none_below(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/slice/mine\n")
    mine = root / "sys/fs/cgroup/slice/mine"
    (mine / "cgroup.subtree_control").mkdir(parents=True)  # what cannot be written
    (mine.parent / "cgroup.subtree_control").write_text("cpu memory pids")

    made = jail.make(1000, 10, root)

    assert made.folders == (mine.parent / f"penstock-jail-{os.getpid()}",)


def test_where_none_may_be_made_there_is_none(root: Path) -> None:
    assert jail.make(1000, 10, root).folders == ()
    (root / "proc/self/cgroup").write_text("0::/gone\n")
    made = jail.make(1000, 10, root)
    assert (made.folders, "FileNotFoundError" in made.lack) == ((), True)
    assert made.open() == ()
    made.remove()


def test_what_a_killed_process_left_is_removed_by_the_next(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/\n")
    top = root / "sys/fs/cgroup"
    for name in ("penstock-jail-999999999", f"penstock-jail-{os.getppid()}", "penstock-jail-mine"):
        (top / name).mkdir(parents=True)
    (top / "cgroup.subtree_control").write_text("memory pids")

    jail.make(1000, 10, root)

    names = {folder.name for folder in top.iterdir() if folder.is_dir()}
    assert names == {f"penstock-jail-{os.getpid()}", f"penstock-jail-{os.getppid()}", "penstock-jail-mine"}
