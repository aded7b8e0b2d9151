"""Verify that a folder of this machine has the expected version: fetched, made from deltas, or left by a worker."""

from pathlib import Path

from penstock.errors import PublishError
from penstock.weights.file_errors import as_publish_error
from penstock.weights.index import INDEX_FILE, read_index
from penstock.workers.weights.file_hashes import differing


def prove(folder: Path, digest: str) -> None:
    """See that a folder holds the version whose index has this digest, and nothing else. Blocks while it reads it.

    Raises:
        PublishError: it does not.
        OSError: this process is short of handles or memory, or there is no room.
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


def is_whole(folder: Path, digest: str) -> bool:
    """Return whether :func:`prove` succeeds, for callers with an alternative. Raises OSError."""
    try:
        prove(folder, digest)
    except PublishError:
        return False
    return True
