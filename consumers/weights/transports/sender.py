"""The trainer's side of a transport, and its class by name."""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import torch

from penstock.config import TrainerConfig
from penstock.config.transport import TRANSPORTS, transport
from penstock.errors import ConfigError
from penstock.system.user_code import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.consumers.weights.copies import Copy
    from penstock.consumers.weights.shared_memory import SharedMemory
    from penstock.consumers.weights.transfer import Transfer
    from penstock.records.publication import Publication


def trainers_device(config: TrainerConfig) -> torch.device:
    """``trainer.device``; of "cuda" the present one, because each rank has its own."""
    is_present = config.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_present else torch.device(config.device)


class Sender(ABC):
    """Hands weights to engines that are ready. Every rank of the trainer has one as long as it lives; rank 0 uses it.

    A version is announced before :meth:`send` is called, and its folder is complete by then or written behind it, so
    whatever it raises costs time and never a version: workers that wait learn why, and load the folder.
    """

    #: True: the folder is complete before ``begin``, and named in ``publication.path``, whatever
    #: ``trainer.folder_first`` says.
    needs_folder: bool = False

    #: What the trainer makes its two copies in of versions that are sent first; (): memory of its own.
    memories: "Sequence[SharedMemory]" = ()

    #: The worker's side, ``module:Class``, of one that is not penstock's own.
    receiver: ClassVar[str] = ""

    def __init__(self, config: "TrainerConfig") -> None:
        self.config = config

    @classmethod  # noqa: B027
    def set_up(cls) -> None:
        """Set what must be set in each process of the trainer before it makes a process group."""

    def begin(self, publication: "Publication") -> None:  # noqa: B027
        """Prepare a version that is about to be announced, as far as that needs no worker; return at once.

        What it raises ends ``Trainer.publish``: the version is not announced.
        """

    def begin_copy(self, publication: "Publication", copy: "Copy") -> None:
        """Prepare, instead of :meth:`begin`, a version that is sent first: its weights are in ``copy``."""
        self.begin(publication)

    def leave_copies(self) -> None:  # noqa: B027
        """Wait until no process reads the copies, whose memory is about to be reused. Blocks."""

    @abstractmethod
    def send(self, transfer: "Transfer") -> None:
        """Send to ``transfer.workers``, of which there is at least one: decide who receives, then send. Blocks.

        Raises:
            TransferFailed, or anything else: workers of the decision that do not know how it ended load the folder.
        """

    def abandon(self) -> None:  # noqa: B027
        """Discard a failed transfer, so that no process waits in it and the next one starts anew.

        What it raises is logged.
        """

    def close(self) -> None:
        """Close at the trainer's end. Errors are logged."""
        self.abandon()


def sender_of(name: str) -> type[Sender] | None:
    """Return the class of ``trainer.transport``; None if nothing is sent. Imports its module; raises ConfigError."""
    path = transport(name).sender
    if name in TRANSPORTS:
        module, _, attribute = path.partition(":")
        return getattr(import_module(f"penstock.consumers.weights.transports.{module}"), attribute) if path else None
    found = find(path, "trainer.transport")
    if not (isinstance(found, type) and issubclass(found, Sender)):
        raise ConfigError(f"trainer.transport {name} is not a sender: derive its class from penstock.Sender.")
    return found
