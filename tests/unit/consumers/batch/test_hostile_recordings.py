"""Recorded batches and their columns on the disk: read, or refused by an error that names the file."""

import io
import json
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consumers.batch import recording
from penstock.errors import PayloadError
from tests.hostile import SAME, is_read_or_refused, json_near, near
from tests.hostile_records import manifest

ABOUT = {"size": 1, "digest": "x", "lost": ["d/0/1/0"]}
MANIFEST = manifest().to_bytes()


def zipped(members: dict[str, bytes], kind: int = ZIP_STORED) -> bytes:
    with ZipFile(into := io.BytesIO(), "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return into.getvalue()


@SAME
@given(about=json_near(ABOUT), told=near(MANIFEST))
def test_a_recorded_batch_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, about: bytes, told: bytes
) -> None:
    for members in ({"about": about, "manifest": MANIFEST}, {"about": json.dumps(ABOUT).encode(), "manifest": told}):
        folder = tmp_path_factory.mktemp("b")
        (folder / "1.bin").write_bytes(zipped(members))
        is_read_or_refused(recording.load, f"{folder}/{{rollout_id}}.bin", 1)


@SAME
@given(data=near(zipped({"values/0": b"PSC1"})), name=st.text(min_size=1, max_size=20))
def test_recorded_columns_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str) -> None:
    folder = tmp_path_factory.mktemp("c")
    (folder / "1.bin").write_bytes(zipped({"about": json.dumps(ABOUT).encode(), "manifest": MANIFEST}))
    for columns in (data, zipped({name.encode(errors="replace").decode(): b"PSC1"})):
        (folder / "1.bin.columns-0").write_bytes(columns)
        is_read_or_refused(recording.load, f"{folder}/{{rollout_id}}.bin", 1)


@SAME
@given(data=near(zipped({"about": b"{}"})))
def test_what_is_no_recording_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("d")
    (folder / "1.bin").write_bytes(data)
    with pytest.raises(PayloadError):
        recording.load(f"{folder}/{{rollout_id}}.bin", 1)


@pytest.mark.parametrize(
    ("members", "kind", "words"),
    [
        ({"about": b"{}"}, ZIP_STORED, "'manifest'"),
        ({"about": b"{}", "manifest": MANIFEST}, ZIP_DEFLATED, "compressed"),
    ],
)
def test_a_recording_says_what_it_lacks(tmp_path: Path, members: dict[str, Any], kind: int, words: str) -> None:
    (tmp_path / "1.bin").write_bytes(zipped(members, kind))

    with pytest.raises(PayloadError, match=words):
        recording.load(f"{tmp_path}/{{rollout_id}}.bin", 1)
