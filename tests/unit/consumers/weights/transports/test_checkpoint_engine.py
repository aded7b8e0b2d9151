"""What an engine may be told of checkpoint-engine's sockets, what is refused before, how files are registered."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config import Config, TrainerConfig
from penstock.consumers.weights.transfer import TransferFailed
from penstock.consumers.weights.transports.checkpoint_engine import CheckpointEngine, check_served, gpu_ids
from penstock.consumers.weights.transports.parameter_server import register
from penstock.errors import ConfigError, ProtocolError
from penstock.protocol.transfers import Enrollment
from penstock.workers.weights.receive.checkpoint_engine import read_handles

GOOD = {
    "GPU-8f2c6b1e-2222-3333-4444-555555555555": "ipc://@checkpoint-engine-GPU-8f2c6b1e-2222-3333-4444-555555555555-0.sock"
}


def test_sockets_of_parameter_servers_are_read() -> None:
    assert read_handles(json.dumps(GOOD)) == GOOD


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"GPU-1": "tcp://10.0.0.1:5555"}),
        json.dumps({"GPU-1": "ipc:///tmp/checkpoint-engine-GPU-1-0.sock"}),
        json.dumps({"GPU-1": "ipc://@other-GPU-1-0.sock"}),
        json.dumps({"GPU-1": "ipc://@checkpoint-engine-GPU-1-0.sock/../x"}),
        json.dumps({"GPU-1": ["ipc://@checkpoint-engine-GPU-1-0.sock"]}),
        json.dumps({"": "ipc://@checkpoint-engine-GPU-1-0.sock"}),
        json.dumps({f"GPU-{i}": f"ipc://@checkpoint-engine-GPU-{i}-0.sock" for i in range(1025)}),
    ],
)
def test_an_engine_is_sent_to_no_other_socket(text: str) -> None:
    """It unpickles what comes out of them."""
    with pytest.raises(ProtocolError, match="parameter servers of checkpoint-engine"):
        read_handles(text)


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"transport": "checkpoint_engine"}, "moves weights between GPUs, and trainer.device is cpu"),
        ({"transport": "nccl", "device": "cuda", "parameter_server_gpus": [0]}, "is for trainer.transport checkpoint"),
        (
            {"transport": "checkpoint_engine", "device": "cuda", "parameter_server_gpus": [0, 1, 0]},
            "names a GPU twice",
        ),
        ({"transport": "checkpoint_engine", "device": "cuda", "parameter_server_gpus": []}, "at least 1 item"),
        ({"transport": "checkpoint_engine", "device": "cuda", "parameter_server_gpus": [-1]}, "greater than or equal"),
    ],
)
def test_what_cannot_work_is_refused(trainer: dict[str, Any], says: str) -> None:
    values = {"run": "x", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}}
    with pytest.raises(ValidationError, match=says):
        Config.model_validate(values | {"trainer": trainer})


def test_a_package_and_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "checkpoint_engine", None)
    with pytest.raises(ConfigError, match=r"^trainer.transport .* pip install 'penstock\[checkpoint-engine\]'"):
        CheckpointEngine(TrainerConfig())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for indices in (None, [0]):
        with pytest.raises(ConfigError, match="this trainer sees 0 GPUs"):
            gpu_ids(indices)


def test_published_files_are_never_pinned_in_place() -> None:
    """checkpoint-engine deletes those of /dev/shm then. Releases before had no such option."""
    seen: list[tuple[Any, ...]] = []

    class New:
        def register_checkpoint(
            self,
            name: str,
            *,
            files: list[str] | None = None,
            use_shared_memory_pool: bool = False,
            use_inplace_pin_memory: bool = True,
        ) -> None:
            seen.append((name, files, use_shared_memory_pool, use_inplace_pin_memory))

    class Old:
        def register_checkpoint(self, name: str, *, files: list[str] | None = None) -> None:
            seen.append((name, files))

    assert register(New(), "1-0", files=["a"])
    assert register(Old(), "1-0", files=["a"])
    assert not register(New(), "1-0", files=[])
    assert seen == [("1-0", ["a"], True, False), ("1-0", ["a"])]


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        ([Enrollment("a", "http://127.0.0.1:1", 2), Enrollment("b", "http://localhost:2", 1)], ""),
        ([Enrollment("a", "http://127.0.0.1:1", 2)], "have 2 processes, and there are parameter servers on 3 GPUs"),
        ([Enrollment("a", "http://127.0.0.1:1", 2), Enrollment("b", "http://10.0.0.2:2", 1)], "not on this machine"),
    ],
)
def test_every_server_has_one_engine_process_on_this_machine(engines: list[Enrollment], says: str) -> None:
    """Another one would wait for ever, and with it all of them."""
    ready = {one.worker: one for one in engines}
    with pytest.raises(TransferFailed, match=says) if says else nullcontext():
        check_served(ready, num_gpus=3)


SERVER = """
import time
from penstock.consumers.weights.transports import parameter_server
parameter_server._commands()
print("there", flush=True)
time.sleep(600)
"""
TRAINER = f"""
import os, subprocess, sys, time
pipe = subprocess.PIPE
server = subprocess.Popen([sys.executable, "-c", {SERVER!r}], stdin=pipe, stdout=pipe, start_new_session=True)
server.stdout.readline()
child = os.fork()
if child:
    print(server.pid, child, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux tells the end of a process")
def test_a_parameter_server_ends_with_its_trainer_whatever_children_that_leaves() -> None:
    """A forked child, a loader's worker say, has the other end of the server's stdin too."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    server, child = map(int, trainer.stdout.readline().split())
    ended = os.pidfd_open(server)
    try:
        trainer.kill()
        trainer.wait()
        assert select.select([ended], [], [], 60)[0], "it still runs"
    finally:
        os.close(ended)
        os.kill(child, signal.SIGKILL)
        trainer.stdout.close()
