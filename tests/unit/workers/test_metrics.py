"""What a worker serves: sums of what the engine answered, shares of them, and GPUs; what there is not is absent."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.protocol.presence import GpuLoad
from penstock.records.job import Job
from penstock.records.sample import Sample
from penstock.records.worker_causes import CodeCalled, ServiceCalled
from penstock.workers.engine import Drafts, Segment
from penstock.workers.hooks.open_calls import OpenCalls
from penstock.workers.metrics import WorkerCollector
from penstock.workers.presence import smoothed
from penstock.workers.services import Services, Tally

JOB = Job(id="d/0/0", n=4)


def served(tally: Tally, *gpus: GpuLoad, calls: OpenCalls | None = None) -> dict[tuple[str, ...], float]:
    services = SimpleNamespace(
        tally=tally,
        gpus=lambda: gpus,
        engine=SimpleNamespace(version=3, num_running=0),
        num_running=0,
        open_calls=calls or OpenCalls(),
        agents=None,
        config=SimpleNamespace(worker=SimpleNamespace(slots=4)),
    )
    families = WorkerCollector(cast(Services, services)).collect()
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def segment(*, drawn: int, prompt: int, cached: int, drafts: Drafts | None = None) -> Segment:
    ids = list(range(drawn))
    return Segment(ids, [0.0] * drawn, [3] * drawn, "stop", cached, prompt, drafts=drafts)


def test_shares_are_over_all_answers_of_the_engine() -> None:
    tally = Tally()
    for one in (*[Sample(JOB, 0, generate_s=2.0, reward_s=0.5)] * 3, None):
        tally.committed(one)
    tally.answered(segment(drawn=8, prompt=10, cached=0))
    tally.answered(segment(drawn=12, prompt=30, cached=20, drafts=Drafts(checks=4, drafted=16, right=8)))
    found = served(tally)
    assert found["penstock_worker_prompt_tokens_total",] == 40
    assert found["rollout_prefix_cache_hit_rate",] == 0.5
    assert found["rollout_spec_accept_rate",] == 0.5
    assert found["rollout_spec_accept_length",] == 3, "the answer without drafts is not among them"
    assert found["penstock_worker_generate_seconds_total",] == 6
    assert found["penstock_worker_reward_seconds_total",] == 1.5


def test_what_there_is_not_is_absent_and_not_0() -> None:
    names = {name for name, *_ in served(Tally())}
    assert not {name for name in names if name.startswith("rollout_") or "gpu" in name}


async def test_calls_of_a_tool_are_counted_with_their_failures_and_time() -> None:
    calls, step = OpenCalls(), CodeCalled("step", "tools:Search", "sample", "d/0/0/0")
    with calls.of("code", step):
        pass
    with pytest.raises(ValueError, match="down"), calls.of("code", step):
        raise ValueError("the index is down")
    with pytest.raises(asyncio.CancelledError), calls.of("code", step):
        raise asyncio.CancelledError
    with calls.of("judge", ServiceCalled("judge", "http://judge")):
        pass
    found = {labels: value for labels, value in served(Tally(), calls=calls).items() if "_code_" in labels[0]}
    assert found.pop(("penstock_worker_code_seconds_total", "step tools:Search")) > 0
    assert found == {
        ("penstock_worker_code_calls_total", "step tools:Search"): 3,
        ("penstock_worker_code_failures_total", "step tools:Search"): 1,
    }


def test_copies_are_told_by_how_they_came() -> None:
    tally = Tally(weight_copies=Counter(whole=1, deltas=3), weight_copy_bytes=7, weight_copy_s=0.5)
    assert {labels: value for labels, value in served(tally).items() if "weight_cop" in labels[0]} == {
        ("penstock_worker_weight_copies_total", "whole"): 1,
        ("penstock_worker_weight_copies_total", "deltas"): 3,
        ("penstock_worker_weight_copy_bytes_total",): 7,
        ("penstock_worker_weight_copy_seconds_total",): 0.5,
    }


def test_gpus_are_told_by_name() -> None:
    known: dict[str, Any] = {"used_bytes": 2, "size_bytes": 4}
    found = served(Tally(), GpuLoad(name="0", use=0.5, **known), GpuLoad(name="MIG-1", **known))
    assert {labels: value for labels, value in found.items() if "gpu" in labels[0]} == {
        ("penstock_worker_gpu_use_ratio", "0"): 0.5,
        ("penstock_worker_gpu_memory_used_bytes", "0"): 2,
        ("penstock_worker_gpu_memory_used_bytes", "MIG-1"): 2,
        ("penstock_worker_gpu_memory_size_bytes", "0"): 4,
        ("penstock_worker_gpu_memory_size_bytes", "MIG-1"): 4,
    }


def test_the_rate_of_an_idle_worker_becomes_zero() -> None:
    rate = smoothed(0.0, 1000.0)
    assert rate == pytest.approx(300.0)
    for _ in range(60):  # half a minute
        rate = smoothed(rate, 0.0)
    assert rate == 0.0
    assert smoothed(0.0, 1.0) > 0.0, "a slow engine is not idle"
