"""Receive weights from checkpoint-engine's parameter servers, over sockets that the trainer names."""

import re

import orjson

from penstock.errors import ProtocolError
from penstock.workers.weights.receive.arrival import Arrival
from penstock.workers.weights.receive.receiver import Receiver

#: Names of GPUs, and of the sockets of their parameter servers on this machine.
_GPU = re.compile(r"GPU-[\w.:-]{1,100}")
_SOCKET = re.compile(r"ipc://@checkpoint-engine-[\w.:-]{1,200}\.sock")
_MAX_HANDLES = 1024


class CheckpointEngine(Receiver):
    """Make the engine connect to the parameter server on each of its GPUs."""

    async def receive(self, arrival: Arrival) -> str:
        try:
            handles = read_handles(await arrival.told())
        except ProtocolError as exc:
            return str(exc)
        body = {"zmq_handles": handles, "flush_cache": False, "weight_version": str(arrival.publication.version)}
        return await arrival.post("/update_weights_from_ipc", body)


def read_handles(text: str) -> dict[str, str]:
    """Return GPU -> socket of its parameter server, as written by a trainer.

    The engine unpickles what these sockets send: only checkpoint-engine's own names on this machine are accepted.

    Raises:
        ProtocolError: the text is anything else.
    """
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = None
    if (
        not isinstance(found, dict)
        or not 0 < len(found) <= _MAX_HANDLES
        or not all(_GPU.fullmatch(gpu) and isinstance(at, str) and _SOCKET.fullmatch(at) for gpu, at in found.items())
    ):
        raise ProtocolError(
            f"what should name parameter servers of checkpoint-engine on this machine does not: {text[:200]!r}"
        )
    return found
