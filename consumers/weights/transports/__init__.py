"""Transports of weights that bypass the folder, the trainer's side: one file each (docs/consumers.md)."""
