"""Rank 1 of two that publish shards, as often as it is told: says ``published N`` or ``failed WHY`` each time.

python -m tests.integration.shards_rank CONFIG.json STORE TIMES
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.sources import Shards, concatenated
from penstock.errors import PenstockError
from tests.integration.parts import PATIENCE_S


def meet(store: str, rank: int) -> None:
    """Make the process group of the two ranks; blocks for the other one."""
    limit = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)


def shards(rank: int) -> Shards:
    return Shards({"weight": torch.full((1,), float(rank))}, concatenated({"weight": 0}))


def main(path: str, store: str, times: str) -> None:
    meet(store, 1)
    config = Config.model_validate(json.loads(Path(path).read_text()))
    with Trainer(config, dp_rank=1, dp_size=2) as trainer:
        for _ in range(int(times)):
            try:
                print("published", trainer.publish(shards(1)), flush=True)
            except PenstockError as exc:
                print("failed", exc, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads have been seen to abort the interpreter's own end
