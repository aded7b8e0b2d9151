"""Weights by checkpoint-engine on one GPU that trainer, parameter server and engine share: its CUDA memory for real.

The package has to be there for this Python, which serves too, beside SGLang; any release from 0.1.2 on.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import redis

from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.transports.checkpoint_engine import CheckpointEngine, ParameterServers
from penstock.records.keys import Keys
from penstock.workers.main import Worker
from tests.gpu.conftest import Make
from tests.gpu.test_one_gpu import check_folder, check_was_sent, host, load, play, publish, publish_spoilt
from tests.integration.held_disk import Disk, disk
from tests.integration.parts import buffering
from tests.integration.worker_play import admit, all_in, job, presence, until

__all__ = ["disk"]

pytest.importorskip("checkpoint_engine")

LONG = {"max_new_tokens": 400, "ignore_eos": True}


def parameter_servers(trainer: Trainer) -> ParameterServers:
    sender = trainer.publisher.sender
    assert isinstance(sender, CheckpointEngine)
    return sender.servers


@pytest.mark.timeout(600)
def test_T16_the_engine_serves_what_parameter_servers_hand_it(
    make: Make, gpu_models: list[Path], client: redis.Redis, keys: Keys
) -> None:
    async def body(worker: Worker, trainer: Trainer) -> None:
        await publish(worker, trainer, load(gpu_models[1]))
        await until(lambda: presence(client, keys)["state"] == "serving")
        jobs = admit(client, keys, [job(i, sampling=LONG) for i in range(4)])
        pids = []
        for seed in (2, 1, 2):
            await publish(worker, trainer, load(gpu_models[seed]))
            sent = trainer.publisher.last
            assert sent is not None
            assert (len(sent.workers), sent.failure) == (1, "")
            pids.append(parameter_servers(trainer).pids)
        assert pids[0] == pids[1] == pids[2], "a server outlives a version"
        by_servers = await worker.services.engine.checksum()
        assert checkpoint_is_whole(trainer)

        # The same weights from the folder are the same: nothing was lost or changed on the way.
        os.kill(pids[0][0], signal.SIGSTOP)
        trainer.publisher.config = make(transport="checkpoint_engine", transfer_timeout_s=5.0)
        await publish(worker, trainer, load(gpu_models[2]))
        sent = trainer.publisher.last
        assert sent is not None
        assert sent.failure != ""
        assert await worker.services.engine.checksum() == by_servers
        assert worker.services.tally.engine_restarts == 0

        # Another server, and other weights again.
        trainer.publisher.config = trainer.config
        await publish(worker, trainer, load(gpu_models[1]))
        sent = trainer.publisher.last
        assert sent is not None
        assert (len(sent.workers), sent.failure) == (1, "")
        assert await worker.services.engine.checksum() != by_servers
        await until(all_in(client, keys, jobs, "ready"), limit_s=60)

    play(make(transport="checkpoint_engine", folder_first=True, transfer_timeout_s=60.0), body)


@pytest.mark.timeout(600)
def test_T16_servers_load_a_pinned_copy_while_the_folder_waits(
    make: Make, gpu_models: list[Path], client: redis.Redis, keys: Keys, disk: Disk
) -> None:
    """The engine has it before the disk; what the trainer does to its own tensors meanwhile changes neither."""
    settings = {"transport": "checkpoint_engine", "transfer_timeout_s": 60.0}
    config = make({"staleness": {"mode": "async", "bound": 8}}, **settings)

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
                await check_was_sent(trainer, worker, version, wanted)
            await check_folder(trainer, version, tensors)

    with buffering(config):
        play(config, body)


def checkpoint_is_whole(trainer: Trainer) -> bool:
    """checkpoint-engine deletes files that it pins in place."""
    newest = max(trainer.weights_dir.glob("v*"))
    return len(list(newest.glob("*.safetensors"))) > 0


@pytest.mark.timeout(600)
def test_an_engine_is_let_go_that_waits_for_a_server_that_is_gone(
    make: Make, gpu_models: list[Path], client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies when the engine has its socket: the engine gets an error, not a restart."""

    async def body(worker: Worker, trainer: Trainer) -> None:
        await publish(worker, trainer, load(gpu_models[1]))
        await until(lambda: presence(client, keys)["state"] == "serving")
        servers = parameter_servers(trainer)
        update = servers.update

        def stopped_first(timeout_s: float) -> dict[str, str]:
            handles = update(timeout_s)
            os.kill(servers.pids[0], signal.SIGKILL)
            return handles

        monkeypatch.setattr(servers, "update", stopped_first)
        trainer.publisher.config = make(transport="checkpoint_engine", transfer_timeout_s=5.0)
        await publish(worker, trainer, load(gpu_models[2]))
        sent = trainer.publisher.last
        assert sent is not None
        assert "did not answer in time" in sent.failure
        assert worker.services.tally.engine_restarts == 0
        await asyncio.to_thread(trainer.publisher.close)

    play(make(transport="checkpoint_engine", folder_first=True, transfer_timeout_s=60.0), body)
