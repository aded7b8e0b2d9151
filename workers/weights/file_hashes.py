"""Compute the XXH3-64 of a version's files once per machine, in a process of low priority, and cache it.

    cached, and no file has changed ──> answer
      └─no─> lock of the version ── cached by now? ─no─> child hashes the others ── cache them ──> answer

The cache is ``$XDG_CACHE_HOME/penstock/hashes/BOOT`` (``~/.cache/penstock/...``), which the workers of one user share.
A file counts as unchanged if its size, inode, device, mtime and ctime are the same as when it was hashed. The cache is
optional: without it, or if the child dies or stalls, the files are hashed in this process. A hash that differs from the
announced one is discarded and computed once more: the file may have been misread, or repaired since.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.errors import PublishError
from penstock.system.disk import check_own, file_xxh3, own_folder, put
from penstock.system.keeper import die_with_parent
from penstock.system.processes import python_command, python_environment
from penstock.weights.index import INDEX_FILE, as_publish_error, read_index
from penstock.workers.weights.machine_lock import alone_in

log = logging.getLogger(__name__)

#: Fewer bytes than this are hashed in this process: starting another takes longer.
SMALL_BYTES = 16 * 1024 * 1024
#: Longest wait for the child: this many seconds, plus the time for the files at this rate.
CHILD_S, CHILD_BYTES_PER_S = 120.0, 16 * 1024 * 1024
#: Most versions in the cache of one machine.
MAX_REMEMBERED = 64
#: A file changed less than this before it was hashed is not cached: it may change again with the same mtime.
SETTLED_NS = 100_000_000
#: Added to the priority of the process that hashes.
NICENESS = 10

#: Size, inode, device, mtime and ctime (ns).
State = list[int]
#: Name of a file -> its state, and XXH3-64 of its bytes in that state.
Known = dict[str, tuple[State, int]]


def differing(folder: Path, checksums: Mapping[str, int], digest: str) -> list[str]:
    """Return the names of files in ``folder`` whose XXH3-64 is not the given one. Blocks until they are hashed.

    A file that differs is hashed once more, without the cache.

    Args:
        digest: of the version's index, the key of the cache.

    Raises OSError if a file cannot be read.
    """
    found = hashes_of(folder, list(checksums), digest)
    if wrong := [name for name, checksum in checksums.items() if found[name] != checksum]:
        log.warning("%s: hashes differ and are computed once more: %s", folder, ", ".join(wrong[:8]))
        found = hashes_of(folder, wrong, digest, anew=True)
    return [name for name in wrong if found[name] != checksums[name]]


def hashes_of(folder: Path, names: Sequence[str], digest: str, *, anew: bool = False) -> dict[str, int]:
    """Return name -> XXH3-64 of files in ``folder``. Blocks until they are hashed, unless they are cached.

    Args:
        digest: as of :func:`differing`.
        anew: ignore cached hashes, and replace them.

    Raises OSError if a file cannot be read.
    """
    if sum((folder / name).stat().st_size for name in names) < SMALL_BYTES:
        return {name: file_xxh3(folder / name) for name in names}
    found = {} if anew else _remembered(folder, names, digest)
    if len(found) == len(names):
        return found
    with _turn(digest):
        found = {} if anew else _remembered(folder, names, digest)  # another process may have hashed them meanwhile
        states = {name: _state((folder / name).stat()) for name in names if name not in found}
        settled_ns = time.time_ns() - SETTLED_NS
        fresh = _ask_child(folder, list(states)) if states else {}
        kept = {
            name: (state, fresh[name])
            for name, state in states.items()
            if max(state[3:]) < settled_ns and state == _state((folder / name).stat())
        }
        if kept:
            _remember(digest, _read(digest) | kept)
    return found | fresh


def cache_folder() -> Path:
    """Return the folder of the cache, which is valid until this machine restarts; a shared home folder has several."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "penstock" / "hashes" / Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _state(file: os.stat_result) -> State:
    return [file.st_size, file.st_ino, file.st_dev, file.st_mtime_ns, file.st_ctime_ns]


def _remembered(folder: Path, names: Iterable[str], digest: str) -> dict[str, int]:
    """Return cached hashes of files that have not changed since. Raises OSError if one cannot be read."""
    known = _read(digest)
    return {
        name: known[name][1] for name in names if name in known and known[name][0] == _state((folder / name).stat())
    }


def _read(digest: str) -> Known:
    """Return the cached hashes of a version; {} if they cannot be read."""
    try:
        check_own(cache_folder())
        found = json.loads((cache_folder() / f"{digest}.json").read_bytes())
        return {name: (list(map(int, state)), int(value)) for name, (state, value) in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        log.warning("hashes of files cannot be read and are computed again: %r", exc)
        return {}


def _ask_child(folder: Path, names: list[str]) -> dict[str, int]:
    """Hash files in a process of low priority, so that this event loop is not blocked. Waits for it."""
    paths = [str(folder / name) for name in names]
    command = python_command(__name__, str(os.getpid()))
    limit_s = CHILD_S + sum(os.stat(path).st_size for path in paths) / CHILD_BYTES_PER_S
    environment = python_environment(os.environ)
    try:
        done = subprocess.run(
            command, input=json.dumps(paths).encode(), capture_output=True, env=environment, check=True, timeout=limit_s
        )
        return {name: int(value) for name, value in zip(names, json.loads(done.stdout), strict=True)}
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as exc:
        why = (getattr(exc, "stderr", None) or b"").decode(errors="replace").strip()[-500:]
        log.warning("the process that hashes %s failed, the files are hashed in this one: %r %s", folder, exc, why)
    return {name: file_xxh3(folder / name) for name in names}


@contextlib.contextmanager
def _turn(digest: str) -> Iterator[None]:
    """Hold the lock of a version; continue without it if the cache is unusable or the lock's holder stalls."""
    with contextlib.ExitStack() as stack:
        try:
            own_folder(cache_folder())
            stack.enter_context(alone_in(cache_folder() / f"{digest}.lock"))
        except (OSError, PublishError) as exc:
            log.warning("files are hashed without the lock of this machine: %s", exc)
        yield


def _remember(digest: str, known: Known) -> None:
    """Write the hashes of a version to the cache and delete its oldest entries. Errors are logged."""
    folder = cache_folder()
    try:
        check_own(folder)
        put(folder / f"{digest}.json", json.dumps(known))
        records = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in records[:-MAX_REMEMBERED]:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
    except OSError as exc:
        log.warning("hashes of files are not remembered: %s", exc)


def main() -> None:
    """Answer one request of :func:`_ask_child`; die with the parent process."""
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    json.dump([file_xxh3(Path(path)) for path in json.load(sys.stdin)], sys.stdout)


def prove(folder: Path, digest: str) -> None:
    """Verify that a folder holds the version whose index has this digest, and nothing else. Blocks while it reads.

    Raises:
        PublishError: it does not.
        OSError: this process has no handles or memory left, or the disk is full.
    """
    index = read_index(folder, digest)
    with as_publish_error(f"{folder} cannot be read"):
        found = {entry.name for entry in folder.iterdir()}
        if other := found ^ {*index.files, INDEX_FILE}:
            raise PublishError(
                f"{folder} has other files than its index names, such as {min(other)!r}: it is fetched again."
            )
        for name in differing(folder, index.files, digest):
            raise PublishError(f"{folder / name} is not the file that its index names: it is fetched again.")


if __name__ == "__main__":
    main()
