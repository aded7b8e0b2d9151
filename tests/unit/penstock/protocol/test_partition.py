"""The split of a batch over ranks and micro-batches."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations, product
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.buffer.decision import Cut
from penstock.buffer.manifest import make_manifest
from penstock.buffer.subscription import Subscription
from penstock.config.subscription import Definition
from penstock.errors import ConfigError
from penstock.protocol import partition
from penstock.protocol.position import Position
from penstock.protocol.staleness import UNBOUNDED, Policy
from penstock.records.manifest import Row


def rows_of(lengths: list[int]) -> list[Row]:
    return [
        Row(f"toy/0/{i // 8}", i % 8, "t", "s", 0, 0, length, 1, length - 1, length - 1, 1, 1, 1, 0.0, "completed")
        for i, length in enumerate(lengths)
    ]


def spread(lengths: list[int], parts: list[list[int]]) -> int:
    sums = [sum(lengths[i] for i in part) for part in parts]
    return max(sums) - min(sums)


lists_of_lengths = st.lists(st.integers(1, 5000), max_size=40)


@settings(deadline=None)
@given(lists_of_lengths, st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_every_row_is_on_exactly_one_rank(lengths: list[int], dp_size: int, seed: int, balance: bool) -> None:
    shares = partition.split(rows_of(lengths), dp_size, seed, "balanced" if balance else "strided")
    assert len(shares) == dp_size
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    assert max(map(len, shares)) <= -(-len(lengths) // dp_size)
    if len(lengths) % dp_size == 0:
        assert len({len(share) for share in shares}) == 1


def test_tokens_are_balanced_much_better_than_by_dealing_out() -> None:
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(6, 1)) + 1 for _ in range(256)]
    rows = rows_of(lengths)
    balanced, dealt = (spread(lengths, partition.split(rows, 8, 0, how)) for how in ("balanced", "strided"))
    assert balanced <= sum(lengths) / 8 * 0.005
    assert balanced * 50 < dealt


def test_two_ranks_are_near_the_best_split_there_is() -> None:
    rng = random.Random(1)
    for _ in range(20):
        lengths = [rng.randrange(1, 100) for _ in range(10)]
        total = sum(lengths)
        best = min(abs(total - 2 * sum(half)) for half in combinations(lengths, 5))
        assert spread(lengths, partition.split(rows_of(lengths), 2, 0)) <= best + 4


def test_T14_the_split_is_a_pure_function_of_rows_size_and_seed() -> None:
    rows = rows_of([random.Random(2).randrange(1, 900) for _ in range(32)])
    assert partition.split(rows, 4, 7) == partition.split(list(rows), 4, 7)
    assert sorted(partition.split(rows, 4, 7)) == sorted(partition.split(rows, 4, 8))
    assert len({str(partition.split(rows, 4, seed)) for seed in range(8)}) > 1


def test_a_rank_number_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="dp_size is 0"):
        partition.split(rows_of([1]), 0, 0)


@settings(deadline=None)
@given(
    lists_of_lengths,
    st.one_of(st.none(), st.integers(1, 9000)),
    st.one_of(st.none(), st.integers(1, 9)),
    st.booleans(),
)
def test_micro_batches_keep_their_limits(
    lengths: list[int], max_tokens: int | None, max_samples: int | None, padded: bool
) -> None:
    parts = partition.micro_batches(lengths, max_tokens, max_samples, padded=padded)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        members = [lengths[i] for i in part]
        tokens = max(members) * len(members) if padded else sum(members)
        assert max_tokens is None or tokens <= max_tokens or len(members) == 1
        assert max_samples is None or len(members) <= max_samples


def test_micro_batches_are_first_fit() -> None:
    assert partition.micro_batches([5, 3, 4, 2, 2], 8) == [[0, 1], [2, 3, 4]]
    assert partition.micro_batches([5, 3, 4, 2, 2], 8, padded=True) == [[0], [1, 2], [3, 4]]
    assert partition.micro_batches([50, 1, 1], 8) == [[0], [1, 2]]
    assert partition.micro_batches([1, 1, 1], None, 2) == [[0, 1], [2]]
    assert partition.micro_batches([3, 1], None) == [[0, 1]]


def test_T10_every_rank_runs_as_many_micro_batches_as_the_one_that_needs_most() -> None:
    rows = rows_of([9, 9, 9, 1, 1, 1])
    shares = [[0, 1, 2], [3, 4, 5], []]
    assert partition.num_micro_batches(rows, shares, 9) == 3
    assert partition.num_micro_batches(rows, shares) == 1
    assert partition.num_micro_batches([], [[], []], 9) == 1


def longest(lengths: list[int], parts: list[list[int]]) -> int:
    return max(sum(lengths[i] for i in part) for part in parts)


#: Lengths of one sample, by name: even, heavy tails, two sizes, nearly equal.
DRAWS: dict[str, Callable[[random.Random], int]] = {
    "uniform": lambda rng: rng.randrange(1, 1000),
    "log_normal": lambda rng: int(rng.lognormvariate(6, 1)) + 1,
    "wide": lambda rng: int(rng.lognormvariate(6, 2)) + 1,
    "pareto": lambda rng: int(rng.paretovariate(1.1) * 100),
    "two": lambda rng: rng.choice([100, 4000]),
    "near": lambda rng: rng.randrange(900, 1000),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_tokens_is_never_worse_than_karmarkar_karp_nor_than_balanced(draw: str) -> None:
    for num, ranks, seed in product((16, 64, 128), (2, 4, 8, 16), range(5)):
        rng = random.Random(f"{num}/{ranks}/{seed}")
        lengths = [DRAWS[draw](rng) for _ in range(num)]
        found = longest(lengths, partition.split(rows_of(lengths), ranks, 0, "tokens"))
        for equal in (True, False):
            assert found <= longest(lengths, partition.karmarkar_karp(lengths, ranks, equal=equal))
        assert found <= longest(lengths, partition.split(rows_of(lengths), ranks, 0))


def times_longest(seed_of: Callable[[int], int]) -> int:
    """How often the rank that is the longest most often is it, in 40 batches over 4 ranks."""
    rng, counts = random.Random(4), Counter[int]()
    for n in range(1, 41):
        lengths = [int(rng.lognormvariate(6, 2)) + 1 for _ in range(16)]
        parts = partition.split(rows_of(lengths), 4, seed_of(n), "tokens")
        sums = [sum(lengths[i] for i in part) for part in parts]
        counts[sums.index(max(sums))] += 1
    return max(counts.values())


def test_T14_no_rank_is_the_longest_for_ever() -> None:
    assert times_longest(lambda n: 0) > 30, "the split itself has an order"
    assert times_longest(lambda n: partition.batch_seed(0, n)) <= 18
    seeds = [partition.batch_seed(seed, n) for seed in range(3) for n in range(1, 41)]
    assert len(set(seeds)) == len(seeds)


def test_T14_a_manifest_has_the_seed_of_its_batch() -> None:
    state, found = Mock(), []
    state.records.read.return_value = []
    for cut in (0, 1, 1):
        sub = Subscription("actor", Definition(seed=7), Position(cut=cut))
        decided = Cut([], Policy("async", UNBOUNDED, "mask", "fifo"), train_version=1, floor=-1, consumes=0, clock=1)
        found.append(make_manifest(state, sub, decided).seed)
    assert found == [partition.batch_seed(7, n) for n in (1, 2, 2)]
    assert found[0] != found[1]
