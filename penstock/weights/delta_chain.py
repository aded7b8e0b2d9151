"""Parse the names of anchors and deltas, find chains to a version, and select what may be deleted. Pure functions.

    v00000040-DIGEST/...                        an anchor: the files of a complete version
    d00000040-DIGEST-00000041-DIGEST/delta      a delta from one version to the next
    .../whole                                   the marker of either, written last

Weights are identified by the digest of their index, not by version: a tick publishes the same weights under another
number, and a restarted trainer may publish other weights under the number of a killed one.
"""

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import PublishError

MARKER, DELTA = "whole", "delta"
#: Most deltas applied to a local copy before an anchor is fetched instead; also the number of newest deltas kept for
#: workers with an older version.
LONGEST = 24
#: Most chains returned by one call.
MAX_CHAINS = 8
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


def find_chains(catalog: Catalog, index: str, local: Collection[str], avoid: Collection[str] = ()) -> list[Chain]:
    """Return chains to the version of ``index``, best first, at most ``MAX_CHAINS``.

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
    #: Order of preference (near local copies, anchors, distant local copies), number of deltas, start and base.
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
    chains = []
    for _, _, start, base in sorted(found, key=lambda one: one[:2])[:MAX_CHAINS]:
        deltas, at = list[Delta](), base
        while (step := steps[at][1]) is not None:
            deltas.append(step)
            at = step.index
        chains.append(Chain(start, base, tuple(deltas)))
    return chains


def kept(catalog: Catalog, wanted: Collection[int], newest: int) -> set[str]:
    """Return the groups that must be kept; all others may be deleted.

    For each wanted version and the newest: the nearest anchor and the deltas from it (for a tick, those of the last
    version before it that has any). For workers with an older version: the deltas from the oldest wanted version to the
    newest, at most ``LONGEST``.
    """
    groups: set[str] = set()
    for version in {*wanted, newest}:
        for index in _indices(catalog, version):
            for chain in find_chains(catalog, index, ())[:1]:
                groups |= {one.group for one in (chain.start, *chain.deltas) if one is not None}
                break
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
