"""One rank of a trainer whose weights are the batches that it has trained: ``python -m tests.chaos.parts.trainer``.

Works through penstock's public API alone, as a trainer of one's own does: restores the newest checkpoint that fits,
publishes, trains, publishes, and says when a checkpoint is on the disk. What it publishes is a real safetensors file,
whose one tensor is the seed of a law (law.py); what a checkpoint holds can be checked, and is, at every restore. Each
sample that it is handed is noted in the history with its tokens, versions and logprobs.

Exit code 3: the subscription was rewound or taken over; start again. 4: it was handed what cannot be, and says so.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock import Trainer
from penstock.config.subscription import Definition
from penstock.errors import DataEnded, OwnershipLost, RolesApart, WaitTimeout
from tests.chaos.parts import law
from tests.chaos.recording.recorder import Recorder

if TYPE_CHECKING:
    from penstock import Batch

AGAIN, BROKEN = 3, 4
#: Between two looks at whether it was asked to stop.
LOOK_S = 1.0
#: Checkpoints that are kept.
KEPT = 5
#: Longest wait for a column of the other role, which may be dead.
COLUMN_S = 60.0


class Broken(Exception):
    """What must never be."""


class Rank:
    """One rank at work.

    Args:
        folder: of the checkpoints, shared by all ranks of a role.
        drives: whether it publishes.
        step_s: how long a step takes, in seconds.
    """

    def __init__(self, trainer: Trainer, folder: Path, recorder: Recorder, *, drives: bool, step_s: float) -> None:
        self._trainer = trainer
        self._folder = folder
        self._recorder = recorder
        self._drives = drives
        self._step_s = step_s
        self._every = trainer.config.trainer.checkpoint_every
        #: Digests of the batches that the weights have seen, from the first on.
        self._learned: list[str] = []
        #: The tensors, which are changed in place as a model's are.
        self._weights: dict[str, Any] = {}
        self._stopping = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stopping", True))

    def run(self) -> None:
        """Train until SIGTERM, or the end of the data. Raises OwnershipLost."""
        self._restore(None)
        while not self._stopping:
            try:
                batch = self._trainer.next(timeout=LOOK_S)
            except WaitTimeout:
                continue
            except DataEnded:
                break
            except RolesApart as exc:
                self._restore(exc.batch)
                continue
            self._train(batch)
        self._save()

    def _train(self, batch: "Batch") -> None:
        if self._trainer.dp_size > 1:
            self._trainer.agree(batch, step=batch.n)
        self._tell(batch)
        self._exchange(batch)
        time.sleep(self._step_s)
        self._learned.append(batch.digest)
        self._trainer.commit(batch)
        if self._drives:
            self._publish()
        if batch.n % self._every == 0:
            self._save()

    def _publish(self) -> None:
        seed = law.seed_of(self._learned, self._trainer.version)
        trained = weights_of(Path(self._trainer.config.model.path), seed)
        for name, one in trained.items():
            self._weights.setdefault(name, one).copy_(one)
        self._trainer.publish(self._weights, step=len(self._learned))
        for one in self._weights.values():  # the next step begins: what was published must not change with it
            one.zero_()

    def _tell(self, batch: "Batch") -> None:
        data = batch.arrays()
        seat = self._trainer.seat
        of_batch = {"sub": batch.manifest.sub, "n": batch.n, "digest": batch.digest}
        of_rank = {"role": seat.role, "rank": seat.rank, "counts": dict(data["counts"])}
        self._recorder.note("counts", of_batch | of_rank)
        for at, row in enumerate(data["rows"].tolist()):
            if row < 0:  # a filler
                continue
            length = int(data["lengths"][at])
            sample = batch.all_rows[row]
            named = {"sample": f"{sample.job}/{sample.k}", "tokens": data["tokens"][at, :length].tolist()}
            drawn = {name: data[name][at, :length].tolist() for name in ("versions", "logprobs")}
            advantages = data["advantages"][at, :length][data["generated"][at, :length]]
            scores = {
                "reward": float(data["rewards"][at]),
                "advantage": float(advantages[0]) if len(advantages) else None,
            }
            self._recorder.note("told", named | drawn | of_batch | scores | {"unproven": sample.num_unproven})

    def _exchange(self, batch: "Batch") -> None:
        """Actor and critic hand each other a column, which names what it is of."""
        given = {"critic": ("values", 0.25), "actor": ("returns", 0.5)}.get(self._trainer.seat.role)
        if given is None:
            return
        wanted = ("returns", 0.5) if given[0] == "values" else ("values", 0.25)
        batch.put(given[0], _column(batch, given[1]))
        found = batch.get(wanted[0], timeout=COLUMN_S)
        right = (found == _column(batch, wanted[1])).all(axis=1) | batch.no_value(wanted[0])
        if not right.all():
            raise Broken(f"column {wanted[0]} of batch {batch.n} is not what was written: {found[~right][:1]}")

    def _save(self) -> None:
        """A checkpoint of what was trained, if there is anything new."""
        state = self._trainer.state_dict()
        path = self._folder / f"{state['batch']}.json"
        if self._trainer.dp_rank == 0:
            write(path, {"state": state, "learned": self._learned})
            for _, old in self._checkpoints()[KEPT:]:
                old.unlink(missing_ok=True)
        self._trainer.checkpointed()

    def _restore(self, at_most: int | None) -> None:
        """Go back to the newest checkpoint that fits, and publish it."""
        state: dict[str, Any] = {"run": self._trainer.config.run, "subscription": self._trainer.name, "batch": 0}
        self._learned = []
        for held in self._held(at_most):
            if self._trainer.fits(held["state"]):
                state, self._learned = held["state"], held["learned"]
                break
        if len(self._learned) != state["batch"]:
            raise Broken(f"the checkpoint of batch {state['batch']} holds {len(self._learned)} batches")
        self._trainer.load_state_dict(state)
        if self._drives:
            self._publish()

    def _held(self, at_most: int | None) -> Iterator[dict[str, Any]]:
        for n, path in self._checkpoints():
            if at_most is None or n <= at_most:
                yield json.loads(path.read_text())

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """(batch, file), newest first."""
        return sorted(((int(path.stem), path) for path in self._folder.glob("*.json")), reverse=True)


def weights_of(model: Path, seed: bytes) -> dict[str, Any]:
    """The tensors of a version: the seed itself, or those of a real model with a little noise that follows from it."""
    import torch
    from safetensors.torch import load_file

    first = load_file(model / "model.safetensors")
    if first.keys() == {"law"}:
        return {"law": torch.frombuffer(bytearray(seed), dtype=torch.uint8)}
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
    return {name: one + 0.01 * torch.randn(one.shape, generator=generator) for name, one in first.items()}


def _column(batch: "Batch", of: float) -> Any:
    """[B, L] numbers that say which column, batch and row they are of; 0 on padding."""
    data = batch.arrays()
    inside = np.arange(data["tokens"].shape[1]) < data["lengths"][:, None]
    return np.where(inside & (data["rows"] >= 0)[:, None], 1000 * (batch.n % 100) + data["rows"][:, None] + of, 0)


def write(path: Path, value: Any) -> None:
    """Put a file in its place at once, flushed to the disk."""
    temporary = path.with_suffix(".writing")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def main() -> int:
    settings = read_settings()
    folder = Path(settings.checkpoints)
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(Path(os.environ["CHAOS_HISTORY"]), f"told-{settings.name}")
    roles = tuple(filter(None, settings.roles.split(",")))
    trainer = Trainer(
        settings.config,
        name=settings.name,
        dp_rank=settings.rank,
        dp_size=settings.ranks,
        role=settings.role,
        roles=roles,
        subscription=json.loads(settings.subscription),
        definition=Definition(**definition) if (definition := json.loads(settings.definition)) else None,
        job=settings.job,
    )
    try:
        with trainer:
            Rank(trainer, folder, recorder, drives=settings.drives, step_s=settings.step_s).run()
    except OwnershipLost as exc:
        print(exc, file=sys.stderr)
        return AGAIN
    except Broken as exc:
        print(exc, file=sys.stderr)
        return BROKEN
    return 0


def read_settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.parts.trainer")
    parser.add_argument("--config", required=True)
    parser.add_argument("--name", default="actor", help="the subscription")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--role", default="")
    parser.add_argument("--roles", default="")
    parser.add_argument("--subscription", default="{}", help="fields that differ, as JSON")
    parser.add_argument("--definition", default="{}", help="what it takes, as JSON; else as the configuration has it")
    parser.add_argument("--drives", action="store_true", help="publish weights")
    parser.add_argument("--step-s", type=float, default=0.15, help="how long a step takes")
    parser.add_argument("--checkpoints", required=True, help="their folder")
    parser.add_argument("--job", default=os.environ.get("CHAOS_JOB"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
