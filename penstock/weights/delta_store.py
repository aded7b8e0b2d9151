"""Store anchors and deltas as immutable objects, in a folder or any store that fsspec knows; find chains to a version.

    v00000040-DIGEST/...                        an anchor: the files of a complete version
    d00000040-DIGEST-00000041-DIGEST/delta      a delta from one version to the next
    .../whole                                   the marker of either, written last: object stores have no rename

Weights are identified by the digest of their index, not by version: a tick publishes the same weights under another
number, and a restarted trainer may publish other weights under the number of a killed one. Only the trainer writes. A
folder hard-links files of the same file system.
"""

import logging
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import ConfigError, PublishError
from penstock.records.cause import Cause
from penstock.records.causes import ObjectStoreFailing
from penstock.system.disk import fsync, is_full
from penstock.system.stop import pause_s
from penstock.weights.delta_format import link_or_copy

T = TypeVar("T")
log = logging.getLogger(__name__)

MARKER, DELTA = "whole", "delta"
#: Most deltas applied to a local copy before an anchor is fetched instead; also the number of newest deltas kept for
#: workers with an older version.
LONGEST = 24
#: Most anchors and deltas of a store; a run keeps a few hundred.
MAX_GROUPS = 100_000
_ANCHOR = re.compile(r"v(\d{8,18})-([0-9a-f]{32})")
_DELTA = re.compile(r"d(\d{8,18})-([0-9a-f]{32})-(\d{8,18})-([0-9a-f]{32})")
#: Most bytes of one read.
RANGE_BYTES = 8 * 1024 * 1024
#: Interval at which a pause is reported.
REPORT_S = 0.5
#: Errors that a retry does not fix.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class Retries(NamedTuple):
    """Attempts of each call, and the pause between two, which doubles."""

    attempts: int
    first_pause_s: float
    longest_pause_s: float


#: Pauses of workers, which have other sources; pauses of trainers, 90 s in total.
READER, WRITER = Retries(4, 0.2, 0.2), Retries(8, 1.0, 30.0)


