"""Engines that are spawned, lost, started again, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from penstock.config import ModelConfig
from penstock.errors import EngineDied
from penstock.records.job import Job
from penstock.records.publication import Publication
from penstock.records.sample import Sample
from penstock.workers.jobs.valves import Valves
from penstock.workers.sglang.engine import SglangEngine
from penstock.workers.weights.apply import Updater
from tests.integration import oracle
from tests.integration.engine_fixtures import cpu_engine
from tests.integration.processes import command_of, descendants, open_pidfds, wait_gone
from tests.integration.workload import (
    RecordingEngine,
    assert_spans_enough,
    assert_true,
    in_place_oracle,
    load_oracle_models,
    produce,
)

pytestmark = pytest.mark.engine

ANSWER = {"max_new_tokens": 4, "ignore_eos": True}
LONG = {"max_new_tokens": 3000, "ignore_eos": True}


def test_an_engine_dies_with_its_worker(
    model_config: ModelConfig, models: list[Path], publications: list[Publication], tmp_path: Path
) -> None:
    config = cpu_engine().model_copy(update={"logprob_kind": "original"})
    parent = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.engine_parent",
            config.model_dump_json(),
            model_config.model_dump_json(),
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    engine = int(pid)
    asyncio.run(_assert_T6_original_logprobs_are_seen(url, model_config, models, publications[1], tmp_path))
    processes = [engine, *descendants(engine)]
    assert len(processes) >= 3, "launch_server has a scheduler and a detokenizer"
    pidfds = open_pidfds(processes)

    parent.kill()
    parent.wait()

    assert wait_gone(pidfds, 10) == []


async def _assert_T6_original_logprobs_are_seen(
    url: str, model: ModelConfig, models: list[Path], publication: Publication, tmp_path: Path
) -> None:
    """Whoever meets a server finds out what it returns; here those of before temperature."""
    config = cpu_engine().model_copy(update={"url": url})
    engine = SglangEngine(config, model, name="met", log_dir=tmp_path)
    try:
        await engine.start(publication)
        drawn = await engine.generate([5, 6], ANSWER | {"temperature": 0.5}, rid="a")
    finally:
        await engine.stop()
    assert engine.logprob_kind == "original"
    sample = Sample(Job("a/0/0", 1), 0)
    sample.append([5, 6])
    sample.append(drawn.output_ids, version=1, logprobs=drawn.logprobs)
    oracle_models = {1: oracle.load_model(models[1])}
    assert oracle.gap(sample, oracle.recompute(oracle_models, sample, sample.versions, 1.0)) < 1e-4
    assert oracle.gap(sample, oracle.recompute(oracle_models, sample, sample.versions, 0.5)) > 1e-2


async def test_a_lost_engine_is_noticed_and_comes_back_with_the_current_weights(
    model_config: ModelConfig, models: list[Path], publications: list[Publication], tmp_path: Path
) -> None:
    config = cpu_engine(**{"disable-overlap-schedule": False, "disable-radix-cache": True})
    config = config.model_copy(update={"health_timeout_s": 1.0, "health_failures": 2})
    engine = RecordingEngine(config, model_config, name="lost", log_dir=tmp_path)
    try:
        await engine.start(publications[2])
        assert (await engine.generate([5, 6], ANSWER, rid="a")).versions == [2] * 4
        assert engine.pid is not None
        frozen = [engine.pid, *descendants(engine.pid)]
        pidfds = open_pidfds(frozen)

        scheduler = next(pid for pid in frozen if "scheduler" in command_of(pid))
        os.kill(scheduler, signal.SIGSTOP)
        reason = await asyncio.wait_for(engine.watch(), 60)
        assert "failed 2 consecutive health checks" in reason

        await engine.restart(publications[3])
        assert wait_gone(pidfds, 10) == []
        assert engine.version == 3
        assert (await engine.generate([5, 6], ANSWER, rid="a")).versions == [3] * 4

        # T6 where steps overlap: the server reports boundaries up to one token late, which must not be believed.
        samples, _ = await produce(engine, AutoTokenizer.from_pretrained(models[0]), publications, "in_place")
        assert engine.version == 5
        assert_spans_enough(samples)
        oracle_models = load_oracle_models(models)
        assert_true(samples, in_place_oracle(oracle_models, engine), engine)

        # Two refused checks 0.2 s apart could come before the report of how the process ended.
        engine.config = config.model_copy(update={"health_failures": 1000})
        running = asyncio.create_task(engine.generate([5, 6], LONG, rid="b"))
        watching = asyncio.create_task(engine.watch())
        await engine.healthy()  # a round trip behind the request: it has reached the server
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="was lost"):
            await asyncio.wait_for(running, 60)
        assert "signal SIGKILL" in await asyncio.wait_for(watching, 60)
        valves = Valves()
        with pytest.raises(EngineDied):
            await Updater(engine, valves).apply(publications[6], "in_place")
        assert valves.cause is None
    finally:
        await engine.stop()
    with pytest.raises(EngineDied, match="not running"):
        await engine.generate([5, 6], ANSWER, rid="c")
