"""Interface of a transport on the trainer's side, and lookup of its class by name."""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from penstock.config import TrainerConfig
from penstock.config.transport import TRANSPORTS, transport
from penstock.errors import ConfigError
from penstock.system.user_code import find

if TYPE_CHECKING:
    import torch

    from penstock.consumers.weights.copies import Copy
    from penstock.consumers.weights.transfer import Transfer
    from penstock.records.publication import Publication


def trainers_device(config: TrainerConfig) -> "torch.device":
    """Return ``trainer.device``; for "cuda" the current one, because each rank has its own."""
    import torch

    is_present = config.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_present else torch.device(config.device)


class Sender(ABC):
    """Send weights to ready engines. Every rank of the trainer has one for its lifetime; rank 0 uses it.

    A version is announced before :meth:`send` is called, and its folder exists or is written later, so an error costs
    only time: waiting workers are notified and load the folder.
    """

    #: True: the folder is complete before ``begin``, and named in ``publication.path``, regardless of
    #: ``trainer.folder_first``.
    needs_folder: bool = False

    #: ``module:Class`` of the worker's side of a user's own transport.
    receiver: ClassVar[str] = ""

    def __init__(self, config: "TrainerConfig") -> None:
        self.config = config

    @classmethod  # noqa: B027
    def set_up(cls) -> None:
        """Configure each process of the trainer before it creates a process group."""

    def begin(self, publication: "Publication") -> None:  # noqa: B027
        """Prepare a version that is about to be announced, without any worker; return at once.

        Errors abort ``Trainer.publish``: the version is not announced.
        """

    def begin_copy(self, publication: "Publication", copy: "Copy") -> None:
        """Prepare, instead of :meth:`begin`, a version that is sent first, with its weights in ``copy``."""
        self.begin(publication)

    def leave_copies(self) -> None:  # noqa: B027
        """Wait until no process reads the copies, whose memory is about to be reused. Blocks."""

    @abstractmethod
    def send(self, transfer: "Transfer") -> None:
        """Send to ``transfer.workers``, at least one: decide on the recipients, then send. Blocks.

        Raises:
            TransferFailed, or anything else: recipients that were not notified of the end load the folder.
        """

    def abandon(self) -> None:  # noqa: B027
        """Discard a failed transfer, so that no process waits in it and the next one starts anew.

        Errors are logged.
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
