"""Make micro-batches for all ranks at once from a batch whose rows may go to any rank.

Splitting a batch over ranks before packing may need one micro-batch more than packing all rows before distributing the
micro-batches. Both are tried; the result is the best schedule that is worse in neither the number of micro-batches nor
the tokens of the longest rank. Pure functions of the lengths and limits (T14).
"""

import bisect
from collections.abc import Sequence

from penstock.protocol.partition import even_out, karmarkar_karp, micro_batches

#: Lists of rows by rank and micro-batch.
Schedule = list[list[list[int]]]
#: Swaps tried per row between two ranks, nearest to an even split first.
_NEAREST = 8


def schedule(
    lengths: Sequence[int],
    shares: Sequence[Sequence[int]],
    max_tokens: int | None,
    max_samples: int | None = None,
    multiple: int = 1,
) -> Schedule:
    """Return the micro-batches of every rank as lists of indices of ``lengths``.

    Every rank gets the same number of micro-batches, a multiple of ``multiple``; some are empty if rows are too few.

    Args:
        lengths: tokens of each row.
        shares: rows of each rank when splitting first.
        max_tokens: most tokens of a micro-batch; a longer row gets its own. None: unlimited.
        max_samples: most rows of a micro-batch. None: unlimited.
    """
    first = split_first(lengths, shares, max_tokens, max_samples, multiple)
    ranks = len(shares)
    if max_tokens is None or ranks == 1 or len(lengths) < ranks:
        return first
    dealt = []
    in_order = _first_fit(lengths, max_tokens, max_samples)
    for packed in (in_order, micro_batches(lengths, max_tokens, max_samples)):
        bins = _expanded(packed, lengths, -(-len(packed) // (ranks * multiple)) * ranks * multiple)
        if len(bins) % (ranks * multiple):
            continue
        sums = [_tokens(one, lengths) for one in bins]
        strided = [list(range(rank, len(bins), ranks)) for rank in range(ranks)]
        dealt += [[[bins[i] for i in part] for part in parts] for parts in (strided, karmarkar_karp(sums, ranks))]
    if not dealt:
        return first
    evened = [_evened(one, lengths, max_tokens, max_samples) for one in dealt]
    most, longest = (min(one[at] for one in (_cost(each, lengths) for each in dealt[:2])) for at in (0, 1))
    fitting = [one for one in (first, *evened) if _cost(one, lengths)[0] <= most and _cost(one, lengths)[1] <= longest]
    return min(fitting or [first, *evened], key=lambda one: _cost(one, lengths))


def split_first(
    lengths: Sequence[int],
    shares: Sequence[Sequence[int]],
    max_tokens: int | None,
    max_samples: int | None,
    multiple: int,
) -> Schedule:
    """Return micro-batches of ranks with fixed rows, as many as the rank with the largest need."""
    packed = []
    for share in shares:
        bins = micro_batches([lengths[i] for i in share], max_tokens, max_samples)
        packed.append([[share[i] for i in members] for members in bins])
    count = -(-max([1, *map(len, packed)]) // multiple) * multiple
    packed = [_expanded(bins, lengths, count) for bins in packed]
    return [[*bins, *([] for _ in range(count - len(bins)))] for bins in packed]


def _cost(found: Schedule, lengths: Sequence[int]) -> tuple[int, int]:
    """Return (micro-batches per rank, tokens of the longest rank)."""
    return max(map(len, found)), max(sum(_tokens(one, lengths) for one in rank) for rank in found)


def _tokens(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)


def _first_fit(lengths: Sequence[int], max_tokens: int, max_samples: int | None) -> list[list[int]]:
    """Assign rows in order to the first micro-batch with room; return rows by micro-batch."""
    bins: list[list[int]] = []
    sums: list[int] = []
    for i, length in enumerate(lengths):
        for at, members in enumerate(bins):
            if sums[at] + length <= max_tokens and (max_samples is None or len(members) < max_samples):
                members.append(i)
                sums[at] += length
                break
        else:
            bins.append([i])
            sums.append(length)
    return bins


def _expanded(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split the largest micro-batches in half until there are ``count``; fewer if all have one row."""
    bins = [list(members) for members in bins]
    while len(bins) < count:
        largest = max(bins, key=lambda members: (len(members) > 1, _tokens(members, lengths)), default=[])
        if len(largest) < 2:
            break
        bins.remove(largest)
        halves: tuple[list[int], list[int]] = ([], [])
        for i in sorted(largest, key=lambda i: (-lengths[i], i)):
            min(halves, key=lambda half: _tokens(half, lengths)).append(i)
        bins += [sorted(half) for half in halves]
    return bins


def _evened(found: Schedule, lengths: Sequence[int], max_tokens: int, max_samples: int | None) -> Schedule:
    """Balance the tokens of ranks by swapping micro-batches and then rows."""
    bins = [members for rank in found for members in rank]
    starts = [sum(map(len, found[:rank])) for rank in range(len(found))]
    parts = [list(range(start, start + len(rank))) for start, rank in zip(starts, found, strict=True)]
    parts = even_out([_tokens(one, lengths) for one in bins], parts)
    ranks = [[list(bins[i]) for i in part] for part in parts]
    for _ in range(len(lengths)):
        sums = [sum(_tokens(one, lengths) for one in rank) for rank in ranks]
        heavy, light = sums.index(max(sums)), sums.index(min(sums))
        if not _swap_rows(ranks[heavy], ranks[light], sums[heavy] - sums[light], lengths, max_tokens, max_samples):
            break
    return ranks


def _swap_rows(
    heavy: list[list[int]],
    light: list[list[int]],
    gap: int,
    lengths: Sequence[int],
    max_tokens: int,
    max_samples: int | None,
) -> bool:
    """Swap two rows or move one row to balance two ranks best; return False if none improves them."""
    rows = sorted((lengths[i], at, i) for at, members in enumerate(light) for i in members)
    room = [max_tokens - _tokens(members, lengths) for members in light]
    may_take = [at for at, members in enumerate(light) if max_samples is None or len(members) < max_samples]
    best, best_gap = None, gap
    for at, members in enumerate(heavy):
        for i in members:
            place = bisect.bisect(rows, lengths[i] - gap / 2, key=lambda row: row[0])
            for length, to, back in rows[max(0, place - _NEAREST) : place + _NEAREST]:
                more = lengths[i] - length
                if 0 < more <= room[to] and abs(gap - 2 * more) < best_gap:
                    best, best_gap = (at, i, to, back), abs(gap - 2 * more)
            to = max(may_take, key=lambda at: room[at], default=-1)
            if to >= 0 and len(members) > 1 and lengths[i] <= room[to] and abs(gap - 2 * lengths[i]) < best_gap:
                best, best_gap = (at, i, to, -1), abs(gap - 2 * lengths[i])
    if best is None:
        return False
    at, i, to, back = best
    heavy[at].remove(i)
    light[to].append(i)
    if back >= 0:
        light[to].remove(back)
        heavy[at].append(back)
    return True
