"""One rank of a trainer as a process: ``python -m ... CONFIG.json RANK JOB``; trains batches until it is refused.

Says ``joined``, then ``got N`` and ``done N`` for every batch, and ``refused REASON`` at its end.
"""

import json
import sys
from pathlib import Path

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import OwnershipLost
from tests.integration.parts import publish


def main() -> None:
    path, rank, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = Config.model_validate(json.loads(Path(path).read_text()))
    with Trainer(config, dp_rank=rank, dp_size=2, job=job) as trainer:
        print("joined", flush=True)
        if rank == 0:
            trainer.load_state_dict({"run": config.run, "subscription": "actor", "batch": 0})
            publish(trainer)
        try:
            while True:
                batch = trainer.next(timeout=120)
                print(f"got {batch.n}", flush=True)
                sys.stdin.readline()  # a step, as long as the test wants it to be
                trainer.commit(batch)
                print(f"done {batch.n}", flush=True)
        except OwnershipLost as exc:
            print(f"refused {exc}", flush=True)


if __name__ == "__main__":
    main()
