"""A version on a worker's machine in which a file cannot be read is not that version, and so is fetched again."""

import os
from pathlib import Path

import pytest

from penstock.errors import PublishError
from penstock.workers.weights.file_hashes import prove
from tests.unit.penstock.weights.deltas.version_folders import a_model, publish


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["lost link", "fifo", "folder"])
def test_what_is_no_file_is_not_the_version(tmp_path: Path, kind: str) -> None:
    written = publish(tmp_path, 1, a_model(size=30))
    prove(written.path, written.index_digest)
    path = written.path / "config.json"
    path.unlink()
    {"lost link": lambda: path.symlink_to("nowhere"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()

    with pytest.raises(PublishError, match="cannot be read"):
        prove(written.path, written.index_digest)
