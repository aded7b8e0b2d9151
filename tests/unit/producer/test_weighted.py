"""Datasets in shares: exact over a round, bounded in any row of positions, each with epochs of its own."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.config.data import DataConfig, shares_of
from penstock.producer.main import fingerprint
from penstock.producer.mixture import Mixture, Weighted, mixture_of
from tests.hostile import SAME
from tests.unit.producer.making import made


def mixture(folder: Path, sizes: list[int], weights: list[float], seed: int = 1, shuffle: bool = True) -> Mixture:
    return mixture_of(
        [
            made(folder, [{"prompt": f"{d}.{i}"} for i in range(size)], f"d{d}", weight=weight, shuffle=shuffle)
            for d, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        ],
        seed,
    )


def job_at(source: Mixture, position: int) -> tuple[str, int, int]:
    dataset, epoch, line = source.place(position)
    return dataset.config.name, epoch, line


def test_weights_are_whole_numbers_as_they_are_written() -> None:
    assert shares_of([0.7, 0.3]) == [7, 3]
    assert shares_of([2, 1]) == shares_of([0.5, 0.25]) == [2, 1]
    assert shares_of([3.0]) == [1]
    assert shares_of([1 / 3, 2 / 3]) == [1, 2]
    with pytest.raises(ValueError, match="use rounder weights, such as 2 and 1"):
        shares_of([1 / 3, 0.7])


def test_each_dataset_has_epochs_of_its_own(tmp_path: Path) -> None:
    source = mixture(tmp_path, [2, 5], [3, 1], shuffle=False)
    assert isinstance(source, Weighted)
    assert len(source) == 7
    found = [job_at(source, i) for i in range(12)]
    assert [one for one in found if one[0] == "d0"] == [("d0", k // 2, k % 2) for k in range(9)]
    assert [one for one in found if one[0] == "d1"] == [("d1", 0, k) for k in range(3)]
    assert len(set(found)) == len(found), "no job is named twice"


def test_each_epoch_is_another_order_by_the_seed(tmp_path: Path) -> None:
    def lines(seed: int, epoch: int) -> list[int]:
        source = mixture(tmp_path, [20, 20], [1, 1], seed)
        return [line for name, e, line in (job_at(source, i) for i in range(80)) if (name, e) == ("d0", epoch)]

    assert sorted(lines(1, 0)) == sorted(lines(1, 1)) == list(range(20))
    assert len({tuple(lines(1, 0)), tuple(lines(1, 1)), tuple(lines(2, 0))}) == 3
    assert lines(1, 0) == lines(1, 0)


@SAME
@given(
    weights=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    start=st.integers(0, 10**12),
    length=st.integers(1, 300),
)
def test_in_any_row_of_positions_no_dataset_is_far_off_its_share(weights: list[int], start: int, length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = mixture(Path(folder), [3] * len(weights), [float(one) for one in weights])
        found = Counter(job_at(source, start + i)[0] for i in range(length))
        for d, weight in enumerate(weights):
            share = weight / sum(weights)
            assert abs(found[f"d{d}"] - length * share) <= 1 + len(weights) * share + 1e-9
        round_of = sum(shares_of([float(one) for one in weights]))
        whole = Counter(job_at(source, start + i)[0] for i in range(round_of))
        assert all(whole[f"d{d}"] * sum(weights) == round_of * weight for d, weight in enumerate(weights))


def test_weights_are_part_of_what_a_position_means(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = mixture(tmp_path, [4, 4], [1, 1]), mixture(tmp_path / "other", [4, 4], [2, 1])
    assert fingerprint(one) != fingerprint(other)


def test_weights_that_mean_nothing_are_refused() -> None:
    def check(train: list[float | None], held: float | None = None) -> DataConfig:
        sets = [{"name": f"d{i}", "path": "d", "weight": weight} for i, weight in enumerate(train)]
        return DataConfig.model_validate({"train": sets, "eval": [{"name": "e", "path": "e", "weight": held}]})

    check([None, None])
    check([0.5, 2])
    with pytest.raises(ValidationError, match="dataset 'd1' has no weight, but others do"):
        check([1, None])
    with pytest.raises(ValidationError, match="weight of held-out dataset 'e'"):
        check([1], 1)
    with pytest.raises(ValidationError, match="need a round of"):
        check([0.333333, 0.7])
    with pytest.raises(ValidationError, match="greater than 0"):
        check([0, 1])


def positions(source: Mixture) -> list[tuple[str, int, int]]:
    """Where the first ones lead: into a third epoch of each set."""
    return [job_at(source, position) for position in range(120)]


def of_three(folder: Path, shuffles: str, weights: list[float | None], seed: int = 1, order: str = "012") -> Mixture:
    """Three sets in ``order``, those shuffled that have an x in ``shuffles``."""
    keys = {
        str(d): {"weight": weight, "shuffle": shuffle == "x"}
        for d, (weight, shuffle) in enumerate(zip(weights, shuffles, strict=True))
    }
    rows = [{"prompt": f"{i}"} for i in range(9)]
    return mixture_of([made(folder, rows, f"d{d}", **keys[d]) for d in order], seed)


def test_whatever_moves_a_position_to_another_line_is_in_the_fingerprint(tmp_path: Path) -> None:
    """Turning off the shuffle of one set among others, for one."""
    weighted: list[float | None]
    weighted, plain = [2.0, 1.0, 1.0], [None, None, None]
    sources = [
        of_three(tmp_path, shuffles, weights, **keys)
        for weights in (weighted, plain, [1.0, 2.0, 1.0])
        for shuffles in ("xxx", "xx-", "x-x", "-xx", "x--", "--x", "---")
        for keys in ({}, {"seed": 2}, {"order": "102"})
    ]
    meant: dict[str, set[str]] = {}
    for source in sources:
        meant.setdefault(fingerprint(source), set()).add(str(positions(source)))
    assert [len(orders) for orders in meant.values()] == [1] * len(meant), "one order each"
    assert len(meant) > 40


def test_the_shuffle_of_one_set_means_nothing_where_all_lines_are_shuffled_together(tmp_path: Path) -> None:
    plain = [None, None, None]
    some, every = of_three(tmp_path, "x--", plain), of_three(tmp_path, "xxx", plain)
    assert positions(some) == positions(every)
    assert fingerprint(some) == fingerprint(every) != fingerprint(of_three(tmp_path, "---", plain))
