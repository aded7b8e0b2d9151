"""Interface of a transport on the worker's side, and lookup of its class by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.config.transport import TRANSPORTS
from penstock.errors import ConfigError
from penstock.system.user_code import find
from penstock.workers.engine import Engine

if TYPE_CHECKING:
    from penstock.workers.weights.receive.arrival import Arrival


class Receiver(ABC):
    """Receive weights into a worker's engine. It lives as long as the worker; its calls do not overlap.

    Args:
        birth: counts the engine's starts: a new engine has nothing of the previous one's weights.
    """

    def __init__(self, engine: Engine, birth: Callable[[], int]) -> None:
        self.engine = engine
        self.birth = birth

    @property
    def standing(self) -> str:
        """Return the state of this engine that the sender needs for its decision: ``Enrollment.group``."""
        return ""

    async def prepare(self, arrival: "Arrival") -> None:  # noqa: B027
        """Prepare for a transfer this worker takes part in; its engine still generates. Raises PublishError."""

    @abstractmethod
    async def receive(self, arrival: "Arrival") -> str:
        """Receive the weights into the engine, which is frozen: no token is generated until this returns.

        Returns:
            '' when the engine has them, else why not: it then loads the folder.

        Raises:
            EngineDied: the engine does not answer; its successor loads the folder. Other exceptions count as reasons.
        """


def receiver_of(name: str) -> type[Receiver]:
    """Return the class of a built-in transport that sends weights. Imports its module."""
    module, _, attribute = TRANSPORTS[name].receiver.partition(":")
    found: type[Receiver] = getattr(import_module(f"penstock.workers.weights.receive.{module}"), attribute)
    return found


def users_receiver(name: str) -> type[Receiver]:
    """Return the class that a user's sender ``module:Class`` names. Imports both modules; raises ConfigError."""
    named: Any = getattr(find(name, "trainer.transport"), "receiver", None)
    if not isinstance(named, str) or not named:
        raise ConfigError(f"trainer.transport {name} names no receiver: write receiver = 'module:Class' in its class.")
    found = find(named, f"The receiver of trainer.transport {name},")
    if not (isinstance(found, type) and issubclass(found, Receiver)):
        raise ConfigError(f"the receiver {named} is not a receiver: derive its class from penstock.Receiver.")
    return found
