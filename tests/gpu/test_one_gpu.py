"""Guarantees on one GPU: weights by disk and by CUDA IPC are the published ones; memory goes and comes back."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.deltas import compare
from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.records.keys import Keys
from penstock.workers.main import Worker
from tests.gpu.conftest import Make
from tests.integration.held_disk import Disk, disk
from tests.integration.parts import buffering
from tests.integration.worker_play import admit, job, presence, until, working

__all__ = ["disk"]

PROMPT = [5, 6, 7, 8, 9, 20, 33, 47, 81, 12]
#: bfloat16 kernels against bfloat16 torch; two seeds differ by units.
TOLERANCE = 0.15


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()


def expected(model: Any) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([PROMPT], device="cuda")).logits[0].float(), -1)
    return [float(logprobs[place - 1, PROMPT[place]]) for place in range(3, len(PROMPT))]


def host(model: Any) -> dict[str, torch.Tensor]:
    """What it holds now, in memory of its own."""
    return {name: one.to("cpu", copy=True) for name, one in model.state_dict().items()}


def far(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


async def publish_spoilt(trainer: Trainer, model: Any, version: int) -> list[float]:
    """Publish a model out of pinned copies, and spoil its own tensors; what it made of the prompt before."""
    wanted = expected(model)
    assert await asyncio.to_thread(trainer.publish, model) == version
    for parameter in model.parameters():
        parameter.data.zero_()
    copies = [arena.copy for arena in trainer.session.publisher.writer._arenas if arena.copy is not None]
    assert all(one.is_pinned() for copy in copies for _, one in copy.tensors({}))
    return wanted


async def check_was_sent(trainer: Trainer, worker: Worker, version: int, wanted: list[float]) -> None:
    engine, sent = worker.services.engine, trainer.publisher.last
    assert sent is not None
    assert (sent.failure, sent.workers) == ("", (worker.services.worker,))
    await until(lambda: engine.version == version, limit_s=60)
    assert far((await engine.score(PROMPT, 3)).logprobs, wanted) < TOLERANCE


async def check_folder(trainer: Trainer, version: int, tensors: dict[str, torch.Tensor]) -> None:
    await asyncio.to_thread(trainer.session.settle)
    files = (trainer.weights_dir / f"v{version:08d}").glob("*.safetensors")
    written = {name: one for file in files for name, one in load_file(file).items()}
    assert len(written) > 10
    assert all(torch.equal(one, tensors[name]) for name, one in written.items())


def play(config: Config, body: Callable[[Worker, Trainer], Awaitable[None]]) -> None:
    async def run() -> None:
        with Trainer(config) as trainer:
            async with working(config) as worker:
                await until(lambda: worker.services.engine.info.version != "", limit_s=60)
                await body(worker, trainer)

    asyncio.run(run())


async def publish(worker: Worker, trainer: Trainer, model: Any) -> None:
    """Publish, and see that the engine serves these weights and no others."""
    again = {"run": trainer.config.run, "subscription": trainer.name, "batch": 0}
    await asyncio.to_thread(trainer.load_state_dict, again)
    version = await asyncio.to_thread(trainer.publish, model)
    engine = worker.services.engine
    await until(lambda: engine.version == version and not worker.services.valves.cause, limit_s=60)
    assert far((await engine.score(PROMPT, 3)).logprobs, expected(model)) < TOLERANCE


def test_two_policies_are_told_apart(gpu_models: list[Path]) -> None:
    assert far(expected(load(gpu_models[0])), expected(load(gpu_models[1]))) > 5 * TOLERANCE


@pytest.mark.parametrize("transport", ["disk", "cuda_ipc"])
def test_T16_the_engine_serves_what_was_published(
    make: Make, gpu_models: list[Path], client: redis.Redis, keys: Keys, transport: str
) -> None:
    async def body(worker: Worker, trainer: Trainer) -> None:
        await publish(worker, trainer, load(gpu_models[1]))
        await until(lambda: presence(client, keys)["state"] == "serving")
        for seed in (2, 1, 2):
            await publish(worker, trainer, load(gpu_models[seed]))
            sent = trainer.publisher.last
            assert (sent is None) == (transport == "disk")
            assert sent is None or (sent.failure == "" and len(sent.workers) == 1)
        first = await worker.services.engine.checksum()
        await publish(worker, trainer, load(gpu_models[1]))
        assert await worker.services.engine.checksum() != first
        await publish(worker, trainer, load(gpu_models[2]))
        assert await worker.services.engine.checksum() == first

    play(make(transport=transport), body)


@pytest.mark.parametrize("transport", ["disk", "cuda_ipc"])
def test_T16_a_version_is_served_from_a_pinned_copy_while_its_folder_waits(
    make: Make, gpu_models: list[Path], client: redis.Redis, keys: Keys, disk: Disk, transport: str
) -> None:
    """Sent, the engine has it before the disk; not sent, it waits for the folder. What the trainer does to its own
    tensors meanwhile changes neither.
    """
    config = make({"staleness": {"mode": "async", "bound": 8}}, transport=transport, folder_first=False)

    async def body(worker: Worker, trainer: Trainer) -> None:
        await asyncio.to_thread(trainer.publish, load(gpu_models[1]))
        await until(lambda: [(one.state, one.version) for one in trainer.workers()] == [("serving", 1)], limit_s=60)
        admit(client, keys, [job(index) for index in range(4)])
        for version, seed in ((2, 2), (3, 1), (4, 2)):
            trainer.commit(await asyncio.to_thread(trainer.next, 60.0))
            disk.may_write.clear()
            with disk.opened_at_the_end():
                model = load(gpu_models[seed])
                tensors = host(model)
                wanted = await publish_spoilt(trainer, model, version)
                if transport == "cuda_ipc":
                    await check_was_sent(trainer, worker, version, wanted)
            await check_folder(trainer, version, tensors)
            shown = [("serving", version)]
            await until(lambda at=shown: [(one.state, one.version) for one in trainer.workers()] == at, limit_s=60)
            assert far((await worker.services.engine.score(PROMPT, 3)).logprobs, wanted) < TOLERANCE

    with buffering(config):
        play(config, body)


def test_T16_ten_versions_by_delta_are_served_from_bit_equal_copies(
    make: Make, gpu_models: list[Path], client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    sections = {"staleness": {"mode": "async", "bound": 16}, "worker": {"copies_dir": str(copies)}}
    config = make(sections, transport="delta")

    async def body(worker: Worker, trainer: Trainer) -> None:
        model = load(gpu_models[1])
        for version in range(1, 11):
            if version > 1:
                trainer.commit(await asyncio.to_thread(trainer.next, 60.0))
                for parameter in model.parameters():
                    parameter.data += 1e-3 * torch.randn_like(parameter)
            assert await asyncio.to_thread(trainer.publish, model) == version
            shown = [("serving", version)]
            await until(lambda at=shown: [(one.state, one.version) for one in trainer.workers()] == at, limit_s=60)
            (copy,) = copies.glob(f"v{version:08d}-*")
            compare(trainer.weights_dir / f"v{version:08d}", copy)
            assert far((await worker.services.engine.score(PROMPT, 3)).logprobs, expected(model)) < TOLERANCE
            if version == 1:
                admit(client, keys, [job(index) for index in range(10)])
        assert worker.services.tally.weight_copies == {"whole": 1, "deltas": 9}

    with buffering(config):
        play(config, body)


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["weights", "cuda_graph", "kv_cache"]])
def test_offloaded_memory_is_free_and_comes_back_with_the_newest_weights(
    make: Make, gpu_models: list[Path], tags: list[str]
) -> None:
    async def body(worker: Worker, trainer: Trainer) -> None:
        await publish(worker, trainer, load(gpu_models[1]))
        before = torch.cuda.mem_get_info()[0]
        await asyncio.to_thread(trainer.offload_engines, tags)
        assert torch.cuda.mem_get_info()[0] > before + (2**30 if "kv_cache" in tags else 0)
        assert worker.services.engine.offloaded == set(tags)
        assert worker.services.valves.cause
        model = load(gpu_models[2])
        again = {"run": trainer.config.run, "subscription": trainer.name, "batch": 0}
        await asyncio.to_thread(trainer.load_state_dict, again)
        version = await asyncio.to_thread(trainer.publish, model)
        await asyncio.to_thread(trainer.onload_engines, tags)
        engine = worker.services.engine
        await until(lambda: engine.version == version and not worker.services.valves.cause, limit_s=60)
        assert far((await engine.score(PROMPT, 3)).logprobs, expected(model)) < TOLERANCE

    play(make(), body)
