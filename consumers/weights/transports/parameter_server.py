"""One parameter server of checkpoint-engine: a process beside the trainer, on one of the GPUs that engines run on.

checkpoint-engine (MoonshotAI; 0.1.2 and 0.4.2 were read) keeps a checkpoint in pinned host memory, shared out over the
servers, broadcasts it bucket by bucket between their GPUs, and hands each bucket to the one engine process on its own
GPU: CUDA memory that both map, announced over a ZMQ socket. It takes the default process group, chooses the device, and
waits without a limit for engines: hence a process of its own, which the trainer can kill.

    trainer (lines of JSON on stdin)                        server (lines on stdout)
    {"load": NAME, "files": [...]}                          {"loaded": NAME}
    {"load": NAME, "share": [...]}   of a copy: shares.py   {"loaded": NAME}   it is not read any more
    {"update": NAME}                                        {"handles": {GPU: socket}}   rank 0 only
    {"taken": true}      the engines have answered          {"updated": NAME}
    end of the file                                         it ends

Anything that goes wrong is an ``{"error": ...}`` and the end of the process.
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
    """Return the trainer's commands. When the trainer is gone the process exits, whatever it is doing."""
    said: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            said.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    if hasattr(os, "pidfd_open"):
        trainer = os.pidfd_open(os.getppid())

        def watch() -> None:
            # A trainer's forked children, a loader's workers say, have the other end of stdin too.
            select.select([trainer], [], [])
            os._exit(0)

        threading.Thread(target=watch, name="trainer", daemon=True).start()
    return said


def _own_stdout() -> TextIO:
    """Return a stream for answers, and redirect the output of libraries to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def _make(rank: int) -> Any:
    """Make a parameter server in a process group of its kind. Blocks until all of them have joined."""
    import torch.distributed

    # No transfers between machines: an RDMA engine would be started, or its absence be an error.
    sys.modules["mooncake"] = None  # type: ignore[assignment]
    from checkpoint_engine.ps import ParameterServer

    if rank == 0:
        # torch's own store would listen on every address of the machine.
        distributed: Any = torch.distributed
        distributed.TCPStore = partial(distributed.TCPStore, master_listen_fd=int(os.environ[LISTENER]))
    server = ParameterServer(auto_pg=False)
    # Part of the names of its sockets: no two servers of one machine share one, and nobody can guess it.
    server._zmq_addr_counter = secrets.randbits(48)
    server.init_process_group()
    return server


def register(server: Any, name: str, **what: Any) -> bool:
    """Read this server's share into pinned host memory, that of the last version where it fits; whether it has one.

    Never in place: checkpoint-engine deletes files in /dev/shm that it pins so. Tensors it copies (0.1.2 and 0.4.2).

    Args:
        what: ``files``, or the place of a ``share`` of a copy.
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


def serve(rank: int, said: "queue.Queue[dict[str, Any]]", out: TextIO) -> None:
    """Do what the trainer says until it is gone. Blocks."""

    def answer(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    def tell_handles(sockets: list[tuple[str, str]]) -> None:
        if rank == 0:
            answer(handles=dict(sockets))
            said.get()  # taken

    try:
        server, held = _make(rank), ""
        while True:
            command = said.get()
            if "load" in command:
                if held:  # nobody was there to take it
                    server.unregister_checkpoint(held)
                name = command.pop("load")
                held = name if register(server, name, **command) else ""
                answer(loaded=name)
            elif "update" in command:
                server.gather_metas(command["update"])
                server.update(command["update"], tell_handles)
                answer(updated=command["update"])
    except Exception as exc:
        answer(error=f"{type(exc).__name__}: {exc}"[:500])
        raise


def main() -> None:
    """Serve as rank RANK of WORLD_SIZE. Ends with the trainer."""
    serve(int(os.environ["RANK"]), _commands(), _own_stdout())


if __name__ == "__main__":
    main()
