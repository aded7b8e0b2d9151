"""Send handles of the trainer's memory to engines on its own GPU (SGLang's /update_weights_from_tensor).

SGLang unpickles the handles, so they go to the engine only over loopback, through its worker's inlet
(workers/weights/receive/ipc.py): nothing pickled is stored in Redis, and nothing is unpickled here.
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

from penstock.consumers.weights.sender import Bucket, Sender, Transfer, TransferFailed, trainers_device
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
        held = transfer.await_held()
        for worker in sorted(transfer.workers.keys() - held):
            log.warning("worker %s loads this version from its folder: %s", worker, _LATE)
            transfer.end(worker, _LATE)
        engines = {name: (url, transfer.workers[name].num_ranks) for name, url in held.items()}
        version = str(transfer.publication.version)
        for bucket, is_last in _marked(transfer.buckets()):
            failed = self._give(bucket, engines, version if is_last else None, transfer.timeout_s)
            for worker, why in failed.items():
                log.warning("worker %s loads this version from its folder: %s", worker, why)
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
    """Yield each bucket, and whether it is the last."""
    bucket = next(buckets, None)
    while bucket is not None:
        following = next(buckets, None)
        yield bucket, following is None
        bucket = following


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


def check_local(url: str) -> None:
    """Raise TransferFailed unless ``url`` is an engine on this machine."""
    if not is_loopback(url):
        raise TransferFailed(f"{url} is not on this machine, and memory cannot be shared with another")


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
    failed: dict[str, str] = {}
    jobs: list[tuple[str, Callable[[], None]]] = []
    for worker, (url, num_ranks) in engines.items():
        # Each process needs its own handles, because torch counts references to the memory.
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
            # The full address is a secret that permits writes.
            raise TransferFailed(str(exc).replace(url, url.rpartition("/")[0])) from None

    return post
