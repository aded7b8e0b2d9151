"""One of five trainers of one run: ``python train.py actor|critic|judge|left|right [--a.b=c ...]``.

actor        PPO on the advantages reward - value; publishes the policy
critic       trains the same batches as the actor: gives it the value of every token, and learns from the rewards
judge        sees every group beside them: a reward model that learns to tell right answers from wrong ones
left, right  divide the groups between them: two students, each imitating the right answers of its share

Kill any of them at any moment and start it again: it goes on from its last checkpoint.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging

from penstock import Batch, Trainer
from penstock.config import Config
from penstock.config.load import load_config
from penstock.consumers.grpo import checkpoint, losses
from penstock.errors import OwnershipLost, RolesApart, WaitTimeout
from penstock.redis.await_redis import await_redis

ROLES = ("actor", "critic")
#: Where each of them sits at the buffer.
SEATS: dict[str, dict[str, Any]] = {
    "actor": {"name": "actor", "role": "actor", "roles": ROLES},
    "critic": {"name": "actor", "role": "critic", "roles": ROLES},
    "judge": {"name": "judge", "subscription": {"driving": False}},
    "left": {"name": "left", "subscription": {"driving": False, "share": "students"}},
    "right": {"name": "right", "subscription": {"driving": False, "share": "students"}},
}
#: Without a batch for so long, a trainer looks whether the actor is done.
LOOK_S = 5.0

Figures = dict[str, float]


class Scored(nn.Module):
    """The policy's body with one number per token instead of logits."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.body = AutoModel.from_pretrained(path, local_files_only=True)
        self.head = nn.Linear(self.body.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B, L] numbers; that of position t has seen tokens 0 .. t."""
        hidden = self.body(input_ids=tokens, attention_mask=inside(tokens, lengths)).last_hidden_state
        return self.head(hidden).squeeze(-1)


def inside(tokens: Tensor, lengths: Tensor) -> Tensor:
    """[B, L] 1 on tokens, 0 on padding."""
    return (torch.arange(tokens.shape[1]) < lengths[:, None]).long()


def policy_logprobs(model: nn.Module, data: dict[str, Any]) -> Tensor:
    """[B, L] log-probability of each token under the policy."""
    logits = model(input_ids=data["tokens"], attention_mask=inside(data["tokens"], data["lengths"])).logits
    return losses.token_logprobs(logits, data["tokens"], data["temperatures"])


def act(model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
    data = batch.padded()
    values = torch.from_numpy(batch.get("values"))  # the critic's; waits for them
    mask = data["loss_mask"]
    advantages = data["rewards"][:, None] - values
    advantages = advantages / (advantages[mask].std() + 1e-6)
    of = losses.bypass(policy_logprobs(model, data), data["logprobs"], advantages, mask, 0.2, 0.2)
    return of.loss.sum() / max(1, batch.counts["loss_tokens"]), {"reward": float(data["rewards"].mean())}


def value(model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
    data = batch.padded()
    # What is to be expected before a token is drawn: of the tokens before it.
    values = nn.functional.pad(model(data["tokens"], data["lengths"])[:, :-1], (1, 0))
    batch.put("values", values.detach())
    error = ((values - data["rewards"][:, None]) ** 2)[data["generated"]].mean()
    return error, {"value_error": float(error.detach())}


def tell_right(model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
    data = batch.padded()
    last = model(data["tokens"], data["lengths"]).gather(1, data["lengths"][:, None] - 1).squeeze(1)
    right = data["rewards"] > 0.5
    accuracy = ((last > 0) == right).float().mean()
    return nn.functional.binary_cross_entropy_with_logits(last, right.float()), {"accuracy": float(accuracy)}


def imitate(model: nn.Module, batch: Batch) -> tuple[Tensor, Figures]:
    data = batch.padded()
    wanted = data["generated"] & (data["rewards"] > 0.5)[:, None]
    loss = -(policy_logprobs(model, data) * wanted).sum() / wanted.sum().clamp(min=1)
    return loss, {"loss": float(loss.detach())}


STEPS: dict[str, Callable[[nn.Module, Batch], tuple[Tensor, Figures]]] = {
    "actor": act, "critic": value, "judge": tell_right, "left": imitate, "right": imitate,
}  # fmt: skip


class Learner:
    """A model with its optimizer, and where its checkpoints lie."""

    def __init__(self, who: str, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.who = who
        self.folder = config.run_dir / "checkpoints" / who
        scored = who in ("critic", "judge")
        self.model: nn.Module = (
            Scored(config.model.path)
            if scored
            else AutoModelForCausalLM.from_pretrained(config.model.path, local_files_only=True)
        )
        # What scores begins with a head that knows nothing.
        lr = config.trainer.lr * (10 if scored else 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def step(self, batch: Batch) -> Figures:
        loss, figures = STEPS[self.who](self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return figures

    def save(self, trainer: Trainer) -> None:
        state = trainer.state_dict()
        learner = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        checkpoint.save(self.folder, step=state["batch"], learner=learner, trainer=state)
        trainer.checkpointed()

    def restore(self, trainer: Trainer, at_most: int | None) -> None:
        found = checkpoint.latest(self.folder, at_most=at_most)
        if found is None:
            trainer.load_state_dict({"run": trainer.config.run, "subscription": trainer.name, "batch": 0})
            return
        self.model.load_state_dict(found.learner[0]["model"])
        self.optimizer.load_state_dict(found.learner[0]["optimizer"])
        trainer.load_state_dict(found.trainer)


def train(who: str, config: Config, at_most: int | None = None) -> None:
    """Train until the actor has made its steps. ``at_most``: restore no checkpoint of a later batch."""
    drives, settings = who == "actor", config.trainer
    with Trainer(config, **SEATS[who]) as trainer:
        learner = Learner(who, config)
        learner.restore(trainer, at_most)
        if drives:
            trainer.publish(learner.model)
        while not (drives and trainer.position >= settings.steps):
            try:
                batch = trainer.next(timeout=LOOK_S)
            except WaitTimeout:
                if trainer.version > settings.steps:
                    break
                continue
            figures = learner.step(batch)
            trainer.commit(batch)
            if drives:
                trainer.publish(learner.model, step=batch.n)
            if batch.n % settings.checkpoint_every == 0:
                learner.save(trainer)
            trainer.report(step=batch.n, version=batch.manifest.train_version, **figures)
            said = ", ".join(f"{name} {number:.3f}" for name, number in figures.items())
            print(f"{who}: batch {batch.n}, {batch.counts['groups']} groups, {said}", flush=True)
        learner.save(trainer)


def main() -> None:
    who, *overrides = sys.argv[1:] or [""]
    if who not in SEATS:
        sys.exit(f"usage: python train.py {'|'.join(SEATS)} [--a.b=c ...]")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    config = await_redis(load_config(Path(__file__).with_name("run.yaml"), overrides))
    at_most = None
    while True:
        try:
            return train(who, config, at_most)
        except OwnershipLost as exc:  # the actor was started again, and has gone back to its checkpoint
            at_most = None
            print(f"{who}: {exc}", flush=True)
        except RolesApart as exc:  # ... of an earlier batch than ours
            at_most = exc.batch
            print(f"{who}: {exc}", flush=True)


if __name__ == "__main__":
    main()
