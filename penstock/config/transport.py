"""The transports of weights: names, modules of both sides, and requirements.

Its class on the trainer's side is in ``consumers/weights/transports``, that on the worker's in
``workers/weights/receive``; both are loaded when they are first needed. A user's own is named by the import path of its
trainer's side, ``module:Class``, which names the worker's; nothing is known of what it needs.
"""

from dataclasses import dataclass

from penstock.system.extras import check_installed


@dataclass(frozen=True, slots=True)
class Transport:
    """A transport that brings announced weights to ready engines; the checkpoint folder is written before or after."""

    #: ``file:Class`` of the trainer's side, ``module:Class`` of a user's; '' where engines load the folder and nothing
    #: is sent.
    sender: str = ""
    #: ``file:Class`` of the worker's side; '' of a user's, whose sender names it.
    receiver: str = ""
    #: Trainer and engines have GPUs.
    needs_gpu: bool = False
    #: Engines are on the trainer's own GPU, that of rank 0, and nowhere else.
    on_trainers_gpu: bool = False
    #: It has parameter servers on the GPUs of ``trainer.parameter_server_gpus``; None is the trainer's own.
    has_parameter_servers: bool = False
    #: Package that the trainer's side needs beside its own, as it is imported; '': none.
    package: str = ""

    @property
    def is_sent(self) -> bool:
        """Whether weights are sent to workers that are ready, so that they enroll."""
        return bool(self.sender)

    def check_package(self, name: str) -> None:
        """Raise ConfigError where the package of this transport, which is called ``name``, is not installed here."""
        if self.package:
            check_installed(self.package, f"trainer.transport {name}")


#: penstock's own, by name.
TRANSPORTS = {
    "disk": Transport(),
    # Nothing is sent: engines load a copy on their machine, which the worker made (workers/weights/local_copies.py).
    "delta": Transport(),
    "nccl": Transport("collective:Nccl", "collective:Collective", needs_gpu=True),
    "gloo": Transport("collective:Gloo", "collective:Collective"),
    "cuda_ipc": Transport("ipc:CudaIpc", "ipc:CudaIpc", needs_gpu=True, on_trainers_gpu=True),
    "checkpoint_engine": Transport(
        "checkpoint_engine:CheckpointEngine",
        "checkpoint_engine:CheckpointEngine",
        needs_gpu=True,
        has_parameter_servers=True,
        # The engines' environment needs it too, in the same release.
        package="checkpoint_engine",
    ),
}


def transport(name: str) -> Transport:
    """Return the transport named in ``trainer.transport``."""
    return TRANSPORTS.get(name) or Transport(name)
