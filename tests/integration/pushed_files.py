"""cuda_ipc for tests without a GPU: what the trainer posts through a worker's inlet names files, not handles."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

from safetensors.torch import save_file

from penstock.consumers.weights import ipc
from penstock.consumers.weights.ipc import CudaIpc
from penstock.consumers.weights.sender import Transfer
from penstock.consumers.weights.sources import Bucket
from penstock.errors import EngineError
from penstock.protocol.engine_http import fetch

PUSHED = "pushed-"


class Push(CudaIpc):
    receiver = "penstock.workers.weights.receive.ipc:CudaIpc"

    def send(self, transfer: Transfer) -> None:
        with patch.object(ipc, "send", push):
            super().send(transfer)


def push(bucket: Bucket, engines: dict[str, tuple[str, int]], version: str | None, timeout_s: float) -> dict[str, str]:
    assert version is not None, "these models are one bucket"
    folder, failed = Path(tempfile.mkdtemp(prefix=PUSHED, dir=os.environ.get("TMPDIR"))), {}
    save_file(dict(bucket), folder / "all.safetensors")
    body = json.dumps({"model_path": str(folder), "weight_version": version}).encode()
    for worker, (url, _) in engines.items():
        try:
            fetch(f"{url}/update_weights_from_tensor", body, timeout_s=timeout_s)
        except EngineError as exc:
            failed[worker] = str(exc)
    shutil.rmtree(folder)
    return failed
