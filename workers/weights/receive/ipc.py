"""Weights in the trainer's memory, on the engine's own GPU (cuda_ipc)."""

from penstock.redaction import redact
from penstock.system.ports import is_loopback
from penstock.workers.weights.receive.arrival import Arrival
from penstock.workers.weights.receive.inlet import Inlet
from penstock.workers.weights.receive.receiver import Receiver


class CudaIpc(Receiver):
    """The trainer writes to the engine, through an inlet of the worker that is open meanwhile."""

    async def receive(self, arrival: Arrival) -> str:
        if not is_loopback(self.engine.url):
            return await arrival.sent(redact(self.engine.url))  # which the trainer refuses, and says so
        async with Inlet(arrival.post) as inlet:
            return await arrival.sent(inlet.url)
