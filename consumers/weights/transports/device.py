"""The GPU that weights are sent from."""

import torch

from penstock.config import TrainerConfig


def trainers_device(config: TrainerConfig) -> torch.device:
    """``trainer.device``; of "cuda" the present one, because each rank has its own."""
    is_present = config.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_present else torch.device(config.device)
