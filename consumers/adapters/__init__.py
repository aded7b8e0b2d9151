"""Penstock in the shapes that other trainers have: slime, verl, TRL, plain PyTorch; each module imports its own."""
