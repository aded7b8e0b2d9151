"""How many workers a run needs: each term binds where it should, and changes are made late and together."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.config import Config
from penstock.config.fleet import AutoscaleConfig
from penstock.protocol.presence import WorkerPresence
from penstock.workers.fleet import autoscaler
from penstock.workers.fleet.autoscaler import Autoscaler, Load, wanted
from penstock.workers.presence import Capacity

LIMITS = {"min_workers": 1, "max_workers": 20, "down_after_s": 600}
CONFIG = AutoscaleConfig.model_validate(LIMITS)
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


def test_every_term_that_is_known_is_told() -> None:
    assert wanted(LOAD, CONFIG).terms == {"backlog": 16, "demand": 7, "fresh": 20}
    assert wanted(replace(LOAD, samples_per_version=0, trainer_tokens_per_s=0), CONFIG).terms == {"backlog": 16}


def test_a_change_is_told_with_its_reason_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Autoscaler, "load", lambda *_: LOAD)
    monkeypatch.setattr(autoscaler, "UP_AFTER_S", 1)
    scaler = Autoscaler(config_of(max_workers=3))
    # Engines that cannot be had at once are decided on again and again.
    counts = [scaler.decide(now, {}, present) for now, present in enumerate((1, 1, 1, 1, 3))]
    told = scaler.record["decisions"]
    assert (counts, len(told)) == ([1, 3, 1, 3, 3], 1)
    assert {name: told[0][name] for name in ("before", "engines", "wanted", "binds")} == {
        "before": 1, "engines": 3, "wanted": 3, "binds": "max",
    }  # fmt: skip
    assert told[0]["terms"] == scaler.record["terms"] == {"backlog": 16, "demand": 7, "fresh": 20}


def test_up_after_a_while_and_down_after_long() -> None:
    scaler = Autoscaler(config_of(**LIMITS))
    assert [scaler.settle(now, 8, 4) for now in (0, 29.9, 30)] == [4, 4, 8]
    assert [scaler.settle(now, 2, 8) for now in (100, 699, 700)] == [8, 8, 2]


def test_what_changes_its_mind_waits_anew() -> None:
    scaler = Autoscaler(config_of(**LIMITS))
    assert scaler.settle(0, 8, 4) == 4
    assert scaler.settle(20, 4, 4) == 4
    assert scaler.settle(40, 8, 4) == 4, "30 s begin anew"
    assert scaler.settle(70, 8, 4) == 8


def test_nothing_moves_within_the_dead_band_and_nobody_stays_outside_the_limits() -> None:
    scaler = Autoscaler(config_of(**LIMITS))
    assert {scaler.settle(now, 11, 10) for now in range(0, 1000, 10)} == {10}
    assert scaler.settle(1000, 25, 25) == 20
    assert scaler.settle(1000, 0, 0) == 1


def config_of(**autoscale: Any) -> Config:
    return Config.model_validate(
        {
            "run": "t",
            "model": {"path": "/m"},
            "data": {"train": [{"name": "d", "path": "d.jsonl"}]},
            "rollout": {"n": 8},
            "worker": {"slots": 64},
            "fleet": {"autoscale": autoscale},
        }
    )


def test_a_worker_is_worth_what_it_draws_with_full_slots() -> None:
    capacity = Capacity()
    capacity.add(9.5, 9_500, full=True)
    assert capacity.tokens_per_s == 0, "not known yet"
    capacity.add(100.0, 5_000, full=False)
    capacity.add(0.5, 500, full=True)
    assert capacity.tokens_per_s == pytest.approx(1_000)
    capacity.add(1_000.0, 2_000_000, full=True)
    assert capacity.tokens_per_s == pytest.approx(2_000, rel=0.01), "what was long ago is forgotten"


class Plant:
    """A fleet under a gate, second by second: workers fill their slots with what the gate lets in, a trainer eats."""

    SLOTS, RATE, LENGTH, EATEN = 64, 10.0, 500.0, 1_650.0  # tokens/s of a slot, of an answer, of the trainer
    BATCH, BOUND, N = 16, 3, 8  # one worker makes 640 tokens/s: 2.6 of them feed the trainer, 3 with what is to spare

    def __init__(self, workers: int) -> None:
        self.capacities = [Capacity() for _ in range(workers)]
        self.ready = self.eaten = self.drawn = 0.0

    def resize(self, workers: int) -> None:
        self.capacities = (self.capacities + [Capacity() for _ in range(workers)])[:workers]

    def second(self) -> None:
        places = (self.BOUND + 1) * self.BATCH * self.N - self.ready
        self.running = min(len(self.capacities) * self.SLOTS, max(0.0, places))
        self.queued = max(0.0, places) - self.running
        made = self.running * self.RATE
        for one in self.capacities:
            full = self.running >= len(self.capacities) * self.SLOTS
            one.add(1.0, made / len(self.capacities), full=full)
        self.drawn += made
        self.ready += made / self.LENGTH
        eats = min(self.ready, self.EATEN / self.LENGTH)
        self.ready -= eats
        self.eaten += eats

    def snapshot(self) -> dict[str, Any]:
        number = len(self.capacities)
        return {
            # What runs are the last samples of as many jobs, as where lengths have a long tail.
            "lanes": {"train": {"queued": self.queued / self.N, "leased": self.running}},
            "delayed": 0,
            "workers": [
                WorkerPresence(
                    samples=1_000, generated_tokens=1_000 * self.LENGTH, running=self.running / number,
                    tokens_per_s=self.running * self.RATE / number, open_samples=self.running / number,
                    held=self.running / number,
                    capacity_tokens_per_s=one.tokens_per_s,
                )
                for one in self.capacities
            ],
            "subs": [
                {"name": "actor", "driving": 1, "cut": int(self.eaten / self.N), "size": 1, "per_version": self.BATCH,
                 "bound": self.BOUND},
            ],
        }  # fmt: skip


@pytest.mark.parametrize("start", [1, 3, 4, 8, 32])
@pytest.mark.parametrize("restart", [False, True])
def test_a_fleet_behind_a_gate_settles_at_what_the_trainer_needs(
    start: int, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demand must not feed on itself: throttled workers show what the trainer eats, however many they are."""
    monkeypatch.setattr("penstock.workers.fleet.autoscaler.DEAD_BAND", 0.0)
    config = config_of(max_workers=40, down_after_s=60)
    plant, scaler = Plant(start), Autoscaler(config)
    sizes = []
    for now in range(3_000):
        plant.second()
        if restart and now == 1_500:
            scaler = Autoscaler(config, scaler.capacity)
            plant.capacities = [Capacity() for _ in plant.capacities]
        plant.resize(scaler.decide(float(now), plant.snapshot(), len(plant.capacities)))
        sizes.append(len(plant.capacities))
    assert max(sizes) <= max(start, 8), "it never grew beyond what the gate can fill"
    assert set(sizes[1_000:]) == {3}


