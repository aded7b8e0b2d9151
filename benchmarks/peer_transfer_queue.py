"""TransferQueue under the load of ``benchmarks.trajectory_path``; runs in ``.bench`` and imports nothing of penstock.

One writer and one reader, each an actor process of its own, as TransferQueue's own performance test has them. The
native client is used, not the key-value interface: it is the one that tracks consumption (``put``, ``get_meta``,
``get_data``, ``clear_samples``), so the reader does what the reader of a queue does, deletion included. The storage is
SimpleStorage, the default, in memory. ``polling_mode`` is on: without it a reader that comes early puts the controller
to sleep for whole seconds.

Prints one line of JSON: ``{"versions": {...}, "rows": [{"batch": 8, "samples_per_s": ...}, ...]}``.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TQ_NUM_THREADS", "1")
os.environ.setdefault("TQ_CLIENT_ZMQ_IO_THREADS", "1")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

FIELDS = ["input_ids", "logprobs", "mask", "versions"]
TASK = "train"

#: Wait of the reader when nothing is ready.
POLL_S = 0.002


def make_batch(batch: int, tokens: int) -> TensorDict:
    """``batch`` samples of ``tokens`` tokens: [B, L] ids, logprobs and mask, [B, 3] one span of versions."""
    ids = torch.randint(0, 32000, (batch, tokens), dtype=torch.int32)
    logprobs = -torch.rand(batch, tokens)
    mask = torch.ones(batch, tokens, dtype=torch.uint8)
    versions = torch.tensor([[1, 0, tokens]] * batch, dtype=torch.int32)
    return TensorDict(dict(zip(FIELDS, (ids, logprobs, mask, versions), strict=True)), batch_size=batch)


class Client:
    """One end of the queue, in a process of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        tq.init(OmegaConf.create(config))
        self.client = tq.get_client()

    def write(self, partition: str, batch: int, tokens: int, count: int, start_s: float) -> float:
        """Put ``count`` samples, ``batch`` at a time, from ``start_s`` (monotonic seconds); returns when it began."""
        data = make_batch(batch, tokens)
        ids = data["input_ids"]
        time.sleep(max(0.0, start_s - time.monotonic()))
        began_s = time.monotonic()
        for first in range(0, count, batch):
            ids[:, 0] = torch.arange(first, first + batch, dtype=torch.int32)
            self.client.put(data=data, partition_id=partition)
        return began_s

    def read(self, partition: str, batch: int, count: int) -> tuple[float, list[int]]:
        """Take ``count`` samples, ``batch`` at a time; returns when the last was there, and which ones came."""
        seen: list[int] = []
        while len(seen) < count:
            meta = self.client.get_meta(
                data_fields=FIELDS, batch_size=batch, partition_id=partition, mode="fetch", task_name=TASK
            )
            if meta.size == 0:
                time.sleep(POLL_S)
                continue
            data = self.client.get_data(meta)
            ids = data["input_ids"]
            seen.extend(int(row[0]) for row in ids)
            self.client.clear_samples(meta)
        return time.monotonic(), seen


@contextlib.contextmanager
def cluster(storage_units: int) -> Iterator[tuple[Any, Any]]:
    """A Ray of our own with the controller, the storage units, a writer and a reader."""
    config = {
        "controller": {"polling_mode": True},
        "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": storage_units}},
    }
    ray.init(
        num_cpus=8, include_dashboard=False, object_store_memory=100 * 1024 * 1024, log_to_driver=False,
        logging_level=logging.ERROR, configure_logging=False,
    )  # fmt: skip
    try:
        tq.init(OmegaConf.create(config))
        actor = ray.remote(Client).options(num_cpus=1)
        yield actor.remote(config), actor.remote(config)
    finally:
        tq.close()
        ray.shutdown()


def measure(writer: Any, reader: Any, name: str, batch: int, tokens: int, count: int) -> dict[str, float]:
    """Samples per second from the first put to the last sample decoded; refuses a lost or doubled sample."""
    reading = reader.read.remote(name, batch, count)
    writing = writer.write.remote(name, batch, tokens, count, time.monotonic() + 0.2)
    began_s, (ended_s, seen) = ray.get([writing, reading])
    if sorted(seen) != list(range(count)):
        sys.exit(f"TransferQueue gave back {len(set(seen))} of {count} samples at batch {batch}; the figure is void.")
    return {"batch": batch, "samples": count, "samples_per_s": count / (ended_s - began_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2560)
    parser.add_argument("--storage-units", type=int, default=2)
    parser.add_argument("--leg", action="append", default=[], metavar="BATCH:SAMPLES", help="repeatable")
    args = parser.parse_args()
    legs = [tuple(map(int, leg.split(":"))) for leg in args.leg or ["1:256", "8:1024", "64:4096"]]
    rows = []
    with cluster(args.storage_units) as (writer, reader):
        for batch, count in legs:
            measure(writer, reader, f"warm-{batch}", batch, args.tokens, 4 * batch)
            rows.append(measure(writer, reader, f"run-{batch}", batch, args.tokens, count))
    versions = {"TransferQueue": tq.__version__, "ray": ray.__version__, "torch_of_peers": torch.__version__}
    print(json.dumps({"versions": versions, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
