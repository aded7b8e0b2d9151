"""The worker's side of transports that bypass the folder: one file each (docs/workers.md)."""
