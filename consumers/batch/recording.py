"""Record a rank's batches on disk, to train them again without engines, buffer or Redis.

    FILE              ``about`` (JSON: number of ranks, digest, lost samples), ``manifest``, and ``payload/SAMPLE``;
    images and side arrays that are token keys are stored as payloads named SAMPLE#NAME
    FILE.columns-N    ``COLUMN/ROW``: column values of one read of the rank, encoded by columns.py

One FILE per batch and rank: the path is a template with ``{rollout_id}`` (the batch number) and, for several ranks,
``{rank}``. Files are uncompressed zip files, with a checksum per member and no pickled data. They are written under a
temporary name, flushed, and renamed.
"""

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile

from penstock.consumers.batch.columns import Store
from penstock.errors import ConfigError, PayloadError
from penstock.records.manifest import Manifest
from penstock.system.disk import until_room

_FIELDS = frozenset({"rollout_id", "rank"})
_PAYLOAD = "payload/"
#: Exceptions that a damaged file causes.
_DAMAGE = (BadZipFile, LookupError, TypeError, ValueError, OverflowError, RecursionError, NotImplementedError, EOFError,
           RuntimeError, struct.error)  # fmt: skip

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Recorded:
    """Hold a batch read from disk."""

    manifest: Manifest
    digest: str
    #: Bytes by sample id of all recorded ranks; None if the payload was lost.
    payloads: dict[str, Bytes | None]
    #: Column values that ranks read, by column and row.
    columns: dict[str, dict[int, bytes]]


def check_template(template: str, ranks: int = 1) -> str:
    """Return ``template``; raise ConfigError unless it gives every batch and rank a separate file."""
    names = set(re.findall(r"\{([^{}]*)\}", template))
    if "rollout_id" not in names or names - _FIELDS:
        raise ConfigError(f"invalid path of batches {template!r}: use {{rollout_id}}, and optionally {{rank}}.")
    if ranks > 1 and "rank" not in names:
        raise ConfigError(f"{template!r} gives {ranks} ranks the same file: add {{rank}}.")
    return template


def save(
    template: str, manifest: Manifest, digest: str, payloads: Mapping[str, Bytes | None], rank: int = 0, size: int = 1
) -> Path:
    """Write one rank's share of a batch durably. Raises ConfigError, OSError. Blocks."""
    path = path_of(template, manifest.n, rank, size)
    about = {"size": size, "digest": digest, "lost": [sample for sample, data in payloads.items() if data is None]}
    kept = ((_PAYLOAD + sample, data) for sample, data in payloads.items() if data is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in _columns_of(path):  # from an earlier delivery
        old.unlink()
    _write(path, [("about", json.dumps(about).encode()), ("manifest", manifest.to_bytes()), *kept])
    return path


def _write(path: Path, members: Iterable[tuple[str, Bytes]]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            with ZipFile(file, "w", ZIP_STORED) as archive:
                for name, data in members:
                    archive.writestr(name, data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, bytes]:
    """Return the members of a file. Raises OSError or an exception of ``_DAMAGE``."""
    with ZipFile(path) as archive:
        if any(one.compress_type != ZIP_STORED for one in archive.infolist()):
            raise BadZipFile("it is compressed")
        return {one.filename: archive.read(one) for one in archive.infolist()}


def _columns_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.columns-*"))


class RecordedColumns:
    """Record column values when they are read from another store.

    Args:
        store: underlying store.
        batch: recording file of the batch.
    """

    def __init__(self, store: Store, batch: Path) -> None:
        self._store, self._batch = store, batch
        self._kept: set[tuple[str, int]] = set()
        self.write, self.report_lost = store.write, store.report_lost

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Read values from the store and record them; also blocks for the disk. Raises OSError."""
        values = self._store.read(name, rows, timeout_s)
        new = {(name, row) for row in values} - self._kept
        if new:
            path = self._batch.with_name(f"{self._batch.name}.columns-{len(self._kept)}")
            until_room(lambda: _write(path, [(f"{name}/{row}", values[row]) for _, row in sorted(new)]))
            self._kept |= new
        return values


def side_key(sample: str, name: str) -> str:
    """Return the payload key of a side array, which cannot be a sample id."""
    return f"{sample}#{name}"


def path_of(template: str, n: int, rank: int = 0, size: int = 1) -> Path:
    """Return the file of one rank's share of batch ``n``."""
    return Path(check_template(template, size).format(rollout_id=n, rank=rank))


def numbers(template: str) -> list[int]:
    """Return the numbers of recorded batches, ascending."""
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
    """Load batch ``n`` with the payloads of all recorded ranks. Blocks.

    Raises:
        PayloadError: a file is missing, damaged, or belongs to another batch.
    """
    first, size = _load(Path(template.format(rollout_id=n, rank=0)), n)
    for rank in range(1, size):
        other, _ = _load(Path(template.format(rollout_id=n, rank=rank)), n)
        if other.digest != first.digest:
            raise PayloadError(f"The files of batch {n} in {template!r} belong to different runs: record it again.")
        first.payloads.update(other.payloads)
        for name, values in other.columns.items():
            first.columns.setdefault(name, {}).update(values)
    return first


def _load(path: Path, n: int) -> tuple[Recorded, int]:
    """Load the recording of one rank; return it with the number of ranks."""
    file = path
    try:
        members = _read(path)
        about, manifest = json.loads(members["about"]), Manifest.from_bytes(members["manifest"], f"manifest in {path}")
        payloads: dict[str, Bytes | None] = dict.fromkeys(map(str, about["lost"]))
        payloads |= {name.removeprefix(_PAYLOAD): one for name, one in members.items() if name.startswith(_PAYLOAD)}
        columns: dict[str, dict[int, bytes]] = {}
        for file in _columns_of(path):
            for member, value in _read(file).items():
                name, _, row = member.rpartition("/")
                columns.setdefault(name, {})[int(row)] = value
        size, digest = int(about["size"]), str(about["digest"])
    except OSError as exc:
        raise PayloadError(f"{file}: batch {n} cannot be read back: {exc.strerror or exc}.") from exc
    except _DAMAGE as exc:
        raise PayloadError(f"{file} is damaged, or not a recorded batch ({exc}): record it again.") from exc
    if manifest.n != n or not 1 <= size <= 1_000_000:
        raise PayloadError(f"{path} contains batch {manifest.n}, not {n}: record it again.")
    return Recorded(manifest, digest, payloads, columns), size
