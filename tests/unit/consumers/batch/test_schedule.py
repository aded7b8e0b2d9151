"""Micro-batches of all ranks at once: no more of them, and no longer rank, than if they are packed and dealt out.

With ``SLIME_SOURCE=/path/to/slime`` the same is held against slime's own function.
"""

import importlib
import os
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.consumers.batch.schedule import Schedule, schedule, split_first
from penstock.protocol import partition

NUM_SCHEDULES = 200


@dataclass(frozen=True)
class Step:
    """One step to schedule."""

    lengths: list[int]
    ranks: int
    max_tokens: int
    multiple: int

    @property
    def shares(self) -> list[list[int]]:
        rows: Any = [SimpleNamespace(length=length) for length in self.lengths]
        return partition.split(rows, self.ranks, seed=len(self.lengths))

    def tokens(self, rows: list[int]) -> int:
        return sum(self.lengths[i] for i in rows)

    def cost(self, found: Schedule) -> tuple[int, int]:
        """(micro-batches of a rank, tokens of the longest rank)."""
        return max(map(len, found)), max(sum(map(self.tokens, rank)) for rank in found)


def random_step(seed: int) -> Step:
    rng = random.Random(seed)
    ranks, multiple = rng.choice([1, 2, 4, 8]), rng.choice([1, 1, 2, 4])
    num = max(rng.randint(4, 16), 3 * multiple) * ranks
    draw = rng.choice([
        lambda: rng.randint(10, 2000),
        lambda: min(8000, int(rng.lognormvariate(6, 1)) + 5),
        lambda: rng.choice([128, 256, 512, 1024, 3072]),
    ])  # fmt: skip
    lengths = [draw() for _ in range(num)]
    return Step(lengths, ranks, rng.choice([2048, 4096, 8192, 16384, max(lengths)]), multiple)


STEPS = [random_step(seed) for seed in range(NUM_SCHEDULES)]


def made(step: Step, max_samples: int | None = None) -> Schedule:
    return schedule(step.lengths, step.shares, step.max_tokens, max_samples, step.multiple)


def first_fit(step: Step) -> list[list[int]]:
    bins: list[list[int]] = []
    for i, length in enumerate(step.lengths):
        room = (members for members in bins if step.tokens(members) + length <= step.max_tokens)
        if (found := next(room, None)) is None:
            bins.append(found := [])
        found.append(i)
    return bins


@pytest.mark.parametrize("max_samples", [None, 3])
def test_T10_every_row_is_in_one_micro_batch_within_the_limits(max_samples: int | None) -> None:
    for step in STEPS:
        found = made(step, max_samples)
        assert sorted(i for rank in found for members in rank for i in members) == list(range(len(step.lengths)))
        assert len({len(rank) for rank in found}) == 1, "as many on every rank"
        assert len(found[0]) % step.multiple == 0
        for members in (members for rank in found for members in rank):
            assert step.tokens(members) <= step.max_tokens or len(members) == 1
            assert max_samples is None or len(members) <= max_samples


def test_T10_few_rows_have_empty_micro_batches_up_to_the_multiple() -> None:
    found = schedule([24, 162, 65], [[0], [1], [2]], 50, 8, 2)
    assert [len(rank) for rank in found] == [2, 2, 2]


def test_T10_no_more_micro_batches_are_made_than_by_dealing_out_packed_ones() -> None:
    more = 0
    for step in STEPS:
        packed, of_all = first_fit(step), step.ranks * step.multiple
        wanted = -(-len(packed) // of_all) * step.multiple
        assert step.cost(made(step))[0] <= wanted
        more += step.cost(split_first(step.lengths, step.shares, step.max_tokens, None, step.multiple))[0] > wanted
    assert more, "splitting first would do"


def test_T14_the_longest_rank_is_nearly_as_short_as_the_mean() -> None:
    for step in STEPS:
        mean = sum(step.lengths) / step.ranks
        assert step.cost(made(step))[1] <= max(mean + max(step.lengths) / 2, max(step.lengths))


def test_T14_a_schedule_is_a_function_of_its_arguments() -> None:
    assert [made(step) for step in STEPS[:20]] == [made(step) for step in STEPS[:20]]


def test_ranks_without_rows_have_empty_micro_batches() -> None:
    assert schedule([5], [[0], []], 10) == [[[0]], [[]]]
    assert schedule([], [[], []], 10) == [[[]], [[]]]


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(os.path.abspath(os.environ["SLIME_SOURCE"]))
    return importlib.import_module("slime.utils.dp_schedule")


@pytest.mark.skipif("SLIME_SOURCE" not in os.environ, reason="SLIME_SOURCE names no checkout of slime, and CI has none")
@pytest.mark.parametrize("balance_data", [False, True])
def test_T10_no_schedule_has_more_micro_batches_or_a_longer_rank_than_slimes(slime: Any, balance_data: bool) -> None:
    args = SimpleNamespace(
        micro_batch_size=1, use_dynamic_batch_size=True, balance_data=balance_data, balance_by_flops=False,
        hidden_size=16, num_attention_heads=2, num_query_groups=2, vocab_size=32, ffn_hidden_size=64, num_experts=None,
        num_layers=2, kv_channels=8,
    )  # fmt: skip
    for step in STEPS:
        args.max_tokens_per_gpu = step.max_tokens
        parallel = {"dp_size": step.ranks, "cp_size": 1, "vpp_size": 1 + (step.multiple > 1)}
        parallel["microbatch_group_size_per_vp_stage"] = step.multiple
        num = len(step.lengths)
        parts, _, counts, _ = slime.build_dp_schedule(
            args, parallel, step.lengths, global_batch_size=num, rollout_indices=list(range(num))
        )
        count, longest = step.cost(made(step))
        assert (count <= counts[0], longest <= max(map(step.tokens, parts))) == (True, True)
