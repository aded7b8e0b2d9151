"""Define the transports of weights: names, modules of both sides, and requirements.

The trainer's classes are in ``consumers/weights``, the workers' in ``workers/weights/receive``; both are imported at
first use. A user's own transport is named by the import path of its trainer's class, ``module:Class``,
which names the worker's class; its requirements are unknown.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transport:
    """Transport of weights to ready engines; the checkpoint folder is written before or after."""

    #: ``file:Class`` of the trainer's side, ``module:Class`` for a user's; '' if engines load the folder and nothing is
    #: sent.
    sender: str = ""
    #: ``file:Class`` of the worker's side; '' for a user's, whose sender names it.
    receiver: str = ""
    #: Trainer and engines have GPUs.
    needs_gpu: bool = False
    #: Engines are on the trainer's own GPU, that of rank 0, and nowhere else.
    on_trainers_gpu: bool = False

    @property
    def is_sent(self) -> bool:
        """Return whether weights are sent to ready workers, which must enroll."""
        return bool(self.sender)


#: penstock's own, by name.
TRANSPORTS = {
    "disk": Transport(),
    # Nothing is sent: engines load a local copy made by the worker (workers/weights/local_copies.py).
    "delta": Transport(),
    "nccl": Transport("collective:Nccl", "collective:Collective", needs_gpu=True),
    "gloo": Transport("collective:Gloo", "collective:Collective"),
    "cuda_ipc": Transport("ipc:CudaIpc", "ipc:CudaIpc", needs_gpu=True, on_trainers_gpu=True),
}


def transport(name: str) -> Transport:
    """Return the transport named in ``trainer.transport``."""
    return TRANSPORTS.get(name) or Transport(name)
