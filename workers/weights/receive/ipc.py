"""Weights in the trainer's memory, on the engine's own GPU (cuda_ipc)."""

from workers.weights.receive.arrival import Arrival
from workers.weights.receive.receiver import Receiver


class CudaIpc(Receiver):
    """The trainer writes to the engine; the worker says when, and waits."""

    async def receive(self, arrival: Arrival) -> str:
        return await arrival.sent()
