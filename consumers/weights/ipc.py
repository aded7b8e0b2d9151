"""Send handles of the trainer's memory to engines on its own GPU (SGLang's /update_weights_from_tensor).

SGLang unpickles the handles, so they go to the engine only over loopback, through its worker's inlet
(workers/weights/receive/ipc.py): nothing pickled is stored in Redis, and nothing is unpickled here.
"""

import base64
import io
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from penstock.consumers.weights.sender import Sender, Transfer, trainers_device
from penstock.errors import EngineError
from penstock.protocol.engine_http import fetch
from penstock.system.processes import is_loopback

log = logging.getLogger(__name__)

#: Position of the device's index in torch's arguments to rebuild a CUDA tensor.
_DEVICE_INDEX = 6
#: Sent to workers that were not ready in time; otherwise they would wait for twice the transfer's timeout.
_LATE = "it did not freeze its engine in time"


class CudaIpc(Sender):
    """Send handles of each bucket to every engine, through the inlet of its worker, while the engine is frozen."""

    def send(self, transfer: Transfer) -> None:
        transfer.decide()
        engines = {name: (url, transfer.workers[name].num_ranks) for name, url in transfer.await_held().items()}
        failed = dict.fromkeys(sorted(transfer.workers.keys() - engines.keys()), _LATE)
        buckets, device = transfer.buckets(), trainers_device(self.config)
        bucket = next(buckets, None)
        while True:
            for worker, why in failed.items():
                log.warning("worker %s loads this version from its folder: %s", worker, why)
                transfer.end(worker, why)
                engines.pop(worker, None)
            if bucket is None:
                break
            following = next(buckets, None)
            version = str(transfer.publication.version) if following is None else None
            here = [(name, tensor.to(device)) for name, tensor in bucket]
            failed, bucket = send(here, engines, version, transfer.timeout_s), following
        for worker in engines:
            transfer.end(worker)


class _Pickler(ForkingPickler):
    """Identify GPUs by UUID, as the engine may number them differently; SGLang resolves the UUID."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_INDEX]).uuid)
        return rebuild, (*arguments[:_DEVICE_INDEX], uuid, *arguments[_DEVICE_INDEX + 1 :])


def handles(bucket: Sequence[tuple[str, Tensor]]) -> str:
    """Return handles, as text, with which an engine maps these CUDA tensors into its own memory."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump([(name, tensor.detach().contiguous()) for name, tensor in bucket])
    return base64.b64encode(buffer.getvalue()).decode()


def send(
    bucket: Sequence[tuple[str, Tensor]], engines: dict[str, tuple[str, int]], version: str | None, timeout_s: float
) -> dict[str, str]:
    """Make engines copy a bucket; the tensors must not change until this returns. Blocks at most ``timeout_s``.

    Args:
        engines: worker -> address of its inlet, and number of processes of its engine with weights.
        version: sent with the last bucket of a version.

    Returns:
        Workers that failed, and why.
    """
    kept = [(name, tensor.detach().contiguous()) for name, tensor in bucket]
    torch.cuda.current_stream().synchronize()
    with ThreadPoolExecutor(max(1, len(engines))) as pool:
        jobs = {}
        for worker, (url, num_ranks) in engines.items():
            # Each process needs its own handles, because torch counts references to the memory.
            body: dict[str, Any] = {
                "serialized_named_tensors": [handles(kept) for _ in range(num_ranks)],
                "flush_cache": False,
            }
            if version is not None:
                body["weight_version"] = version
            jobs[worker] = pool.submit(_post, url, body, timeout_s)
    return {worker: why for worker, job in jobs.items() if (why := job.result())}


def _post(url: str, body: dict[str, Any], timeout_s: float) -> str:
    """Send a bucket to an engine on this machine; return '' or the error."""
    if not is_loopback(url):
        return f"{url} is not on this machine, and memory cannot be shared with another"
    try:
        fetch(url + "/update_weights_from_tensor", json.dumps(body).encode(), timeout_s=timeout_s)
    except EngineError as exc:
        # The full address is a secret that permits writes.
        return str(exc).replace(url, url.rpartition("/")[0])
    return ""
