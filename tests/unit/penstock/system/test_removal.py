"""What is deleted loses its name first: nobody who looks for it finds a part."""

import shutil
from pathlib import Path

import pytest

from penstock.system.disk import remove_whole


def test_no_part_of_what_is_deleted_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version, gone = tmp_path / "v1", tmp_path / ".gone-v1"
    version.mkdir()
    (version / "weights").write_text("w")

    remove_whole(version, gone, is_wanted=lambda: not version.exists())
    assert [path.name for path in version.iterdir()] == ["weights"], "somebody came for it in time"

    def killed(path: Path) -> None:
        assert path == gone
        raise OSError("killed at its first file")

    with monkeypatch.context() as during:
        during.setattr(shutil, "rmtree", killed)
        with pytest.raises(OSError, match="killed"):
            remove_whole(version, gone)
    assert [path.name for path in tmp_path.iterdir()] == [gone.name]

    version.symlink_to(gone)
    remove_whole(version, tmp_path / ".gone-link")
    assert [path.name for path in tmp_path.iterdir()] == [gone.name], "what a link leads to stays"
    remove_whole(gone, tmp_path / ".gone-again")
    assert not list(tmp_path.iterdir())
