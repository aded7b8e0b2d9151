"""A model that learns as one does in reinforcement learning, from nothing: its weights change as real ones do."""

from typing import Any

import torch
from torch import Tensor


class Policy:
    """A model that learns: what is published is rounded from float32 masters.

    Args:
        tokens: [B, L] of a batch for steps without one.
    """

    def __init__(self, model: Any, lr: float, tokens: Tensor) -> None:
        self.model = model
        self._tokens = tokens
        self._own = list(model.parameters())
        self._masters = [one.detach().float().clone() for one in self._own]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0.01, fused=self._masters[0].is_cuda)
        self._random = torch.Generator().manual_seed(0)

    def step(self, tokens: Tensor | None = None) -> None:
        """One optimizer step of a policy gradient whose advantages are random and sum to about 0."""
        tokens = (self._tokens if tokens is None else tokens).to(self._own[0].device)
        advantages = torch.randn(len(tokens), 1, generator=self._random).to(tokens.device)
        logits = self.model(tokens).logits[:, :-1].float()
        taken = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss: Any = (advantages * taken).mean()
        loss.backward()
        for master, own in zip(self._masters, self._own, strict=True):
            master.grad = None if own.grad is None else own.grad.float()
            own.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for master, own in zip(self._masters, self._own, strict=True):
                master.grad = None
                own.copy_(master)
