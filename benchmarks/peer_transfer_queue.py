"""TransferQueue under the load of ``benchmarks.trajectory_path``; runs in ``.bench`` and imports nothing of penstock.

Writers, which parse an engine's JSON answers, and one reader, each an actor process of its own, as TransferQueue's own
performance test has them. The native client is used, not the key-value interface: it is the one that tracks consumption
(``put``, ``get_meta``, ``get_data``, ``clear_samples``), so the reader does what the reader of a queue does, deletion
included. The storage is SimpleStorage, the default, in memory. ``polling_mode`` is on: without it a reader that comes
early puts the controller to sleep for whole seconds.

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

import numpy as np
import ray
import torch
import transfer_queue as tq
from answers import Answers, tag_of  # type: ignore[import-not-found]
from omegaconf import OmegaConf
from tensordict import TensorDict

FIELDS = ["input_ids", "logprobs", "mask", "versions"]
TASK = "train"

#: Wait of the reader when nothing is ready.
POLL_S = 0.002


def make_batch(answers: Answers, tags: range) -> TensorDict:
    """Parse answers into a batch of samples: [B, L] ids, logprobs and mask, [B, 1, 3] spans of versions."""
    parsed = [answers.parse(answers.body(tag)) for tag in tags]
    columns = {name: torch.from_numpy(np.stack([one[name] for one in parsed])) for name in parsed[0]}
    return TensorDict({"input_ids": columns.pop("ids"), **columns}, batch_size=len(tags))


class Client:
    """One end of the queue, in a process of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        tq.init(OmegaConf.create(config))
        self.client = tq.get_client()

    def write(self, partition: str, batch: int, tokens: int, samples: range, start_s: float) -> float:
        """Put these samples, ``batch`` at a time, from ``start_s`` (monotonic seconds); returns when it began."""
        answers = Answers(tokens)
        time.sleep(max(0.0, start_s - time.monotonic()))
        began_s = time.monotonic()
        for first in range(samples.start, samples.stop, batch):
            data = make_batch(answers, range(first, min(first + batch, samples.stop)))
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
            seen.extend(int(tag_of(row)) for row in ids)
            self.client.clear_samples(meta)
        return time.monotonic(), seen


@contextlib.contextmanager
def cluster(storage_units: int, writers: int) -> Iterator[tuple[list[Any], Any]]:
    """A Ray of our own with the controller, the storage units, writers and a reader."""
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
        yield [actor.remote(config) for _ in range(writers)], actor.remote(config)
    finally:
        tq.close()
        ray.shutdown()


def measure(writers: list[Any], reader: Any, name: str, batch: int, tokens: int, count: int) -> dict[str, float]:
    """Samples per second from the first answer to the last sample decoded; refuses a lost or doubled sample."""
    reading, share = reader.read.remote(name, batch, count), count // len(writers)
    writing = [
        one.write.remote(name, batch, tokens, range(i * share, (i + 1) * share), time.monotonic() + 0.2)
        for i, one in enumerate(writers)
    ]
    began, (ended_s, seen) = ray.get(writing), ray.get(reading)
    began_s = min(began)
    if sorted(seen) != list(range(count)):
        sys.exit(f"TransferQueue gave back {len(set(seen))} of {count} samples at batch {batch}; the figure is void.")
    return {"batch": batch, "samples": count, "samples_per_s": count / (ended_s - began_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2560)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--storage-units", type=int, default=2)
    parser.add_argument("--leg", action="append", default=[], metavar="BATCH:SAMPLES", help="repeatable")
    args = parser.parse_args()
    legs = [tuple(map(int, leg.split(":"))) for leg in args.leg or ["8:2048", "64:8192"]]
    rows = []
    with cluster(args.storage_units, args.writers) as (writers, reader):
        for batch, count in legs:
            measure(writers, reader, f"warm-{batch}", batch, args.tokens, 4 * batch)
            rows.append(measure(writers, reader, f"run-{batch}", batch, args.tokens, count))
    versions = {"TransferQueue": tq.__version__, "ray": ray.__version__, "torch_of_peers": torch.__version__}
    print(json.dumps({"versions": versions, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
