"""A transport for tests: buckets become files of a folder beside the weights, which engines load from there."""

import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from penstock.consumers.weights.sender import Sender, Transfer
from penstock.workers.weights.receive.receive import Arrival, Receiver

SENT = "sent-"


class ToFiles(Sender):
    receiver = f"{__name__}:FromFiles"

    def send(self, transfer: Transfer) -> None:
        # Read anew: a process that was forked from another has a TMPDIR of its own.
        folder = Path(tempfile.mkdtemp(prefix=SENT, dir=os.environ.get("TMPDIR")))
        try:
            transfer.decide()
            for number, bucket in enumerate(transfer.buckets()):
                save_file(dict(bucket), folder / f"{number}.safetensors")
            for worker in sorted(transfer.await_held()):
                transfer.tell(worker, str(folder))
            transfer.await_received()
        finally:
            shutil.rmtree(folder)


class FromFiles(Receiver):
    async def receive(self, arrival: Arrival) -> str:
        folder = await arrival.told()
        body = {"model_path": folder, "weight_version": str(arrival.publication.version), "flush_cache": False}
        return await arrival.post("/update_weights_from_disk", body)
