"""The split of a batch over ranks and micro-batches."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import partition
from penstock.errors import ConfigError
from penstock.messages import Row


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
