"""Two trainers with one folder of weights, one of which nobody wants any more but nobody has ended either (T1)."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.consumers.weights.claim import claim, claimed
from penstock.consumers.weights.write import write_weights
from penstock.errors import PublishError

PATIENCE_S = 60.0


class Slow:
    """Weights that come when they may."""

    is_sharded = False

    def __init__(self) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()

    def tensors(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        self.is_there.set()
        assert self.may_go_on.wait(PATIENCE_S)
        yield "weight", torch.full((1,), 3.0)


def test_the_folder_of_one_is_no_leftover_to_the_other(tmp_path: Path) -> None:
    model, weights = tmp_path / "model", tmp_path / "weights"
    model.mkdir()
    (model / "config.json").write_text("{}")
    slow, failed = Slow(), []

    def write() -> None:
        try:
            write_weights(slow, model, weights, 3)
        except PublishError as exc:
            failed.append(exc)

    first = threading.Thread(target=write)
    first.start()
    assert slow.is_there.wait(PATIENCE_S)
    write_weights({"weight": torch.full((1,), 2.0)}, model, weights, 2)
    slow.may_go_on.set()
    first.join(PATIENCE_S)
    assert failed == []
    assert float(load_file(weights / "v00000003" / "model.safetensors")["weight"]) == 3.0
    assert sorted(path.name for path in weights.iterdir()) == ["v00000002", "v00000003"]


def test_T1_who_comes_late_takes_no_claim_back(tmp_path: Path) -> None:
    claim(tmp_path, 5)
    with pytest.raises(PublishError, match="version 2 cannot be claimed"):
        claim(tmp_path, 2)
    assert claimed(tmp_path) == 5


def test_T1_a_number_is_claimed_once(tmp_path: Path) -> None:
    claim(tmp_path, 5)
    with pytest.raises(PublishError, match="another trainer"):
        claim(tmp_path, 5)


def test_T1_of_two_that_claim_at_once_one_has_it(tmp_path: Path) -> None:
    got: list[int] = []

    def try_(all_at_once: threading.Barrier) -> None:
        all_at_once.wait()
        for version in range(1, 40):
            try:
                claim(tmp_path, version)
            except PublishError:
                continue
            got.append(version)

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=try_, args=(barrier,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(got) == len(set(got))
    assert claimed(tmp_path) == 39
