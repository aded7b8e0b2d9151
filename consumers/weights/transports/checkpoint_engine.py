"""Send weights through checkpoint-engine: control its parameter servers from the trainer (parameter_server.py).

    begin      start missing servers and make them read a version: the copy in the trainer's memory (shares.py), or,
               with folder_first: true, its folder; engines keep generating
    loaded     wait for that
    update     engines are frozen: get the sockets at which each engine process meets the server on its GPU
    finish     engines have answered: wait for the servers
    abandon    after an error: kill the servers, and release engines that wait for them
    leave      before the memory of a copy is reused: wait for servers that still read it, or kill them

Each GPU has one server and one engine process: a server gives its buckets to the one process that shares its GPU's
memory, so it cannot serve two engines on one GPU, and a GPU without an engine would block all of them.
"""

import json
import logging
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import TrainerConfig
from penstock.config.transport import TRANSPORTS
from penstock.consumers.weights.copies import Copy
from penstock.consumers.weights.shared_memory import SharedMemory
from penstock.consumers.weights.transfer import Transfer, TransferFailed
from penstock.consumers.weights.transports import ipc, shares
from penstock.consumers.weights.transports.parameter_server import LISTENER
from penstock.consumers.weights.transports.sender import Sender
from penstock.errors import ConfigError
from penstock.protocol.transfers import Enrollment
from penstock.records.publication import Publication

log = logging.getLogger(__name__)

#: Longest wait for an engine process to be released, and for its answer.
_RELEASE_S = 2.0
#: Longest wait for a killed server to exit.
_GONE_S = 5.0


class CheckpointEngine(Sender):
    """Make parameter servers read a version while engines generate, and send it to the ready ones."""

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config)
        TRANSPORTS["checkpoint_engine"].check_package(config.transport)
        self._servers: ParameterServers | None = None
        self.memories = () if config.folder_first else (SharedMemory(), SharedMemory())

    @property
    def servers(self) -> "ParameterServers":
        """Return the servers, created on first use; raise ConfigError."""
        if self._servers is None:
            gpus = gpu_ids(self.config.parameter_server_gpus)
            self._servers = ParameterServers(gpus, self.config.bucket_bytes, self.memories)
        return self._servers

    def begin(self, publication: Publication) -> None:
        self.servers.begin(publication.id, Path(publication.path))

    def begin_copy(self, publication: Publication, copy: Copy) -> None:
        self.servers.begin_copy(publication.id, copy)

    def leave_copies(self) -> None:
        if self._servers is not None:
            self._servers.leave_copies(self.config.transfer_timeout_s)

    def send(self, transfer: Transfer) -> None:
        check_served(transfer.workers, len(self.servers.gpus))
        self.servers.loaded(transfer.left_s)
        transfer.decide()
        if missing := transfer.workers.keys() - transfer.await_held():
            raise TransferFailed(f"worker {min(missing)} did not freeze its engine in time")
        handles = json.dumps(self.servers.update(transfer.timeout_s))
        for worker in transfer.workers:
            transfer.tell(worker, handles)
        transfer.await_received()
        self.servers.finish(transfer.timeout_s)

    def abandon(self) -> None:
        if self._servers is not None:
            self._servers.abandon()

    def close(self) -> None:
        super().close()
        for memory in self.memories:
            memory.close()


def check_served(engines: Mapping[str, Enrollment], num_gpus: int) -> None:
    """Raise TransferFailed unless each parameter server has exactly one engine process on this machine.

    With a missing one a server would wait forever.
    """
    for one in engines.values():
        ipc.check_local(one.url)
    num_ranks = sum(one.num_ranks for one in engines.values())
    if num_ranks != num_gpus:
        raise TransferFailed(
            f"engines that are ready have {num_ranks} processes, and there are parameter servers on {num_gpus} "
            "GPUs (trainer.parameter_server_gpus): checkpoint-engine serves one process on each"
        )


