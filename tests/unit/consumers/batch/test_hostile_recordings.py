"""Recorded batches and their columns on the disk: read, or refused by an error that names the file."""

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given

from penstock.consumers.batch import column_files, recording
from penstock.errors import PayloadError
from penstock.records.codec import pack
from tests.hostile import SAME, is_read_or_refused, near, packed_near
from tests.hostile_records import manifest

RECORD = {"rank": 0, "size": 1, "digest": "x", "manifest": manifest().to_bytes(), "payloads": [["d/0/1/0", 0, 8]]}
COLUMN = ["values", 0, b"PSC1"]


@SAME
@given(header=packed_near(RECORD))
def test_a_recorded_batch_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, header: bytes) -> None:
    for data in (header, struct.pack("<4sII", b"PSB1", len(header), zlib.crc32(header)) + header + bytes(16)):
        folder = tmp_path_factory.mktemp("b")
        (folder / "1.bin").write_bytes(data)
        is_read_or_refused(recording.load, f"{folder}/{{rollout_id}}.bin", 1)


@SAME
@given(body=packed_near(COLUMN))
def test_recorded_columns_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    batch = tmp_path_factory.mktemp("c") / "1.bin"
    for data in (body, struct.pack("<II", len(body), zlib.crc32(body)) + body):
        column_files.path_of(batch).write_bytes(data)
        is_read_or_refused(column_files.load, batch)


@SAME
@given(data=near(struct.pack("<4sII", b"PSB1", 3, 0)))
def test_what_is_no_recording_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("d")
    (folder / "1.bin").write_bytes(data)
    with pytest.raises(PayloadError):
        recording.load(f"{folder}/{{rollout_id}}.bin", 1)


def test_a_recording_says_what_it_lacks(tmp_path: Path) -> None:
    header = pack({name: value for name, value in RECORD.items() if name != "payloads"})
    (tmp_path / "1.bin").write_bytes(struct.pack("<4sII", b"PSB1", len(header), zlib.crc32(header)) + header)

    with pytest.raises(PayloadError, match="lacks what a recorded batch has"):
        recording.load(f"{tmp_path}/{{rollout_id}}.bin", 1)