def test_the_load_is_read_out_of_snapshots() -> None:
    scaler = Autoscaler(config_of(max_workers=4))

    def state(cut: int) -> dict[str, Any]:
        return {
            "lanes": {"train": {"queued": 10, "leased": 5}, "eval": {"queued": 1, "leased": 0}},
            "delayed": 2,
            "workers": [
                WorkerPresence(
                    samples=100,
                    generated_tokens=50_000,
                    tokens_per_s=900.0,
                    running=9,
                    held=4,
                    open_samples=11,
                    capacity_tokens_per_s=4_000.0,
                ),
                WorkerPresence(),
            ],
            "subs": [
                {"name": "actor", "driving": 1, "cut": cut, "size": 32, "per_version": 2, "bound": 3},
                {"name": "eval", "cut": 7, "size": 1},
            ],
        }

    first = scaler.load(0.0, state(10))
    assert first.trainer_tokens_per_s == 0, "not known yet"
    later = scaler.load(20.0, state(20))
    # 10 batches x 32 groups x 8 samples x 500 tokens in 20 s; 11 open samples, 13 jobs queued and 1 of a silent worker
    assert later == Load(11 + 8 * 14, 64, 64_000.0, 4_000.0, 3, 512)
    assert scaler.load(100.0, state(20)).trainer_tokens_per_s == 0, "what is older than the window is forgotten"
