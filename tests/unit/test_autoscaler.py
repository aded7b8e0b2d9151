"""How many workers a run needs: each term binds where it should, and changes are made late and together."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.config import Config
from penstock.fleet_config import AutoscaleConfig
from workers.autoscaler import Autoscaler, Load, wanted
from workers.fleet.pressure import Pressure

CONFIG = AutoscaleConfig(min_workers=1, max_workers=20, up_after_s=30, down_after_s=600, dead_band=0.1)
LOAD = Load(
    open_samples=1000,
    slots=64,
    trainer_tokens_per_s=30_000,
    worker_tokens_per_s=5_000,
    bound=4,
    samples_per_version=256,
)


@pytest.mark.parametrize(
    ("over", "count", "binds"),
    [
        ({}, 7, "demand"),  # 1.15 x 30,000 / 5,000 = 6.9
        ({"open_samples": 100}, 2, "backlog"),
        ({"bound": 0}, 4, "fresh"),  # 256 / 64
        ({"open_samples": 0}, 1, "min"),
        ({"trainer_tokens_per_s": 0, "open_samples": 10_000, "bound": 9}, 20, "max"),
        ({"trainer_tokens_per_s": 0}, 16, "backlog"),  # unknown demand binds nobody
        ({"samples_per_version": 0, "trainer_tokens_per_s": 0}, 16, "backlog"),
    ],
)
def test_the_least_term_binds(over: dict[str, Any], count: int, binds: str) -> None:
    found = wanted(replace(LOAD, **over), CONFIG)
    assert (found.count, found.binds) == (count, binds)


def test_up_after_a_while_and_down_after_long() -> None:
    scaler = Autoscaler(CONFIG)
    assert [scaler.decide(now, 8, 4) for now in (0, 29.9, 30)] == [4, 4, 8]
    assert [scaler.decide(now, 2, 8) for now in (100, 699, 700)] == [8, 8, 2]


def test_what_changes_its_mind_waits_anew() -> None:
    scaler = Autoscaler(CONFIG)
    assert scaler.decide(0, 8, 4) == 4
    assert scaler.decide(20, 4, 4) == 4
    assert scaler.decide(40, 8, 4) == 4, "30 s begin anew"
    assert scaler.decide(70, 8, 4) == 8


def test_nothing_moves_within_the_dead_band_and_nobody_stays_outside_the_limits() -> None:
    scaler = Autoscaler(CONFIG)
    assert {scaler.decide(now, 11, 10) for now in range(0, 1000, 10)} == {10}
    assert scaler.decide(1000, 25, 25) == 20
    assert scaler.decide(1000, 0, 0) == 1


def test_the_load_is_read_out_of_snapshots() -> None:
    config = Config.model_validate(
        {
            "run": "t",
            "model": {"path": "/m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "rollout": {"n": 8},
            "worker": {"slots": 64},
            "fleet": {"autoscale": {"max_workers": 4}},
        }
    )
    pressure = Pressure(config)

    def state(cut: int) -> dict[str, Any]:
        return {
            "lanes": {"train": {"queued": 10, "leased": 5}, "eval": {"queued": 1, "leased": 0}},
            "delayed": 2,
            "workers": [
                {"samples": 100, "generated_tokens": 50_000, "tokens_per_s": 4_000.0, "running": 9},
                {"samples": 0, "generated_tokens": 0, "tokens_per_s": 0.0, "running": 0},
            ],
            "subs": [
                {"name": "actor", "driving": 1, "cut": cut, "size": 32, "per_version": 2, "bound": 3},
                {"name": "eval", "cut": 7, "size": 1},
            ],
        }

    first = pressure.load(0.0, state(10))
    assert first.trainer_tokens_per_s == 0, "not known yet"
    later = pressure.load(20.0, state(20))
    # 10 batches x 32 groups x 8 samples x 500 tokens in 20 s
    assert later == Load(144, 64, 64_000.0, 4_000.0, 3, 512)
    assert pressure.load(100.0, state(20)).trainer_tokens_per_s == 0, "what is older than the window is forgotten"
