"""Adapters to other trainers' interfaces: slime, verl, TRL, plain PyTorch; each module imports its own trainer."""
