"""Create namespaces for one program: it sees only its own processes, network and memory, and the files it may read.

    root's child:       unshare ──> child is process 1 of its namespace: mounts, drops root, executes the program
    another's child:    the same in a user namespace, in which it may mount

Its root is a small file system in memory in which only the folder for temporary files can be written. It has no /proc.
"""

import os
from pathlib import Path

from penstock.workers.rewards.jail import libc
from penstock.workers.rewards.jail.walls import DEVICES, HOME, Walls

#: Mount point of the new root; any existing folder.
_STAGE = "/tmp"
#: Most files and folders below the temporary one.
_MAX_FILES = 4096


def unshare_all(*, own_user: bool) -> None:
    """Let the next child live in namespaces of its own; mounts, network and names change for this process at once.

    Args:
        own_user: in a user namespace, for users who may not create the others. Raises OSError if that is not allowed.
    """
    flags = libc.CLONE_NEWNS | libc.CLONE_NEWPID | libc.CLONE_NEWNET | libc.CLONE_NEWIPC | libc.CLONE_NEWUTS
    if not own_user:
        libc.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    libc.own_proc()
    libc.unshare(flags | libc.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def build(walls: Walls, files_bytes: int) -> None:
    """Build the root that the program sees, and leave the old one. For the child alone. Raises OSError."""
    os.umask(0o022)
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", _STAGE, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.chdir(_STAGE)
    os.mkdir("old")
    libc.pivot_root(".", "old")
    os.chdir("/")
    # Before the readable paths, some of which may be below it.
    os.makedirs(HOME, exist_ok=True)
    options = f"size={files_bytes},nr_inodes={_MAX_FILES},mode=1777"
    libc.mount("tmpfs", HOME, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, options)
    for path in walls.readable:
        _bind(path)
        libc.make_readonly(path)
    for path in DEVICES:
        if os.path.exists(f"/old{path}"):
            _bind(path)
    for link, target in walls.links:
        os.symlink(target, link)
    libc.unmount("/old")
    os.rmdir("/old")
    libc.mount("none", "/", None, libc.MS_REMOUNT | libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_BIND)


def _bind(path: str) -> None:
    """Mount ``path`` of the old root at the same path in the new one."""
    old = f"/old{path}"
    if os.path.isdir(old):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    libc.mount(old, path, None, libc.MS_BIND | libc.MS_REC)