class DeltaStore:
    """Read and write objects, and retry what fails. Calls block; they raise OSError at the end of their attempts.

    Args:
        place: a folder's path, or a URL that fsspec knows.
        blocked_on: called periodically with the cause of a pause; None at its end.

    Raises:
        ConfigError: fsspec does not know the store; it is not connected.
    """

    def __init__(
        self, place: str, retries: Retries = READER, blocked_on: Callable[[Cause | None], None] = lambda cause: None
    ) -> None:
        self._place, self._retries, self._blocked_on = place, retries, blocked_on
        self._is_folder, self._root = "://" not in place, ""
        #: None: not connected.
        self._fs: Any = None
        try:
            for part in [] if self._is_folder else place.split("::"):
                if "://" in part:
                    fsspec.get_filesystem_class(part.partition("://")[0])
        except (ImportError, ValueError) as exc:
            scheme = self._place.partition("://")[0]
            raise ConfigError(f"trainer.delta_store {scheme}:// cannot be opened: {exc}.") from exc

    def names(self) -> list[str]:
        """Return all names. Raises PublishError if the store does not answer."""

        def raise_unless_missing(exc: Exception) -> None:
            if not isinstance(exc, FileNotFoundError):  # a group may be deleted meanwhile
                raise exc

        def find(root: str) -> list[str]:
            self._fs.invalidate_cache()
            options = {"on_error": raise_unless_missing} if self._is_folder else {}
            found = [str(path).lstrip("/") for path in self._fs.find(root, **options)]
            return [path.removeprefix(root.lstrip("/") + "/") for path in found]

        try:
            return self._retried("", find)
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise PublishError(f"the delta store does not list what it has ({exc}): see trainer.delta_store.") from exc

    def put(self, name: str, path: Path) -> None:
        """Store the bytes of a file, replacing the rest of an interrupted attempt under that name."""

        def put(target: str) -> None:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            if self._is_folder:
                Path(target).unlink(missing_ok=True)
                link_or_copy(path, Path(target))
            else:
                self._fs.put_file(str(path), target)

        self._retried(name, put)

    def mark(self, name: str) -> None:
        """Write an empty object, after all others of its group have reached the disk."""

        def mark(target: str) -> None:
            path = Path(target)
            if self._is_folder:
                fsync(path.parent)
            self._fs.pipe_file(target, b"")
            if self._is_folder:
                for written in (path, path.parent, path.parent.parent):
                    fsync(written)

        self._retried(name, mark)

    def delete(self, name: str) -> None:
        """Remove an object, if it exists. Not retried: the next version deletes the rest."""
        with suppress(FileNotFoundError):
            self._do(name, lambda path: self._fs.rm_file(path))
        if self._is_folder:
            with suppress(OSError):  # it has other files
                (Path(self._root) / name).parent.rmdir()

    def fetch(self, name: str, into: Path, max_bytes: int, stopped: Callable[[], bool] = lambda: False) -> int:
        """Write an object into a new file, synced; return its bytes.

        Args:
            stopped: called often; True aborts with PublishError.

        Raises:
            PublishError: the object is missing, larger than ``max_bytes``, truncated, or cannot be read.
            OSError: a disk write failed.
        """
        size = self._read(name, lambda path: int(self._fs.size(path) or 0))
        if size > max_bytes:
            raise PublishError(f"{name} has {size} bytes, more than the {max_bytes} that there is room for.")
        with into.open("xb") as out:
            while (at := out.tell()) < size:
                if stopped():
                    raise PublishError(f"{name} was not fetched completely: this worker stops.")
                out.write(self._read(name, lambda path, at=at: self._range(path, at, size)))  # type: ignore[misc]
            out.flush()
            os.fsync(out.fileno())
        return size

    def _range(self, path: str, start: int, size: int) -> bytes:
        if data := self._fs.cat_file(path, start=start, end=min(size, start + RANGE_BYTES)):
            return bytes(data)
        raise OSError(f"it ends at byte {start}")

    def _read(self, name: str, call: Callable[[str], T]) -> T:
        try:
            return self._retried(name, call)
        except FileNotFoundError as exc:
            raise PublishError(f"{name} is not in the delta store any more.") from exc
        except OSError as exc:
            raise PublishError(f"{name} cannot be fetched from the delta store: {exc}.") from exc

    def _retried(self, name: str, call: Callable[[str], T]) -> T:
        failures = 0
        try:
            while True:
                try:
                    return self._do(name, call)
                except OSError as exc:
                    failures += 1
                    if failures == self._retries.attempts or is_full(exc) or isinstance(exc, _LASTING):
                        raise
                    log.warning("delta store: attempt %d failed for %s: %s", failures, name or "a list", exc)
                    end = time.monotonic() + pause_s(failures, *self._retries[1:])
                    while (left := end - time.monotonic()) > 0:
                        self._blocked_on(ObjectStoreFailing(name, str(exc)))
                        time.sleep(min(left, REPORT_S))
        finally:
            if failures:
                self._blocked_on(None)

    def _do(self, name: str, call: Callable[[str], T]) -> T:
        """Call with the object's path; connect first, also if the last call failed."""
        try:
            if self._fs is None:
                self._connect()
            return call(f"{self._root}/{name}".rstrip("/"))
        except FileNotFoundError:
            raise
        except Exception as exc:  # each store has errors of its own
            self._fs = None  # which may be what is broken
            if isinstance(exc, OSError):
                raise
            raise OSError(f"{name or 'a list'} in the object store: {exc!r}") from exc

    def _connect(self) -> None:
        # A cached instance may have lost its connection and would not reconnect.
        if self._is_folder:
            fs, root = LocalFileSystem(skip_instance_cache=True), os.path.abspath(self._place)
        else:
            fs, root = fsspec.core.url_to_fs(self._place, skip_instance_cache=True)
        # A cached listing misses what other machines wrote.
        fs.use_listings_cache = False
        self._fs, self._root = fs, root.rstrip("/")


@dataclass(frozen=True, order=True, slots=True)
class Anchor:
    """Identify a version that is stored complete."""

    version: int
    index: str

    @property
    def group(self) -> str:
        return f"v{self.version:08d}-{self.index}"


@dataclass(frozen=True, order=True, slots=True)
class Delta:
    """Identify a delta from one version to another."""

    base_version: int
    base_index: str
    version: int
    index: str

    @property
    def group(self) -> str:
        return f"d{self.base_version:08d}-{self.base_index}-{self.version:08d}-{self.index}"


class Catalog(NamedTuple):
    """List the complete anchors and deltas of a store."""

    anchors: list[Anchor]
    deltas: list[Delta]


