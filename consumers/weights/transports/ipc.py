"""Weights to engines on the trainer's own GPU: handles of its memory, not bytes (SGLang's /update_weights_from_tensor).

SGLang reads the handles with a pickle of its own kind, so they go to the engine over loopback, through its worker's
inlet (workers/weights/receive/ipc.py), and nowhere else: nothing pickled stands in Redis, and nothing is unpickled
here.
"""

import base64
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from penstock.consumers.weights.transfer import Bucket, Transfer, TransferFailed
from penstock.consumers.weights.transports.sender import Sender, trainers_device
from penstock.errors import EngineError
from penstock.protocol.engine_http import fetch
from penstock.system.processes import is_loopback

log = logging.getLogger(__name__)

#: Place of the device's index in what torch needs to rebuild a CUDA tensor.
_DEVICE_INDEX = 6
#: What a worker is told that was not ready to be written to; it would wait for twice the transfer's time otherwise.
_LATE = "it did not hold its engine still in time"


class CudaIpc(Sender):
    """Handles of each bucket to every engine, through the inlet that its worker has open while it holds it still."""

    def send(self, transfer: Transfer) -> None:
        transfer.decide()
        held = transfer.await_held()
        for worker in sorted(transfer.workers.keys() - held):
            log.warning("worker %s takes this version from the disk: %s", worker, _LATE)
            transfer.end(worker, _LATE)
        engines = {name: (url, transfer.workers[name].num_ranks) for name, url in held.items()}
        version = str(transfer.publication.version)
        for bucket, is_last in _marked(transfer.buckets()):
            failed = self._give(bucket, engines, version if is_last else None, transfer.timeout_s)
            for worker, why in failed.items():
                log.warning("worker %s takes this version from the disk: %s", worker, why)
                transfer.end(worker, why)
                del engines[worker]
        for worker in engines:
            transfer.end(worker)

    def _give(
        self, bucket: Bucket, engines: dict[str, tuple[str, int]], version: str | None, timeout_s: float
    ) -> dict[str, str]:
        device = trainers_device(self.config)
        return send([(name, tensor.to(device)) for name, tensor in bucket], engines, version, timeout_s)


def _marked(buckets: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Each bucket, and whether it is the last."""
    bucket = next(buckets, None)
    while bucket is not None:
        following = next(buckets, None)
        yield bucket, following is None
        bucket = following


class _Pickler(ForkingPickler):
    """Names GPUs by UUID: the engine may count them otherwise. Its side looks the UUID up."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_INDEX]).uuid)
        return rebuild, (*arguments[:_DEVICE_INDEX], uuid, *arguments[_DEVICE_INDEX + 1 :])


def handles(bucket: Sequence[tuple[str, Tensor]]) -> str:
    """Return the handles with which an engine maps these CUDA tensors into its own memory, as text."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump([(name, tensor.detach().contiguous()) for name, tensor in bucket])
    return base64.b64encode(buffer.getvalue()).decode()


def check_local(url: str) -> None:
    """Raise TransferFailed unless ``url`` is an engine on this machine."""
    if not is_loopback(url):
        raise TransferFailed(f"{url} is not on this machine, and memory cannot be shared with another")


def send(
    bucket: Sequence[tuple[str, Tensor]], engines: dict[str, tuple[str, int]], version: str | None, timeout_s: float
) -> dict[str, str]:
    """Have engines copy a bucket; the tensors must stay until this returns. Blocks at most ``timeout_s``.

    Args:
        engines: worker -> address of its inlet, and number of processes of its engine that hold weights.
        version: sent with the last bucket of a version.

    Returns:
        Workers that failed, and why.
    """
    kept = [(name, tensor.detach().contiguous()) for name, tensor in bucket]
    torch.cuda.current_stream().synchronize()
    failed: dict[str, str] = {}
    jobs: list[tuple[str, Callable[[], None]]] = []
    for worker, (url, num_ranks) in engines.items():
        # Each process takes handles of its own: torch counts who holds the memory.
        body: dict[str, Any] = {
            "serialized_named_tensors": [handles(kept) for _ in range(num_ranks)],
            "flush_cache": False,
        }
        if version is not None:
            body["weight_version"] = version
        jobs.append((worker, _posting(url, body, timeout_s)))
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        for worker, future in [(worker, pool.submit(job)) for worker, job in jobs]:
            try:
                future.result()
            except TransferFailed as exc:
                failed[worker] = str(exc)
    return failed


def _posting(url: str, body: dict[str, Any], timeout_s: float) -> Callable[[], None]:
    def post() -> None:
        check_local(url)
        try:
            fetch(url + "/update_weights_from_tensor", json.dumps(body).encode(), timeout_s=timeout_s)
        except EngineError as exc:
            # Whoever knows the whole address may write.
            raise TransferFailed(str(exc).replace(url, url.rpartition("/")[0])) from None

    return post
