"""Record complete batches of a rank on disk, so that they can be trained again without engines, buffer or Redis.

    FILE              ``about`` (JSON: number of ranks, digest, lost samples), ``manifest``, and ``payload/SAMPLE``;
                      side arrays that are token keys, and images, are among the payloads, as SAMPLE#NAME
    FILE.columns-N    ``COLUMN/ROW``: the values of columns that the rank read at once, as columns.py makes them

One FILE per batch and rank: the path is a template with ``{rollout_id}`` (the number of the batch) and, if there is
more than one rank, ``{rank}``. Each is a zip file without compression, which has a checksum of every member; nothing is
unpickled. Files are written under a temporary name, flushed, and renamed.
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
#: Errors of a damaged file.
_DAMAGE = (BadZipFile, LookupError, TypeError, ValueError, OverflowError, RecursionError, NotImplementedError, EOFError,
           RuntimeError, struct.error)  # fmt: skip

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
    about = {"size": size, "digest": digest, "lost": [sample for sample, data in payloads.items() if data is None]}
    kept = ((_PAYLOAD + sample, data) for sample, data in payloads.items() if data is not None)
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in _columns_of(path):  # an earlier delivery wrote them
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
    """Return the members of a file. Raises OSError, or one of ``_DAMAGE``."""
    with ZipFile(path) as archive:
        if any(one.compress_type != ZIP_STORED for one in archive.infolist()):
            raise BadZipFile("it is compressed")
        return {one.filename: archive.read(one) for one in archive.infolist()}


def _columns_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.columns-*"))


class RecordedColumns:
    """A store that records values as they are read.

    Args:
        store: the store to write to and read from.
        batch: file of the batch's recording.
    """

    def __init__(self, store: Store, batch: Path) -> None:
        self._store, self._batch = store, batch
        self._kept: set[tuple[str, int]] = set()
        self.write, self.tell_lost = store.write, store.tell_lost

    def read(self, name: str, rows: Sequence[int], timeout_s: float) -> dict[int, bytes]:
        """Read from the store and record the values; blocks for the disk too. Raises OSError."""
        values = self._store.read(name, rows, timeout_s)
        new = {(name, row) for row in values} - self._kept
        if new:
            path = self._batch.with_name(f"{self._batch.name}.columns-{len(self._kept)}")
            until_room(lambda: _write(path, [(f"{name}/{row}", values[row]) for _, row in sorted(new)]))
            self._kept |= new
        return values


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
    first, size = _load(Path(template.format(rollout_id=n, rank=0)), n)
    for rank in range(1, size):
        other, _ = _load(Path(template.format(rollout_id=n, rank=rank)), n)
        if other.digest != first.digest:
            raise PayloadError(f"The files of batch {n} by {template!r} are of different runs: record it again.")
        first.payloads.update(other.payloads)
        for name, values in other.columns.items():
            first.columns.setdefault(name, {}).update(values)
    return first


def _load(path: Path, n: int) -> tuple[Recorded, int]:
    """Return what one rank recorded, and the number of ranks."""
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
        raise PayloadError(f"{file} is damaged, or no batch that penstock recorded ({exc}): record it again.") from exc
    if manifest.n != n or not 1 <= size <= 1_000_000:
        raise PayloadError(f"{path} holds batch {manifest.n}, not {n}.")
    return Recorded(manifest, digest, payloads, columns), size
