"""One trainer process of test_several: ``python -m ... SETTINGS.json``. Its checkpoints say what its weights have seen.

What is trained is a list of jobs; a checkpoint (a file, renamed into place) holds it with ``Trainer.state_dict``. Exit
code 3: the subscription was rewound or taken over, restore and start again.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import Config
from penstock.consumers.trainer import Trainer
from penstock.errors import OwnershipLost, RolesApart, WaitTimeout

AGAIN = 3


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(batch, file), newest first."""
    return sorted(((int(path.stem), path) for path in folder.glob("*.json")), reverse=True)


def save(folder: Path, state: dict[str, Any], jobs: list[str]) -> None:
    path = folder / f"{state['batch']}.json"
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps({"state": state, "jobs": jobs}))
    temporary.replace(path)
    for n, later in checkpoints(folder):
        if n > state["batch"]:
            later.unlink()  # of a future that was given up


def restore(trainer: Trainer, folder: Path, at_most: int | None) -> list[str]:
    """What the weights have seen at the newest checkpoint, or at the newest that another role allows."""
    found = [(n, path) for n, path in checkpoints(folder) if at_most is None or n <= at_most]
    if not found:
        trainer.load_state_dict({"run": trainer.config.run, "subscription": trainer.name, "batch": 0})
        return []
    kept: dict[str, Any] = json.loads(found[0][1].read_text())
    trainer.load_state_dict(kept["state"])
    return list(kept["jobs"])


def values(batch: Any, of: str) -> Any:
    """[B, L] numbers that name column and sample."""
    data = batch.arrays()
    inside = np.arange(data["tokens"].shape[1]) < data["lengths"][:, None]
    return np.where(inside, 1000 * batch.n + data["rows"][:, None] + (0.5 if of == "returns" else 0.0), 0)


def exchange(role: str, batch: Any) -> None:
    """The critic's values reach the actor, and the actor's returns the critic, for the samples that they are of."""
    if role == "critic":
        batch.put("values", values(batch, "values"))
        np.testing.assert_array_equal(batch.get("returns"), values(batch, "returns"))
    elif role == "actor":
        np.testing.assert_array_equal(batch.get("values"), values(batch, "values"))
        batch.put("returns", values(batch, "returns"))


def train(trainer: Trainer, settings: dict[str, Any], folder: Path) -> None:
    publishes = trainer.drives and trainer.seat.drives
    at_most: int | None = None
    jobs = restore(trainer, folder, at_most)
    if publishes:
        import torch

        trainer.publish({"weight": torch.zeros(1)})
    while not Path(settings["stop"]).exists():
        try:
            batch = trainer.next(timeout=0.3)
        except WaitTimeout:
            continue
        except RolesApart as exc:
            at_most = exc.batch
            print(f"went back to batch {at_most}", file=sys.stderr, flush=True)
            jobs = restore(trainer, folder, at_most)
            continue
        exchange(settings["role"], batch)
        jobs += dict.fromkeys(row.job for row in batch.all_rows)
        trainer.commit(batch)
        if publishes:
            trainer.tick()
        if batch.n % settings["every"] == 0:
            save(folder, trainer.state_dict(), jobs)
            trainer.checkpointed()
    if jobs:
        save(folder, trainer.state_dict(), jobs)
        trainer.checkpointed()


def main() -> int:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate(settings["config"])
    roles = tuple(settings["roles"])
    try:
        with Trainer(
            config, name=settings["name"], role=settings["role"], roles=roles, subscription=settings["subscription"]
        ) as trainer:
            train(trainer, settings, folder)
    except OwnershipLost as exc:
        print(exc, file=sys.stderr)
        return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
