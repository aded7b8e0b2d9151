"""Transports by name: penstock's own have both sides, and nothing heavy is loaded before one is needed."""

import subprocess
import sys

import pytest

from penstock.config import Config
from penstock.config.transport import TRANSPORTS
from penstock.consumers.weights.sender import Sender, Transfer, sender_of
from penstock.errors import ConfigError
from penstock.hooks.user_imports import named
from penstock.workers.weights.receive.receive import Receiver, receiver_of


class Own(Sender):
    def send(self, transfer: Transfer) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("name", [name for name, known in TRANSPORTS.items() if known.is_sent])
def test_each_of_penstocks_own_has_a_sender_and_a_receiver(name: str) -> None:
    sender = sender_of(name)
    assert sender is not None
    assert issubclass(sender, Sender)
    assert issubclass(receiver_of(name), Receiver)


def test_by_disk_nothing_is_sent() -> None:
    assert sender_of("disk") is None


def test_a_senders_class_is_found_by_its_import_path() -> None:
    assert sender_of(f"{__name__}:Own") is Own


@pytest.mark.parametrize("name", ["json:loads", "pathlib:Path"])
def test_what_is_no_sender_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a sender: derive its class from penstock"):
        sender_of(name)


@pytest.mark.parametrize("module", ["penstock.consumers.weights.sender", "penstock.workers.weights.receive.receive"])
def test_looking_one_up_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_a_transport_is_named_as_written_and_imported_before_a_start() -> None:
    values = {"run": "x", "model": {"path": "m"}, "data": {"train": [{"name": "d", "path": "d.jsonl"}]}}
    config = Config.model_validate(values | {"trainer": {"transport": "mine:Way"}})
    assert named(config) == [("trainer.transport", "mine:Way")]
    with pytest.raises(ValueError, match="unknown transport 'ncll': did you mean nccl"):
        Config.model_validate(values | {"trainer": {"transport": "ncll"}})
