"""Adapt runs to the interfaces of slime, verl, TRL and plain PyTorch; each module imports only its own trainer."""
