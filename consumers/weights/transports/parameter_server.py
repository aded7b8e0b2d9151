"""Run one parameter server of checkpoint-engine, in a process beside the trainer, on a GPU of the engines.

checkpoint-engine (MoonshotAI; for 0.1.2 and 0.4.2) keeps a checkpoint in pinned host memory, divided among the servers,
broadcasts it in buckets between their GPUs, and gives each bucket to the one engine process on its own GPU: CUDA memory
that both map, announced over a ZMQ socket. It uses the default process group, sets the device, and waits for engines
without a timeout, so it needs a process that the trainer can kill.

    trainer (lines of JSON on stdin)                        server (lines on stdout)
    {"load": NAME, "files": [...]}                          {"loaded": NAME}
    {"load": NAME, "share": [...]}   of a copy: shares.py   {"loaded": NAME}   the copy is no longer read
    {"update": NAME}                                        {"handles": {GPU: socket}}   rank 0 only
    {"taken": true}      the engines have answered          {"updated": NAME}
    end of file                                             exit

An error is reported as ``{"error": ...}`` and ends the process.
"""

import inspect
import json
import os
import queue
import secrets
import select
import sys
import threading
from functools import partial
from typing import Any, TextIO

#: Environment: a listening socket on loopback, inherited by rank 0, at which the servers meet.
LISTENER = "PENSTOCK_LISTENER_FD"


def _commands() -> "queue.Queue[dict[str, Any]]":
    """Return the trainer's commands. The process exits at once when the trainer dies."""
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    if hasattr(os, "pidfd_open"):
        trainer = os.pidfd_open(os.getppid())

        def watch() -> None:
            # Forked children of the trainer, such as data loader workers, also hold the other end of stdin.
            select.select([trainer], [], [])
            os._exit(0)

        threading.Thread(target=watch, name="trainer", daemon=True).start()
    return commands


def _own_stdout() -> TextIO:
    """Return a stream for answers, and redirect the output of libraries to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def _make(rank: int) -> Any:
    """Create a parameter server and its process group. Blocks until all servers have joined."""
    import torch.distributed

    # Disables RDMA transfers between machines, which would start an engine, or fail without one.
    sys.modules["mooncake"] = None  # type: ignore[assignment]
    from checkpoint_engine.ps import ParameterServer

    if rank == 0:
        # By default torch's store listens on every address of the machine.
        distributed: Any = torch.distributed
        distributed.TCPStore = partial(distributed.TCPStore, master_listen_fd=int(os.environ[LISTENER]))
    server = ParameterServer(auto_pg=False)
    # Part of the names of its sockets: unique on the machine, and not guessable.
    server._zmq_addr_counter = secrets.randbits(48)
    server.init_process_group()
    return server


def register(server: Any, name: str, **what: Any) -> bool:
    """Read this server's share into pinned host memory, reused if it fits; return False if the share is empty.

    Never pins in place: checkpoint-engine deletes files in /dev/shm that it pins. It copies tensors (0.1.2 and 0.4.2).

    Args:
        what: ``files``, or the location of a ``share`` of a copy.
    """
    if "share" in what:
        from penstock.consumers.weights.transports import shares

        what = {"named_tensors": shares.read(what["share"])}
    if not any(what.values()):
        return False
    known = inspect.signature(server.register_checkpoint).parameters
    wanted = {"use_shared_memory_pool": True, "use_inplace_pin_memory": False}
    server.register_checkpoint(name, **what, **{key: value for key, value in wanted.items() if key in known})
    return True


def serve(rank: int, commands: "queue.Queue[dict[str, Any]]", out: TextIO) -> None:
    """Execute the trainer's commands until it ends. Blocks."""

    def answer(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    def send_handles(sockets: list[tuple[str, str]]) -> None:
        if rank == 0:
            answer(handles=dict(sockets))
            commands.get()  # taken

    try:
        server, held = _make(rank), ""
        while True:
            command = commands.get()
            if "load" in command:
                if held:  # no engine received it
                    server.unregister_checkpoint(held)
                name = command.pop("load")
                held = name if register(server, name, **command) else ""
                answer(loaded=name)
            elif "update" in command:
                server.gather_metas(command["update"])
                server.update(command["update"], send_handles)
                answer(updated=command["update"])
    except Exception as exc:
        answer(error=f"{type(exc).__name__}: {exc}"[:500])
        raise


def main() -> None:
    """Serve as rank RANK of WORLD_SIZE. Ends with the trainer."""
    serve(int(os.environ["RANK"]), _commands(), _own_stdout())


if __name__ == "__main__":
    main()