def gpu_ids(indices: Sequence[int] | None) -> list[str]:
    """Return ``GPU-UUID`` of the trainer's GPUs with these indices; of its current one for None. Raises ConfigError."""
    import torch

    count = torch.cuda.device_count()
    wanted = [torch.cuda.current_device()] if indices is None and count else list(indices or ())
    if not wanted or max(wanted) >= count:
        raise ConfigError(
            f"trainer.parameter_server_gpus is {list(indices) if indices is not None else None}, and this trainer sees "
            f"{count} GPUs: name those on which engines run, from 0 on."
        )
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in wanted]


@dataclass(slots=True)
class _Server:
    process: "subprocess.Popen[str]"
    #: Its answers; None at its end.
    answers: "queue.Queue[dict[str, Any] | None]"


class ParameterServers:
    """Control the parameter servers of one trainer. They serve many versions, and are restarted after a failure.

    Args:
        gpus: ``GPU-UUID`` of each.
        bucket_bytes: most bytes broadcast at once, rounded up to GiB; a server uses three times as much memory of its
            GPU meanwhile.
        memories: of copies that they may read.
    """

    def __init__(self, gpus: Sequence[str], bucket_bytes: int, memories: Sequence[SharedMemory] = ()) -> None:
        self.gpus = list(gpus)
        self._bucket_bytes, self._memories = bucket_bytes, memories
        self._servers: list[_Server] = []
        self._name = ""
        #: Whether servers may still read a copy.
        self._reads_copy = False
        #: GPU -> socket of an unfinished update.
        self._handles: dict[str, str] = {}

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the started servers."""
        return [server.process.pid for server in self._servers]

    def begin(self, name: str, folder: Path) -> None:
        """Make the servers read a version's files, each its share. Returns at once."""
        files, count = sorted(str(file) for file in folder.glob("*.safetensors")), len(self.gpus)
        self._run()
        self._load(name, [{"files": files[rank::count]} for rank in range(count)])

    def begin_copy(self, name: str, copy: Copy) -> None:
        """Make the servers read a copy in ``memories``, which must stay until ``loaded`` or ``leave_copies``.

        Returns at once. Raises PublishError: no memory for the tables.
        """
        assert copy.memory is not None, "made in another arena"
        places = shares.put(copy.memory, shares.shares_of(copy, len(self.gpus), self._bucket_bytes))
        self._run()
        self._reads_copy = True
        self._load(name, [{"share": place} for place in places])

    def _run(self) -> None:
        if any(server.process.poll() is not None for server in self._servers):
            self.abandon()
        if not self._servers:
            self._start()

    def _load(self, name: str, each: list[dict[str, Any]]) -> None:
        self._name = name
        for server, what in zip(self._servers, each, strict=True):
            self._send(server, load=name, **what)

    def loaded(self, timeout_s: float) -> None:
        """Wait until every server has its share. Raises TransferFailed."""
        self._await_all("loaded", self._name, timeout_s)
        self._reads_copy = False

    def leave_copies(self, timeout_s: float) -> None:
        """Wait until no server reads a copy; kill servers that do not finish in time."""
        if not self._reads_copy:
            return
        try:
            self.loaded(timeout_s)
        except TransferFailed as exc:
            log.warning("restarting the parameter servers: %s", exc)
            self.abandon()

    def update(self, timeout_s: float) -> dict[str, str]:
        """Begin the update; return GPU -> socket for its engine process. Raises TransferFailed."""
        for server in self._servers:
            self._send(server, update=self._name)
        self._handles = dict(self._receive(self._servers[0], "handles", time.monotonic() + timeout_s))
        return self._handles

    def finish(self, timeout_s: float) -> None:
        """Wait until the servers have finished, after engines have the weights. Raises TransferFailed."""
        self._send(self._servers[0], taken=True)
        self._await_all("updated", self._name, timeout_s)
        self._handles = {}

    def abandon(self) -> None:
        """Kill the servers and release engine processes that wait for them, with an error. Blocks for seconds."""
        servers, self._servers, self._reads_copy = self._servers, [], False
        for server in servers:
            server.process.kill()
        for server in servers:
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(_GONE_S)
        handles, self._handles = self._handles, {}
        if handles:
            release(list(handles.values()))

    def _start(self) -> None:
        # An inherited socket: no other process can take the port, and it is reachable on loopback only.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # The trainer's allocator settings do not suit memory that is shared with engines.
            inherited = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
            shared = {
                "WORLD_SIZE": str(len(self.gpus)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1] - 1),  # it takes the next one
                "PS_MAX_BUCKET_SIZE_GB": str(math.ceil(self._bucket_bytes / 2**30)),  # 0.1.2 reads whole ones only
                "NCCL_SOCKET_IFNAME": "lo",
                "LOGURU_LEVEL": "WARNING",
                LISTENER: str(listener.fileno()),
            }
            fds = [memory.fd for memory in self._memories]
            for rank, gpu in enumerate(self.gpus):
                own = {"RANK": str(rank), "CUDA_VISIBLE_DEVICES": gpu}
                process = subprocess.Popen(
                    [sys.executable, "-m", "penstock.consumers.weights.transports.parameter_server"],
                    env={**inherited, **shared, **own},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=[*fds, listener.fileno()] if rank == 0 else fds,
                    start_new_session=True,  # ends with its stdin, not by the user's ^C
                )
                self._servers.append(_Server(process, _lines(process, rank)))

    def _send(self, server: _Server, **what: Any) -> None:
        assert server.process.stdin is not None
        # A dead server is detected by its missing answer.
        with suppress(OSError):
            server.process.stdin.write(json.dumps(what) + "\n")
            server.process.stdin.flush()

    def _await_all(self, word: str, value: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for server in self._servers:
            while self._receive(server, word, deadline) != value:
                pass  # an answer for an earlier version that no engine received

    def _receive(self, server: _Server, word: str, deadline: float) -> Any:
        rank = self._servers.index(server)
        try:
            answer = server.answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TransferFailed(f"parameter server {rank} of checkpoint-engine was not ready in time") from None
        if answer is None:
            raise TransferFailed(f"parameter server {rank} of checkpoint-engine ended ({server.process.wait()})")
        if word not in answer:
            raise TransferFailed(f"parameter server {rank} of checkpoint-engine: {answer.get('error', answer)}")
        return answer[word]


def _lines(process: "subprocess.Popen[str]", rank: int) -> "queue.Queue[dict[str, Any] | None]":
    answers: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                answers.put(json.loads(line))
        answers.put(None)

    threading.Thread(target=read, name=f"parameter-server-{rank}", daemon=True).start()
    return answers


def release(handles: Sequence[str]) -> None:
    """End the wait of engine processes for dead servers. Blocks for at most twice ``_RELEASE_S``.

    An engine's scheduler waits at its socket without a timeout, and would have to be killed. It reconnects to a new
    listener at the socket, and treats an exception as the end of the update.
    """
    import zmq

    def release_one(handle: str) -> None:
        with context.socket(zmq.REQ) as peer:
            peer.linger = 0
            peer.sndtimeo = peer.rcvtimeo = int(_RELEASE_S * 1000)
            try:
                peer.bind(handle)
                peer.send_pyobj(RuntimeError("the trainer aborted this update"))
                # Release 0.4.2 answers an exception with a message, and expects a reply.
                peer.recv()
                peer.send(b"")
            except zmq.Again:
                return  # no process waits there, or it ended without an answer
            except zmq.ZMQError as exc:
                log.warning("an engine may wait at %s forever: %s", handle, exc)

    with zmq.Context() as context, ThreadPoolExecutor(len(handles)) as pool:
        list(pool.map(release_one, handles))
