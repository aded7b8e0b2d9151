"""Parse the names of anchors and deltas, find paths to a version, and select what may be deleted. Pure functions.

    v00000040-DIGEST/...                        an anchor: the files of a complete version
    d00000040-DIGEST-00000041-DIGEST/delta      a delta from one version to the next
    .../whole                                   the marker of either, written last

Weights are identified by the digest of their index, not by version: a tick publishes the same weights under another
number, and a restarted trainer may publish other weights under the number of a killed one.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import PublishError

MARKER, DELTA = "whole", "delta"
#: Most deltas applied to a local copy before an anchor is fetched instead; also the number of newest deltas kept for
#: workers with an older version.
LONGEST = 24
#: Most paths returned by one call.
MOST_WAYS = 8
#: Most anchors and deltas of a store; a run keeps a few hundred.
MAX_GROUPS = 100_000
_ANCHOR = re.compile(r"v(\d{8,18})-([0-9a-f]{32})")
_DELTA = re.compile(r"d(\d{8,18})-([0-9a-f]{32})-(\d{8,18})-([0-9a-f]{32})")


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


class Way(NamedTuple):
    """Describe a path to a version: a fetched anchor, or a local copy (``start`` None), and the deltas to apply."""

    start: Anchor | None
    #: Index of the version that the first delta is applied to; the target's if no delta is needed.
    base: str
    deltas: tuple[Delta, ...]


def catalog_of(names: Iterable[str]) -> Catalog:
    """Return the anchors and deltas that have their marker; other names are ignored.

    Raises PublishError if there are more than ``MAX_GROUPS``.
    """
    marked = {name.removesuffix(f"/{MARKER}") for name in names if name.endswith(f"/{MARKER}")}
    if len(marked) > MAX_GROUPS:
        raise PublishError(
            f"the store of deltas has {len(marked)} versions, more than the {MAX_GROUPS} that one run may have: give a "
            "run a place of its own (trainer.delta_store)."
        )
    anchors, deltas = [], []
    for group in sorted(marked):
        if match := _ANCHOR.fullmatch(group):
            anchors.append(Anchor(int(match[1]), match[2]))
        elif match := _DELTA.fullmatch(group):
            deltas.append(Delta(int(match[1]), match[2], int(match[3]), match[4]))
    return Catalog(anchors, deltas)


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of anchors and deltas by group, complete or not."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        group = name.partition("/")[0]
        if _ANCHOR.fullmatch(group) or _DELTA.fullmatch(group):
            found[group].append(name)
    return dict(found)


def version_of(group: str) -> int:
    """Return the version of an anchor, or the target version of a delta."""
    match = _ANCHOR.fullmatch(group) or _DELTA.fullmatch(group)
    assert match is not None
    return int(match[1] if len(match.groups()) == 2 else match[3])


def ways(catalog: Catalog, index: str, local: Collection[str], avoid: Collection[str] = ()) -> list[Way]:
    """Return paths to the version of ``index``, best first: near local copies, anchors, distant local copies.

    At most ``MOST_WAYS``; a caller that finds a group damaged calls again with it in ``avoid``.

    Args:
        local: indices of local copies.
        avoid: groups that were found damaged.
    """
    anchors = {one.index: one for one in catalog.anchors if one.group not in avoid}
    into = _by(lambda delta: delta.index, (one for one in catalog.deltas if one.group not in avoid))
    #: Index -> next delta on a shortest path to the target; None at the target.
    onward: dict[str, Delta | None] = {index: None}
    found: list[tuple[tuple[int, int], Anchor | None, str]] = []
    queue = deque([(index, 0)])
    while queue:
        at, length = queue.popleft()
        if at in local:
            found.append((_cost(None, length), None, at))
        if at in anchors:
            found.append((_cost(anchors[at], length), anchors[at], at))
        for delta in into.get(at, ()):
            if delta.base_index not in onward:
                onward[delta.base_index] = delta
                queue.append((delta.base_index, length + 1))
    best = sorted(found, key=lambda one: one[0])[:MOST_WAYS]
    return [Way(start, at, tuple(_chain(onward, at))) for _, start, at in best]


def _by(key: Callable[[Delta], str], deltas: Iterable[Delta]) -> dict[str, list[Delta]]:
    """Group deltas by an index, without those from a version to itself."""
    found: dict[str, list[Delta]] = defaultdict(list)
    for delta in deltas:
        if delta.base_index != delta.index:
            found[key(delta)].append(delta)
    return found


def _chain(onward: Mapping[str, Delta | None], at: str) -> Iterator[Delta]:
    while (delta := onward[at]) is not None:
        yield delta
        at = delta.index


def _cost(start: Anchor | None, length: int) -> tuple[int, int]:
    is_near = start is None and length <= LONGEST
    return (0 if is_near else 1 if start is not None else 2), length


def kept(catalog: Catalog, wanted: Collection[int], newest: int) -> set[str]:
    """Return the groups that must be kept; all others may be deleted.

    For each wanted version and the newest: the nearest anchor and the deltas from it (for a tick, those of the last
    version before it that has any). For workers with an older version: the deltas from the oldest wanted version to the
    newest, at most ``LONGEST``.
    """
    groups: set[str] = set()
    before, into = _nearest(catalog), _by(lambda delta: delta.index, catalog.deltas)
    seen: set[str] = set()
    for version in {*wanted, newest}:
        for index in _indices(catalog, version):
            if index not in before:
                # No anchor leads to it; its deltas can still be applied to a local copy.
                groups |= {delta.group for delta in into.get(index, ())}
                continue
            at = index
            while at not in seen:
                seen.add(at)
                groups.add(before[at].group)
                if isinstance(step := before[at], Delta):
                    at = step.base_index
    oldest = min((version for version in wanted if version < newest), default=newest)
    behind = sorted((delta for delta in catalog.deltas if delta.version > oldest), key=lambda one: -one.version)
    groups |= {delta.group for delta in behind[:LONGEST]}
    return groups


def _nearest(catalog: Catalog) -> dict[str, "Anchor | Delta"]:
    """Return index -> its anchor, or the last delta of a shortest chain from any anchor."""
    out = _by(lambda delta: delta.base_index, catalog.deltas)
    before: dict[str, Anchor | Delta] = {one.index: one for one in catalog.anchors}
    queue = deque(before)
    while queue:
        for delta in out.get(queue.popleft(), ()):
            if delta.index not in before:
                before[delta.index] = delta
                queue.append(delta.index)
    return before


def _indices(catalog: Catalog, version: int) -> set[str]:
    known = [(one.version, one.index) for one in catalog.anchors] + [(one.version, one.index) for one in catalog.deltas]
    last = max((at for at, _ in known if at <= version), default=None)
    return {index for at, index in known if at == last}
