"""Record complete batches of a rank on disk, so that they can be trained again without engines, buffer or Redis.

    offset 0    magic ``PSB1``
    offset 4    H: uint32, little endian; CRC-32 of the header: uint32
    offset 12   msgpack map {rank, size, digest, manifest, payloads: [[sample, offset, bytes], ...]}
    then        payloads end to end, from a multiple of 8; their offsets count from there; side arrays that are token
                keys, and images, are stored among them, as SAMPLE#NAME

One file per batch and rank: the path is a template with ``{rollout_id}`` (the number of the batch) and, if there is
more than one rank, ``{rank}``. Nothing is unpickled; bounds are checked on load, each payload's checksum when it is
opened. Files are written under a temporary name, flushed, and renamed. Columns that the rank read are in a second file
(column_files.py).
"""

import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.consumers.batch import column_files
from penstock.errors import ConfigError, PayloadError
from penstock.records.codec import MAX_RECORD_BYTES, pack, unpack
from penstock.records.manifest import Manifest

_PRELUDE = struct.Struct("<4sII")
_MAGIC = b"PSB1"
_FIELDS = frozenset({"rollout_id", "rank"})

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Recorded:
    """A batch read from disk."""

    manifest: Manifest
    digest: str
    #: Bytes by sample id, of all ranks with a file; None if the payload was lost.
    payloads: dict[str, Bytes | None]
    #: Columns that ranks read, by name and row.
    columns: dict[str, dict[int, bytes]]


def check_template(template: str, ranks: int = 1) -> str:
    """Return ``template``, or raise ConfigError unless it gives every batch and every rank a separate file."""
    names = set(re.findall(r"\{([^{}]*)\}", template))
    if "rollout_id" not in names or names - _FIELDS:
        raise ConfigError(f"{template!r} names files of batches: it needs {{rollout_id}}, and may have {{rank}}.")
    if ranks > 1 and "rank" not in names:
        raise ConfigError(f"{template!r} would be one file for {ranks} ranks: add {{rank}}.")
    return template


def save(
    template: str, manifest: Manifest, digest: str, payloads: Mapping[str, Bytes | None], rank: int = 0, size: int = 1
) -> Path:
    """Write one rank's share of a batch durably. Raises ConfigError, OSError. Blocks."""
    path = path_of(template, manifest.n, rank, size)
    entries: list[list[Any]] = []
    at = 0
    for sample, data in payloads.items():
        entries.append([sample, -1 if data is None else at, 0 if data is None else len(data)])
        at += 0 if data is None else len(data) + -len(data) % 8
    record = {"rank": rank, "size": size, "digest": digest, "manifest": manifest.to_bytes(), "payloads": entries}
    header = pack(record)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(_PRELUDE.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
            file.write(bytes(-(_PRELUDE.size + len(header)) % 8))
            for data in payloads.values():
                if data is not None:
                    file.write(data)
                    file.write(bytes(-len(data) % 8))
            file.flush()
            os.fsync(file.fileno())
        # Delete columns of an earlier delivery.
        column_files.path_of(path).unlink(missing_ok=True)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def side_key(sample: str, name: str) -> str:
    """Return the key of a side array among the payloads; no sample has such an id."""
    return f"{sample}#{name}"


def path_of(template: str, n: int, rank: int = 0, size: int = 1) -> Path:
    """Return the file of one rank's share of batch ``n``."""
    return Path(check_template(template, size).format(rollout_id=n, rank=rank))


def numbers(template: str) -> list[int]:
    """Return the batches that have a file, ascending."""
    pattern = re.compile(
        "".join(
            r"(\d+)" if part == "{rollout_id}" else r"\d+" if part == "{rank}" else re.escape(part)
            for part in re.split(r"(\{rollout_id\}|\{rank\})", str(Path(check_template(template)).absolute()))
        )
    )
    first = Path(template.partition("{")[0] + "x").absolute().parent
    found = (pattern.fullmatch(str(path)) for path in first.rglob("*") if path.is_file())
    return sorted({int(match.group(1)) for match in found if match is not None})


def load(template: str, n: int) -> Recorded:
    """Load batch ``n`` with the payloads of every rank that recorded it. Blocks.

    Raises:
        PayloadError: a file is missing, damaged, or of another batch than the others.
    """
    first = _load(Path(template.format(rollout_id=n, rank=0)), n)
    merged = dict(first.payloads)
    columns = column_files.load(path_of(template, n))
    for rank in range(1, first.size):
        other = _load(Path(template.format(rollout_id=n, rank=rank)), n)
        if other.recorded.digest != first.recorded.digest:
            raise PayloadError(f"The files of batch {n} by {template!r} are of different runs: record it again.")
        merged |= other.payloads
        for name, values in column_files.load(path_of(template, n, rank)).items():
            columns.setdefault(name, {}).update(values)
    return Recorded(first.recorded.manifest, first.recorded.digest, merged, columns)


@dataclass(frozen=True, slots=True)
class _File:
    recorded: Recorded
    size: int

    @property
    def payloads(self) -> dict[str, Bytes | None]:
        return self.recorded.payloads


def _load(path: Path, n: int) -> _File:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise PayloadError(f"{path}: batch {n} cannot be read back: {exc.strerror or exc}.") from exc
    if len(data) < _PRELUDE.size or data[:4] != _MAGIC:
        raise PayloadError(f"{path} is not a batch that penstock recorded.")
    _, length, checksum = _PRELUDE.unpack_from(data)
    header = data[_PRELUDE.size : _PRELUDE.size + length]
    if length > MAX_RECORD_BYTES or len(header) != length or zlib.crc32(header) != checksum:
        raise PayloadError(f"{path} is damaged or cut off: record the batch again.")
    record = unpack(header, str(path))
    try:
        manifest = Manifest.from_bytes(record["manifest"], f"manifest in {path}")
        body = memoryview(data)[_PRELUDE.size + length + -(_PRELUDE.size + length) % 8 :]
        payloads = {str(sample): _part(body, at, size, path) for sample, at, size in record["payloads"]}
        size, digest = int(record["size"]), str(record["digest"])
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise PayloadError(f"{path} lacks what a recorded batch has ({exc}).") from exc
    if manifest.n != n or not 1 <= size <= 1_000_000:
        raise PayloadError(f"{path} holds batch {manifest.n}, not {n}.")
    return _File(Recorded(manifest, digest, payloads, {}), size)


def _part(body: memoryview, at: int, size: int, path: Path) -> Bytes | None:
    if at == -1:
        return None
    if at < 0 or size < 0 or at + size > len(body):
        raise PayloadError(f"{path} is cut off: a payload lies at bytes {at} to {at + size} of {len(body)}.")
    return body[at : at + size]