class Chain(NamedTuple):
    """Describe how to make a version: from a fetched anchor, or a local copy (``start`` None), by deltas."""

    start: Anchor | None
    #: Index of the version that the first delta is applied to; the target's if no delta is needed.
    base: str
    deltas: tuple[Delta, ...]


def parse_group(group: str) -> Anchor | Delta | None:
    """Return the anchor or delta of this name; None: neither."""
    if match := _ANCHOR.fullmatch(group):
        return Anchor(int(match[1]), match[2])
    if match := _DELTA.fullmatch(group):
        return Delta(int(match[1]), match[2], int(match[3]), match[4])
    return None


def catalog_of(names: Iterable[str]) -> Catalog:
    """Return the anchors and deltas that have their marker; other names are ignored.

    Raises PublishError if there are more than ``MAX_GROUPS``.
    """
    marked = {name.removesuffix(f"/{MARKER}") for name in names if name.endswith(f"/{MARKER}")}
    if len(marked) > MAX_GROUPS:
        raise PublishError(
            f"the delta store has {len(marked)} versions, more than the {MAX_GROUPS} that one run may have: give a "
            "run a place of its own (trainer.delta_store)."
        )
    found = [parse_group(group) for group in sorted(marked)]
    return Catalog([one for one in found if isinstance(one, Anchor)], [one for one in found if isinstance(one, Delta)])


def names_up_to(version: int, names: Iterable[str]) -> list[str]:
    """Return the names of anchors and deltas of versions up to ``version``, complete or not."""
    groups = ((name, parse_group(name.partition("/")[0])) for name in names)
    return [name for name, one in groups if one is not None and one.version <= version]


def find_chain(catalog: Catalog, index: str, local: Collection[str], avoid: Collection[str] = ()) -> Chain | None:
    """Return the best chain to the version of ``index``, or None.

    It begins at the nearest local copy, at most ``LONGEST`` deltas away, else at the nearest anchor, else at any copy.

    Args:
        local: indices of local copies.
        avoid: groups that were found damaged.
    """
    anchors = {one.index: one for one in catalog.anchors if one.group not in avoid}
    into: dict[str, list[Delta]] = defaultdict(list)
    for delta in catalog.deltas:
        if delta.group not in avoid:
            into[delta.index].append(delta)
    #: Index -> number of deltas from it to the target, and the first of them.
    steps: dict[str, tuple[int, Delta | None]] = {index: (0, None)}
    #: Order of preference, number of deltas, start and base.
    found: list[tuple[int, int, Anchor | None, str]] = []
    queue = deque([index])
    while queue:
        at = queue.popleft()
        length = steps[at][0]
        if at in local:
            found.append((0 if length <= LONGEST else 2, length, None, at))
        if at in anchors:
            found.append((1, length, anchors[at], at))
        for delta in into.get(at, ()):
            if delta.base_index not in steps:
                steps[delta.base_index] = length + 1, delta
                queue.append(delta.base_index)
    if not found:
        return None
    *_, start, base = min(found, key=lambda one: one[:2])
    deltas, at = list[Delta](), base
    while (step := steps[at][1]) is not None:
        deltas.append(step)
        at = step.index
    return Chain(start, base, tuple(deltas))


def kept(catalog: Catalog, wanted: Collection[int], newest: int) -> set[str]:
    """Return the groups that must be kept; all others may be deleted.

    For each wanted version and the newest: the nearest anchor and the deltas from it (for a tick, those of the last
    version before it that has any). For workers with an older version: the deltas from the oldest wanted version to the
    newest, at most ``LONGEST``.
    """
    groups: set[str] = set()
    for version in {*wanted, newest}:
        for index in _indices(catalog, version):
            if (chain := find_chain(catalog, index, ())) is not None:
                groups |= {one.group for one in (chain.start, *chain.deltas) if one is not None}
            else:
                # No anchor leads to it; its deltas can still be applied to a local copy.
                groups |= {delta.group for delta in catalog.deltas if delta.index == index}
    oldest = min((version for version in wanted if version < newest), default=newest)
    behind = sorted((delta for delta in catalog.deltas if delta.version > oldest), key=lambda one: -one.version)
    return groups | {delta.group for delta in behind[:LONGEST]}


def _indices(catalog: Catalog, version: int) -> set[str]:
    """Return the indices of the last version up to ``version`` that has an anchor or delta."""
    known: list[Anchor | Delta] = [*catalog.anchors, *catalog.deltas]
    last = max((one.version for one in known if one.version <= version), default=None)
    return {one.index for one in known if one.version == last}
