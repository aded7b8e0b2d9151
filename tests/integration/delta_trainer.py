"""A trainer that publishes other weights for each line that it reads: ``python -m ... SETTINGS.yaml WEIGHTS STATE``."""

import json
import sys
from pathlib import Path

import safetensors.torch
import torch
import yaml

from penstock.config import Config
from penstock.consumers.trainer import Trainer


def main() -> None:
    config = Config.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
    weights, kept = safetensors.torch.load_file(sys.argv[2]), Path(sys.argv[3])
    with Trainer(config) as trainer:
        start = {"run": config.run, "subscription": trainer.name, "batch": 0}
        trainer.load_state_dict(json.loads(kept.read_text()) if kept.exists() else start)
        for line, _ in enumerate(sys.stdin):
            if line:
                trainer.commit(trainer.next(timeout=240))
            # All of them change, so that a delta is of many ranges.
            made = {name: torch.randn_like(one) for name, one in weights.items()}
            version = trainer.publish(made, step=line)
            kept.with_suffix(".writing").write_text(json.dumps(trainer.state_dict()))
            kept.with_suffix(".writing").replace(kept)
            trainer.checkpointed()
            print(version, flush=True)


if __name__ == "__main__":
    main()
