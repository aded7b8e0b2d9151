"""What the routing of a sample must have been (T17), by a model in torch that follows what was recorded.

Sums of other order differ in the last digits, and of two experts with nearly the same logit either may be chosen. What
one position chose moves those behind it, so a model that chooses anew would call rows wrong for one tie before them:
this one takes the recorded experts, as a trainer does that replays them, and asks how far each was from being chosen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.workers.engine import Rows

#: A recorded expert may be worse than one that was left out by so much: far more than rounding, far less than another
#: pass would show.
CLOSE = 1e-4
#: Most that rounding moves a logit of the tiny mixture (7e-6 seen with weights that are off by their last bit).
ROUNDING = 2e-5


def are_wrong(model: Any, tokens: list[int], rows: Rows, known: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """[L - 1] whether the model would never have sent a position where its row says.

    Args:
        rows: [L - 1, layers, top_k].
        known: [L - 1] positions whose rows are of this model's pass, and are followed; it chooses for the others.

    Returns:
        None where it cannot be told, for the choice at another position before the last known one was nearly a tie.
    """
    recorded, follows = torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(known)
    with torch.inference_mode(), _following(model, recorded, follows):
        logits = model(input_ids=torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    last = int(np.flatnonzero(known)[-1])
    chosen = [table.topk(rows.shape[-1], -1).indices for table in logits]
    free = [_shortfall(table, own)[:last][~known[:last]] for table, own in zip(logits, chosen, strict=True)]
    if any((-gap < ROUNDING).any() for gap in free):
        return None
    short = [_shortfall(table, recorded[:, layer]) for layer, table in enumerate(logits)]
    wrong: NDArray[np.bool_] = (torch.stack(short) > CLOSE).any(0).numpy()
    return wrong


def _shortfall(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[L] by how much the worst of some experts [L, top_k] is below the best of the others; negative: it is above."""
    left_out = logits.scatter(-1, experts, -torch.inf).amax(-1)
    return left_out - logits.gather(-1, experts).amin(-1)


@contextmanager
def _following(model: Any, recorded: torch.Tensor, follows: torch.Tensor) -> Iterator[None]:
    """The gates of a Qwen3 mixture send the positions that are followed where they were recorded to go."""

    def hook_of(layer: int) -> Any:
        def follow(gate: Any, _: Any, made: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
            logits, _, chosen = made
            experts = torch.where(follows[:, None], recorded[:, layer], chosen)
            weights = torch.softmax(logits, -1).gather(-1, experts)
            return logits, weights / weights.sum(-1, keepdim=True), experts

        return follow

    hooks = [one.mlp.gate.register_forward_hook(hook_of(layer)) for layer, one in enumerate(model.model.layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
