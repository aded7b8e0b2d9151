"""Weights that hold NaN or Inf end their walk with an error that names the tensor."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.consumers.weights import copies
from penstock.consumers.weights.copies import Arena, CheckedSource, FiniteCheck
from penstock.consumers.weights.sources import Cast, State
from penstock.errors import WeightsNotFinite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]


def walk(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return list(CheckedSource(State(weights)).tensors({}))


def check(weights: dict[str, Tensor]) -> None:
    found = FiniteCheck()
    for name, tensor in weights.items():
        found.add(name, tensor)
    found.raise_if_not_finite()


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every tensor reduced as on a GPU."""

    monkeypatch.setattr(FiniteCheck, "add", lambda self, name, tensor, place=None: self.reduce(name, tensor))


def model(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {f"layers.{number}.weight": torch.ones(3, 5).to(dtype) for number in range(4)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_named(dtype: torch.dtype, value: float) -> None:
    weights = model(dtype)
    assert [name for name, _ in walk(weights)] == list(weights)
    poison = torch.ones(3, 5)
    poison[2, 1] = value
    weights["layers.2.weight"] = poison.to(dtype)
    with pytest.raises(WeightsNotFinite, match=r"^layers\.2\.weight of the weights to publish hold NaN or Inf\.$"):
        walk(weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_bit_pattern_of_nan_and_inf_of_16_bit_types_is_found(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    wrong = every[~every.isfinite()]
    assert len(wrong) == 2 * 2 ** {torch.bfloat16: 7, torch.float16: 10}[dtype]
    tensor = torch.full((65,), 0.5, dtype=dtype)
    check({"weight": tensor})
    check({"weight": every[every.isfinite()]})
    for value in wrong:
        tensor[64] = value
        with pytest.raises(WeightsNotFinite):
            check({"weight": tensor})


def test_other_tensors_are_counted() -> None:
    weights = model()
    for number in (1, 3):
        weights[f"layers.{number}.weight"][0, 0] = torch.nan
    with pytest.raises(WeightsNotFinite, match=r"layers\.1\.weight and 1 other tensors"):
        walk(weights)


def test_large_values_views_integers_and_empty_tensors_are_finite() -> None:
    walk(
        {
            "large": torch.full((1000,), torch.finfo(torch.float32).max),
            "larger": torch.full((2,), 1e300, dtype=torch.float64),
            "large halves": torch.full((1000,), 65504.0, dtype=torch.float16),
            "large bfloat16": torch.full((1000,), 3e38, dtype=torch.bfloat16),
            "view": torch.ones(6, 4)[::2].T,
            "integers": torch.arange(3),
            "flags": torch.tensor([True]),
            "empty": torch.empty(0),
            "scalar": torch.tensor(1.0),
        }
    )
    assert walk({}) == []


def test_a_value_that_only_the_published_type_cannot_hold_is_refused() -> None:
    large = State({"weight": torch.full((2,), 1e6)})
    list(CheckedSource(large).tensors({}))
    with pytest.raises(WeightsNotFinite, match="weight"):
        list(CheckedSource(Cast(large, torch.float16)).tensors({}))


def test_the_reduction_for_gpus_has_the_same_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    weights = {f"{number}.{dtype}": torch.ones(4).to(dtype) for number in range(3) for dtype in DTYPES}
    check(weights)
    for name in weights:
        with pytest.raises(WeightsNotFinite, match=f"^{name} of"):
            check(weights | {name: torch.full((4,), torch.nan).to(weights[name].dtype)})


def test_the_host_waits_once_for_all_tensors_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[Any] = []
    real = Tensor.cpu

    def counted(self: Tensor) -> Tensor:
        transfers.append(self.shape)
        return real(self)

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(Tensor, "cpu", counted)
    check(model())
    assert transfers == [(len(model()),)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_the_values_of_tensors_of_any_size_and_layout(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", 64)
    shapes = [(1,), (7,), (16, 16), (129,), (5, 3, 11)]
    weights = {f"{shape}": torch.randn(shape).to(dtype) for shape in shapes} | {"t": torch.randn(9, 8).to(dtype).T}
    copied = dict(Arena().take(State(weights), {}).tensors({}))
    assert copied.keys() == weights.keys()
    assert all(torch.equal(copied[name].float(), tensor.float()) for name, tensor in weights.items())

    weights["(129,)"].view(-1)[128] = torch.nan
    with pytest.raises(WeightsNotFinite, match=r"^\(129,\) of"):
        Arena().take(State(weights), {})


def test_a_copy_in_memory_of_weights_that_are_not_finite_is_refused_and_the_next_one_is_made() -> None:
    arena, weights = Arena(), model()
    weights["layers.0.weight"][1, 1] = torch.inf
    with pytest.raises(WeightsNotFinite, match=r"layers\.0\.weight"):
        arena.take(State(weights), {})
    assert arena.copy is None
    copy = arena.take(State(model()), {})
    assert dict(copy.tensors({})).keys() == weights.keys()
